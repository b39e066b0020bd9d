"""Which chunks are worth asking the store about, and which are worth saving.

Promises vLLM 0.32's probe and store masks: a chunk inside a sliding window's past that no aligned hit can use
is neither. None means every chunk; an array of False means none. It looks at no presence and no keys.
"""

from collections.abc import Sequence

import numpy as np

from kvpool_agent.coordinator.finders import window_chunks
from kvpool_agent.coordinator.masks import BoolArray
from kvpool_agent.coordinator.specs import GroupKind, Sizes, SpecGroup


def replay_boundaries(num_prompt_tokens: int, sizes: Sizes, *, any_eagle: bool) -> tuple[int, ...]:
    """Return the token positions at which a replay of the same prompt would look for its hit.

    With pruning that is one scheduler block earlier, for a prompt that ends on a block and for a longer one.
    """
    if not any_eagle:
        return (num_prompt_tokens - 1,)
    step = sizes.scheduler_block
    ends = ((num_prompt_tokens - 1) // step * step, num_prompt_tokens // step * step)
    return tuple(max(0, end - step) for end in ends)


def window_mask(
    group: SpecGroup, sizes: Sizes, chunks: int, *, retention: int | None, boundaries: Sequence[int]
) -> BoolArray | None:
    """Return which of `chunks` chunks a sliding-window group keeps, or None for all of them.

    One window is kept in front of each segment's end: segments are scheduler blocks, or `retention` tokens
    (0: no segments). With a retention interval the windows in front of `boundaries` (tokens) are kept as
    well.
    """
    block = group.spec.block_size
    shift = int(group.eagle)
    need = window_chunks(group.spec) + shift
    segment = sizes.scheduler_block if retention is None else retention
    per_segment = segment // block
    kept = np.zeros(chunks, dtype=np.bool_)
    if segment:
        if need >= per_segment:
            return None
        index = np.arange(chunks)
        kept = (index >= shift) & ((index - shift) % per_segment >= per_segment - need)
    for boundary in boundaries if retention is not None else ():
        right = sizes.scheduler_block * (boundary // sizes.scheduler_block) // block + shift
        kept[max(0, right - need) : max(0, right)] = True
    return kept


def group_store_mask(
    group: SpecGroup,
    sizes: Sizes,
    token_len: int,
    *,
    start: int,
    retention: int | None,
    boundaries: Sequence[int],
) -> BoolArray | None:
    """Return which chunks from token `start` on are worth saving, or None for all of them.

    Recurrent states are never saved by mask: the engine saves them at the boundaries it chooses.
    """
    block = group.spec.block_size
    chunks = token_len // block
    first = -(-start // block)
    if group.spec.kind is GroupKind.MAMBA:
        return np.zeros(max(0, chunks - first), dtype=np.bool_)
    if group.spec.kind is not GroupKind.SLIDING_WINDOW:
        return None
    kept = window_mask(group, sizes, chunks, retention=retention, boundaries=boundaries)
    return None if kept is None else kept[first:]


def group_probe_mask(group: SpecGroup, sizes: Sizes, aligned_length: int) -> BoolArray | None:
    """Return which chunks of the first `aligned_length` tokens an aligned hit can need, or None for all of them."""
    if group.spec.kind is not GroupKind.SLIDING_WINDOW:
        return None
    return window_mask(group, sizes, aligned_length // group.spec.block_size, retention=None, boundaries=())
