"""One rich identity and its extras, every field set: what digests, keys and their golden values are tested on."""

from __future__ import annotations

from kvpool_wire import agent_pb2 as pb


def rich_identity() -> pb.Identity:
    """A hybrid engine: full attention with K and V apart and scales, a window over two stages, every field set."""
    k = pb.TensorFormat(dtype="float8_e4m3fn", axes=["token", "head", "content"], shape=[16, 2, 64])
    scale = pb.TensorFormat(dtype="float32", axes=["token", "head"], shape=[16, 2])
    window = pb.TensorFormat(dtype="bfloat16", axes=["kv", "head", "token", "content"], shape=[2, 2, 16, 64])
    return pb.Identity(
        model="org/model-8b",
        fingerprint="rev-1",
        engine="vllm 0.32.0",
        hash_algorithm="sha256_cbor",
        hash_seed=b"seed",
        hash_block_size=16,
        scheduler_block_size=32,
        use_eagle=True,
        partial_hits=True,
        retention_interval=64,
        groups=[
            pb.Group(
                kind=pb.FULL_ATTENTION,
                block_size=16,
                sliding_window=7,
                chunk_size=9,
                eagle=True,
                variant="plain",
                shards_per_stage=2,
                layers=[
                    pb.Layer(name="layers.0.attn", tensors=[k, k, scale], stage=1),
                    pb.Layer(name="layers.1.attn", tensors=[k, k, scale], stage=2),
                ],
            ),
            pb.Group(
                kind=pb.SLIDING_WINDOW,
                block_size=32,
                sliding_window=128,
                shards_per_stage=1,
                layers=[pb.Layer(name="layers.2.attn", tensors=[window])],
            ),
        ],
    )


def rich_extras() -> pb.Extras:
    """LoRA, salt and two media items."""
    return pb.Extras(lora_name="adapter", lora_revision="r1", cache_salt="salt", media=["image-1", "image-2"])
