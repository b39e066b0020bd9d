"""The longest hit that all groups agree on.

Promises the answers of vLLM 0.32's coordinator (`find_common_hit`), and the longest hit that a given presence
supports without any prune (`longest_supported`). Both collect the evidence that their answer rests on. It
reads no presence itself (finders do) and makes no plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvpool_agent.coordinator.finders import NO_HIT, Finder, FullAttentionFinder, Match, RecurrentStateFinder
from kvpool_agent.coordinator.masks import MaskShape
from kvpool_agent.coordinator.specs import Sizes, SpecGroup


@dataclass(frozen=True, slots=True)
class Member:
    """A spec group together with its finder over one presence."""

    group: SpecGroup
    finder: Finder

    @property
    def is_full(self) -> bool:
        """Whether a prefix of a hit is a hit too."""
        return isinstance(self.finder, FullAttentionFinder)


@dataclass(frozen=True, slots=True)
class Found:
    """A common hit: its tokens, one mask shape per member, and per member the units that the answer rests on."""

    hit: int
    shapes: tuple[MaskShape, ...]
    evidence: tuple[tuple[range, ...], ...]


@dataclass(slots=True)
class _Round:
    """What the fixed point remembers between two calls of finders."""

    members: Sequence[Member]
    last: dict[int, Match] = field(default_factory=dict)
    evidence: dict[int, list[range]] = field(default_factory=dict)
    pruned: set[int] = field(default_factory=set)

    def ask(self, index: int, limit: int, *, drop: bool) -> Match:
        match = self.members[index].finder.find(limit, drop=drop)
        self.last[index] = match
        self.evidence.setdefault(index, []).extend(match.evidence)
        return match

    def found(self, hit: int) -> Found:
        """Cut full attention's masks down to the common hit; the other kinds end there by themselves."""
        shapes = []
        for index, member in enumerate(self.members):
            shape = self.last[index].shape
            if member.is_full:
                shape = MaskShape(-(-hit // member.group.spec.block_size), 0)
            shapes.append(shape)
        evidence = tuple(tuple(self.evidence.get(index, ())) for index in range(len(self.members)))
        return Found(hit, tuple(shapes), evidence)


def margin(member: Member, sizes: Sizes) -> int:
    """Return how far past the candidate a pruned group may look, to drop back onto the candidate, in tokens.

    A recurrent state gets none: it would end ahead of what attention has verified.
    """
    if isinstance(member.finder, RecurrentStateFinder):
        return 0
    if member.is_full:
        return min(sizes.alignment, member.group.spec.block_size)
    return member.group.spec.block_size


def find_common_hit(
    members: Sequence[Member], sizes: Sizes, max_length: int, chain_tokens: int, *, apply_eagle: bool
) -> Found:
    """Return the longest common hit of at most `max_length` tokens, as vLLM 0.32 finds it.

    PRUNE_ONCE: with `apply_eagle` each eagle group is pruned once per candidate length, and again only if
    another group then shortened the candidate. Without it nothing is pruned.

    Args:
        members: full attention first.
        sizes: hash unit, scheduler block and alignment.
        max_length: tokens, at most `chain_tokens`.
        chain_tokens: tokens that the hash chain covers; a pruned group may look past `max_length`, never past
            these.
        apply_eagle: whether to prune.
    """
    rounds = _Round(members)
    if len(members) == 1:
        only = rounds.ask(0, max_length, drop=apply_eagle and members[0].group.eagle)
        return rounds.found(only.hit)
    best = max_length
    while True:
        current = best
        for index, member in enumerate(members):
            current = _shorten(rounds, index, member, current, sizes, chain_tokens, apply_eagle=apply_eagle)
        converged = current >= best
        best = current
        # Full attention supports every prefix of its hit, so one pass settles it together with one other
        # group.
        if converged or (len(members) == 2 and members[0].is_full):
            return rounds.found(best)


def _shorten(
    rounds: _Round,
    index: int,
    member: Member,
    current: int,
    sizes: Sizes,
    chain_tokens: int,
    *,
    apply_eagle: bool,
) -> int:
    """Return the candidate after one group has had its say."""
    if not current:
        # Nothing is shorter than nothing; asking would only make a staged lookup probe for no gain.
        rounds.last[index] = NO_HIT
        return 0
    if member.is_full and index in rounds.last:
        return min(current, rounds.last[index].hit)
    drop = apply_eagle and member.group.eagle and index not in rounds.pruned
    limit = min(current + margin(member, sizes), chain_tokens) if drop else current
    hit = rounds.ask(index, limit, drop=drop).hit
    if drop:
        rounds.pruned.add(index)
    elif hit < current:
        rounds.pruned.clear()
    return hit


def longest_supported(members: Sequence[Member], sizes: Sizes, limit: int) -> Found:
    """Return the longest aligned hit of at most `limit` tokens whose load mask names only present chunks.

    PRUNE_ONCE: it never prunes. LOAD_SUBSET_OF_VERIFIED: this is what a hit falls back to where vLLM's
    arithmetic would load an unseen chunk, and what a resume after a failure is. It is the greatest length
    that no group shortens any more, and a group leaves a length alone exactly if its own load mask of that
    length is present; so more presence never shortens it.
    """
    rounds = _Round(members)
    hit = sizes.align_down(limit)
    for index, member in enumerate(members):
        if isinstance(member.finder, FullAttentionFinder):
            match = member.finder.extent(hit)
            rounds.last[index] = match
            rounds.evidence[index] = list(match.evidence)
            hit = match.hit
    # Also a lone group is asked until it repeats itself: chunked local attention may answer from another
    # attention chunk.
    while True:
        before = hit
        for index, member in enumerate(members):
            if not member.is_full:
                hit = _shorten(rounds, index, member, hit, sizes, hit, apply_eagle=False)
        if hit == before:
            return rounds.found(hit)
