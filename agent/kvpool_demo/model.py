"""The demo's engine: a small hybrid model with an EAGLE drafter, described as an engine would describe its own.

Full attention (eight layers and the drafter's) beside a sliding window of 64 tokens (eight layers), two tensor-parallel
ranks, blocks of 16 tokens, bfloat16.
"""

from typing import Final

from kvpool_wire import agent_pb2 as pb

RANKS: Final = 2
BLOCKS: Final = 512
"""Blocks of each group in one engine's KV pool."""

BLOCK_TOKENS: Final = 16
WINDOW_TOKENS: Final = 64
KV_HEADS: Final = 4
HEAD_DIM: Final = 64
NULL_BLOCK: Final = 0
"""As in vLLM: the block that stands for "none" is never written nor read."""

FULL: Final = 0
WINDOW: Final = 1

_KV = pb.TensorFormat(
    dtype="bfloat16", axes=["kv", "token", "head", "content"], shape=[2, BLOCK_TOKENS, KV_HEADS, HEAD_DIM]
)
BLOCK_SHAPE: Final = tuple(_KV.shape)


def identity() -> pb.Identity:
    """All that decides which bytes the demo's keys hold."""
    layers = [pb.Layer(name=f"model.layers.{index}.attn", tensors=[_KV]) for index in range(16)]
    drafter = pb.Layer(name="draft.layers.0.attn", tensors=[_KV])
    full = pb.Group(
        kind=pb.FULL_ATTENTION,
        block_size=BLOCK_TOKENS,
        eagle=True,
        layers=[*layers[0::2], drafter],
        shards_per_stage=RANKS,
    )
    window = pb.Group(
        kind=pb.SLIDING_WINDOW,
        block_size=BLOCK_TOKENS,
        sliding_window=WINDOW_TOKENS,
        layers=layers[1::2],
        shards_per_stage=RANKS,
    )
    return pb.Identity(
        model="kvpool-demo",
        fingerprint="made-up weights, revision 1",
        engine="demo 1",
        hash_algorithm="sha256 of the unit and the hash before it",
        hash_seed=b"kvpool demo",
        hash_block_size=BLOCK_TOKENS,
        scheduler_block_size=BLOCK_TOKENS,
        use_eagle=True,
        groups=[full, window],
    )
