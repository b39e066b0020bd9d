"""A slow, obvious model of the coordinator, written from the design's words alone.

It promises to say, with lists, sets and loops, what a lookup, a load mask, a store mask and a resume must answer, so
that the vectorised coordinator can be compared with something that is easy to believe. It agrees with every golden
vector (tests/property/test_oracle_golden.py), and it states the load mask and the resume declaratively: not "what does
the search do?" but "which is the largest length whose every named chunk is there?".
It refuses to be fast, to check its input, and to import anything of the product: sharing code would share mistakes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

FULL = "full_attention"
WINDOW = "sliding_window"
CHUNKED = "chunked_local"
MAMBA = "mamba"

Mask = list[bool]


@dataclass(frozen=True, slots=True)
class Group:
    """One KV-cache group; sizes in tokens."""

    kind: str
    block: int
    window: int = 0
    chunk: int = 0
    eagle: bool = False
    variant: str = ""

    @property
    def spec(self) -> tuple[str, int, int, int, str]:
        """Everything but the eagle flag: groups that are equal in it are searched as one."""
        return (self.kind, self.block, self.window, self.chunk, self.variant)


@dataclass(frozen=True, slots=True)
class Case:
    """A layout, a request (`num_hashes`, `max_length` tokens) and what the store holds (`exists`: (group, unit))."""

    groups: tuple[Group, ...]
    unit: int
    scheduler_block: int
    use_eagle: bool = False
    partial: bool = False
    retention: int | None = None
    num_hashes: int = 0
    max_length: int = 0
    exists: frozenset[tuple[int, int]] = field(default_factory=frozenset)

    @property
    def align(self) -> int:
        """Tokens that every hit is a multiple of."""
        return self.unit if self.partial else self.scheduler_block

    @property
    def chain(self) -> int:
        """Tokens that the hash chain covers."""
        return self.num_hashes * self.unit

    @property
    def limit(self) -> int:
        """The longest hit that may be asked for: a length beyond the chain is clipped, not an error."""
        return min(self.max_length, self.chain)

    def closing(self, group: int, chunk: int) -> int:
        """The hash unit that closes a chunk: its key is made from this one."""
        return (chunk + 1) * (self.groups[group].block // self.unit) - 1

    def everything(self) -> Case:
        """The same request on a store that has every key."""
        return replace(
            self, exists=frozenset((g, u) for g in range(len(self.groups)) for u in range(self.num_hashes))
        )


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


# --- which groups are searched together, and which of them prune ------------------------------------------------


def spec_groups(case: Case) -> list[tuple[list[int], bool]]:
    """(members, eagle) of each set of groups with one spec, full attention first, otherwise in order of appearance.

    A chunk of such a set is present only if every member has it, and one flagged member flags them all. Speculative
    decoding without any flagged group flags every group.
    """
    merged: dict[tuple[str, int, int, int, str], list[int]] = {}
    for index, group in enumerate(case.groups):
        merged.setdefault(group.spec, []).append(index)
    sets = [(members, any(case.groups[m].eagle for m in members)) for members in merged.values()]
    if case.use_eagle and not any(eagle for _, eagle in sets):
        sets = [(members, True) for members, _ in sets]
    return [s for s in sets if case.groups[s[0][0]].kind == FULL] + [
        s for s in sets if case.groups[s[0][0]].kind != FULL
    ]


def eagle_groups(case: Case) -> list[int]:
    """The groups that the prune applies to, in group order."""
    return sorted(m for members, eagle in spec_groups(case) if eagle for m in members)


# --- one set of groups: the longest hit up to a limit -----------------------------------------------------------


def find_one(case: Case, members: Sequence[int], limit: int, *, drop: bool) -> tuple[int, Mask]:
    """The longest hit of at most `limit` tokens for groups of one spec; `drop` takes the last matched block away."""
    finders: dict[str, Callable[..., tuple[int, Mask]]] = {
        FULL: _find_full,
        WINDOW: _find_window,
        CHUNKED: _find_chunked,
        MAMBA: _find_mamba,
    }
    return finders[case.groups[members[0]].kind](case, members, limit, drop=drop)


def _has(case: Case, members: Iterable[int], unit: int) -> bool:
    return 0 <= unit < case.num_hashes and all((m, unit) in case.exists for m in members)


def _block_there(case: Case, members: Sequence[int], chunk: int) -> bool:
    return _has(case, members, case.closing(members[0], chunk))


def _find_full(case: Case, members: Sequence[int], limit: int, *, drop: bool) -> tuple[int, Mask]:
    """A run from the start: every block that ends inside the hit, and the very unit if the hit ends inside a block."""
    block = case.groups[members[0]].block
    step = min(block, case.align)
    hit = 0
    for length in range(0, limit + 1, step if case.partial else block):
        whole = all(_block_there(case, members, c) for c in range(length // block))
        if whole and (length % block == 0 or _has(case, members, length // case.unit - 1)):
            hit = length
    if drop and hit:
        hit -= step
    hit -= hit % case.align
    return hit, [True] * ceil_div(hit, block)


def _find_window(case: Case, members: Sequence[int], limit: int, *, drop: bool) -> tuple[int, Mask]:
    """From the right, the first long enough run that ends well; a shorter one counts only at the very start."""
    group = case.groups[members[0]]
    extra = 1 if drop else 0
    need = max(1, ceil_div(group.window - 1, group.block) + extra)

    def ends_well(blocks: int) -> bool:
        return group.block == case.align or (blocks - extra) * group.block % case.align == 0

    def there(first: int, end: int) -> bool:
        return all(_block_there(case, members, c) for c in range(first, end))

    for end in range(limit // group.block, need - 1, -1):
        if ends_well(end) and there(end - need, end):
            kept = end - extra
            return kept * group.block, [c >= end - need for c in range(kept)]
    return _window_prefix(
        case, group, [e for e in range(1, limit // group.block + 1) if ends_well(e) and there(0, e)], extra
    )


def _window_prefix(case: Case, group: Group, ends: Sequence[int], extra: int) -> tuple[int, Mask]:
    """The prefix is shorter than the window. The double rounding is the reference's: it may lose a block, never lie."""
    per = max(1, case.align // group.block)
    kept = max(ends, default=0) // per * per
    if extra and kept:
        kept = (kept - 1) // per * per
    return kept * group.block, [True] * kept


def _find_chunked(case: Case, members: Sequence[int], limit: int, *, drop: bool) -> tuple[int, Mask]:
    """What lies before the current attention chunk is free; from there a run."""
    if drop:
        raise ValueError("chunked local attention cannot be pruned")
    group = case.groups[members[0]]
    start = limit // group.chunk * group.chunk // group.block
    end = start
    while end < limit // group.block and _block_there(case, members, end):
        end += 1
    return end * group.block, [c >= start for c in range(end)]


def _find_mamba(case: Case, members: Sequence[int], limit: int, *, drop: bool) -> tuple[int, Mask]:
    """The rightmost present state on an aligned boundary; only that state loads; never pruned."""
    del drop
    block = case.groups[members[0]].block
    for length in range(limit, 0, -1):
        boundary = length % case.align == 0 and (case.partial or length % block == 0)
        if boundary and _has(case, members, length // case.unit - 1):
            chunks = ceil_div(length, block)
            return length, [c == chunks - 1 for c in range(chunks)]
    return 0, []


# --- several groups: one length for all -------------------------------------------------------------------------


def lookup(case: Case, *, prune: bool = True) -> tuple[int, list[Mask]]:
    """(hit, mask per group) of a lookup, before LOAD_SUBSET_OF_VERIFIED has its say (see `plan`)."""
    sets = spec_groups(case)
    if len(sets) == 1:
        members, eagle = sets[0]
        hit, mask = find_one(case, members, case.limit, drop=prune and eagle)
        return hit, [mask for _ in case.groups]
    hit, found = _fixed_point(case, sets, prune=prune)
    masks: list[Mask] = [[] for _ in case.groups]
    for index, (members, _) in enumerate(sets):
        for m in members:
            masks[m] = found[index][: ceil_div(hit, case.groups[m].block)]
    return hit, masks


def _fixed_point(
    case: Case, sets: Sequence[tuple[list[int], bool]], *, prune: bool
) -> tuple[int, dict[int, Mask]]:
    """Shorten until all agree. A group that has pruned does so again only after another group shortened the hit."""
    best = case.limit
    pruned: set[int] = set()
    full_hit: dict[int, int] = {}
    masks: dict[int, Mask] = {}
    simple = len(sets) == 2 and case.groups[sets[0][0][0]].kind == FULL
    while True:
        now = best
        for index, (members, eagle) in enumerate(sets):
            if index in full_hit:
                now = min(now, full_hit[index])
                continue
            group = case.groups[members[0]]
            drop = prune and eagle and index not in pruned
            limit = min(now + _look_past(case, group), case.chain) if drop else now
            hit, masks[index] = find_one(case, members, limit, drop=drop)
            if drop:
                pruned.add(index)
            elif hit < now:
                pruned.clear()
            if group.kind == FULL:
                full_hit[index] = hit
            now = hit
        settled = now >= best
        best = now
        if settled or simple:
            return best, masks


def _look_past(case: Case, group: Group) -> int:
    """How far past the candidate an eagle group may look: the block that it will drop. A state is never pruned."""
    if group.kind == MAMBA:
        return 0
    return case.unit if case.partial and group.kind == FULL else group.block


# --- the load side: declarative, and it never prunes ------------------------------------------------------------


def load_mask(case: Case, length: int) -> list[Mask]:
    """Which chunks must hold real bytes for a prefix of `length` tokens: a definition, not a search."""
    length = min(length, case.chain)
    length -= length % case.align
    masks: list[Mask] = []
    for group in case.groups:
        chunks = ceil_div(length, group.block)
        first = {
            FULL: 0,
            WINDOW: chunks - max(1, ceil_div(group.window - 1, group.block)),
            CHUNKED: length // group.chunk * group.chunk // group.block if group.chunk else 0,
            MAMBA: chunks - 1,
        }[group.kind]
        masks.append([c >= first for c in range(chunks)])
    return masks


def load_mask_by_search(case: Case, length: int) -> list[Mask]:
    """The same by the design's recipe: a lookup without the prune on a store that has everything."""
    return lookup(replace(case.everything(), max_length=length), prune=False)[1]


def serving_units(case: Case, group: int, chunk: int, length: int) -> list[int]:
    """The units whose key can stand for `chunk` in a hit of `length`.

    Its closing unit. Where the hit ends inside the block: for attention every unit of that block at or past the hit
    (its tokens are this request's own chain); for a recurrent state only the very boundary.
    """
    closing = case.closing(group, chunk)
    if (closing + 1) * case.unit <= length:
        return [closing]
    boundary = length // case.unit - 1
    units = [boundary] if case.groups[group].kind == MAMBA else list(range(boundary, closing + 1))
    return [u for u in units if u < case.num_hashes]


def verified(case: Case, length: int) -> bool:
    """LOAD_SUBSET_OF_VERIFIED for this length: every chunk that its load mask names is there under a serving key."""
    return all(
        any((g, u) in case.exists for u in serving_units(case, g, c, length))
        for g, mask in enumerate(load_mask(case, length))
        for c, named in enumerate(mask)
        if named
    )


def longest_verified(case: Case, at_most: int) -> int:
    """The longest aligned length up to `at_most` tokens that is verified; an empty prefix always is."""
    return max(length for length in range(0, at_most + 1, case.align) if verified(case, length))


def plan(case: Case) -> tuple[int, list[Mask]]:
    """(hit, masks) that an agent may promise: the lookup's hit, or the longest one below it that is verified."""
    hit = longest_verified(case, lookup(case)[0])
    return hit, load_mask(case, hit)


def local_chunks(case: Case, group: int, start: int) -> set[int]:
    """The blocks that an engine with `start` tokens surely has: those that computing the token at `start` reads.

    Only blocks that end at or before `start`: one that it cuts may be written by the load.
    """
    one = case.groups[group]
    read = {
        FULL: range(start),
        WINDOW: range(start - one.window + 1, start),
        CHUNKED: range(start // one.chunk * one.chunk if one.chunk else 0, start),
        MAMBA: range(start - 1, start) if start % one.block == 0 else range(0),
    }[one.kind]
    return {
        token // one.block for token in read if token >= 0 and (token // one.block + 1) * one.block <= start
    }


def resume_length(case: Case, hit: int, arrived: Sequence[Sequence[bool]], start: int = 0) -> int:
    """The largest aligned length up to `hit` for which every chunk that its load mask names is there.

    `arrived[group][chunk]`, chunks of the hit. A chunk is there if it arrived; if the plan does not load it, also if
    it is local, with `start` tokens in the engine. A recurrent state is the one at the end of its chunk, or at the hit
    for the last chunk; it serves that length alone.
    """
    loaded = load_mask(case, hit)
    local = [local_chunks(case, group, start) for group in range(len(case.groups))]

    def serves(group: int, chunk: int, length: int) -> bool:
        state_at = min((chunk + 1) * case.groups[group].block, hit)
        there = arrived[group][chunk] or (chunk in local[group] and not loaded[group][chunk])
        return there and (case.groups[group].kind != MAMBA or state_at == length)

    return max(
        length
        for length in range(0, hit + 1, case.align)
        if all(
            serves(g, c, length)
            for g, mask in enumerate(load_mask(case, length))
            for c, named in enumerate(mask)
            if named
        )
    )


# --- what is worth saving, what is worth asking ------------------------------------------------------------------


def store_mask(case: Case, length: int, *, start: int = 0, prompt: int | None = None) -> list[Mask | None]:
    """Which chunks from token `start` on are worth saving of a prefix of `length` tokens; None means all of them."""
    eagle = eagle_groups(case)
    boundaries = _replay_boundaries(case, prompt, pruned=bool(eagle))
    masks: list[Mask | None] = []
    for index, group in enumerate(case.groups):
        if group.kind == MAMBA:
            mask: Mask | None = [False] * (length // group.block)
        elif group.kind == WINDOW:
            mask = _window_tails(case, group, length, index in eagle, case.retention, boundaries)
        else:
            mask = None
        masks.append(mask if mask is None else mask[ceil_div(start, group.block) :])
    return masks


def probe_mask(case: Case, length: int) -> list[Mask | None]:
    """Which chunks of an aligned prefix a lookup has to ask about; None means all of them."""
    eagle = eagle_groups(case)
    return [
        _window_tails(case, group, length, index in eagle, None, []) if group.kind == WINDOW else None
        for index, group in enumerate(case.groups)
    ]


def _replay_boundaries(case: Case, prompt: int | None, *, pruned: bool) -> list[int]:
    """Where the same prompt, sent again, will look: one scheduler block lower under EAGLE."""
    if prompt is None or case.retention is None:
        return []
    size = case.scheduler_block
    if not pruned:
        return [prompt - 1]
    return [max(0, (prompt - 1) // size * size - size), max(0, prompt // size * size - size)]


def _window_tails(
    case: Case, group: Group, length: int, eagle: bool, retention: int | None, boundaries: Sequence[int]
) -> Mask | None:
    """The last blocks before each place where a hit can end, one block later for a group that prunes."""
    extra = 1 if eagle else 0
    need = ceil_div(group.window - 1, group.block) + extra
    chunks = length // group.block
    mask = [False] * chunks
    segment = case.scheduler_block if retention is None else retention
    if segment:
        per = segment // group.block
        if need >= per:
            return None
        mask = [c >= extra and (c - extra) % per >= per - need for c in range(chunks)]
    for boundary in boundaries:
        right = boundary // case.scheduler_block * case.scheduler_block // group.block + extra
        for chunk in range(max(0, right - need), min(right, chunks)):
            mask[chunk] = True
    return mask
