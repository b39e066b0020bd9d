"""What a KV-cache group is, and how groups of equal spec are searched as one.

Promises that a `GroupSpec` that exists is valid by itself, and that `check_sizes` and `check_chunked_local`
refuse every combination of groups that the search has no meaning for, with an error that names the field, the
value and the way out. It knows no hashes, no presence and no masks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class SpecError(ValueError):
    """A group, or a combination of groups, that no hit can be computed for."""


class GroupKind(StrEnum):
    """How the layers of a group attend, which decides what of the past a hit needs."""

    FULL_ATTENTION = "full_attention"
    SLIDING_WINDOW = "sliding_window"
    CHUNKED_LOCAL = "chunked_local"
    MAMBA = "mamba"


def require_positive(name: str, value: object) -> int:
    """Return `value` if it is a whole number above zero, otherwise raise `SpecError` naming it."""
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise SpecError(f"{name} must be a whole number of tokens above 0, got {value!r}")
    return value


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One KV-cache group: layers that share a block table.

    Attributes:
        kind: how the layers attend.
        block_size: tokens in one block, and so in one chunk.
        sliding_window: tokens that a token attends to, itself among them; for `SLIDING_WINDOW` only.
        chunk_size: tokens in one attention chunk; for `CHUNKED_LOCAL` only.
        eagle: the drafter reads this group, so a lookup drops its last matched block.
        variant: whatever else tells two specs apart (head geometry, dtype). Groups are searched as one only
            if they are equal in everything but `eagle`.

    Raises:
        SpecError: a size is missing, not positive, or does not belong to the kind.
    """

    kind: GroupKind
    block_size: int
    sliding_window: int | None = None
    chunk_size: int | None = None
    eagle: bool = False
    variant: str = ""

    def __post_init__(self) -> None:
        """Check every field against the kind."""
        if not isinstance(self.kind, GroupKind):
            raise SpecError(f"kind must be a GroupKind, got {self.kind!r}; use one of {', '.join(GroupKind)}")
        require_positive("block_size", self.block_size)
        for name, owner, value in (
            ("sliding_window", GroupKind.SLIDING_WINDOW, self.sliding_window),
            ("chunk_size", GroupKind.CHUNKED_LOCAL, self.chunk_size),
        ):
            if self.kind is owner:
                require_positive(f"{name} of a {owner} group", value)
            elif value is not None:
                raise SpecError(
                    f"{name}={value!r} given for a {self.kind} group; leave it out or use {owner}"
                )

    @property
    def identity(self) -> tuple[str, int, int | None, int | None, str]:
        """What two groups must have in common to be searched as one."""
        return (self.kind.value, self.block_size, self.sliding_window, self.chunk_size, self.variant)


@dataclass(frozen=True, slots=True)
class SpecGroup:
    """Groups of equal spec, searched as one: a chunk counts as present only if every member has it.

    Attributes:
        spec: the spec that the members share.
        members: indices of the groups, in group order.
        eagle: a lookup prunes this spec group.
    """

    spec: GroupSpec
    members: tuple[int, ...]
    eagle: bool


@dataclass(frozen=True, slots=True)
class Sizes:
    """The token sizes that every group shares.

    Attributes:
        hash_block: tokens in one hash unit.
        scheduler_block: tokens that every group's block divides.
        alignment: every hit is a multiple of this many tokens.
    """

    hash_block: int
    scheduler_block: int
    alignment: int

    def align_down(self, tokens: int) -> int:
        """Return the largest possible hit length not above `tokens`, in tokens."""
        return tokens - tokens % self.alignment


def form_spec_groups(groups: Sequence[GroupSpec], *, use_eagle: bool) -> tuple[SpecGroup, ...]:
    """Merge groups of equal spec, full attention first, and settle which of them are pruned.

    The flag of one member holds for all members. If speculative decoding is on and nobody is flagged,
    everybody is. A flag without `use_eagle` counts all the same (vLLM 0.32 behaves so).
    """
    members: dict[tuple[str, int, int | None, int | None, str], list[int]] = {}
    for index, spec in enumerate(groups):
        members.setdefault(spec.identity, []).append(index)
    all_flagged = use_eagle and not any(spec.eagle for spec in groups)
    merged = [
        SpecGroup(groups[indices[0]], tuple(indices), all_flagged or any(groups[i].eagle for i in indices))
        for indices in members.values()
    ]
    return tuple(sorted(merged, key=lambda group: group.spec.kind is not GroupKind.FULL_ATTENTION))


def check_sizes(groups: Sequence[GroupSpec], sizes: Sizes) -> None:
    """Raise `SpecError` if the block sizes do not divide each other the way that chunk keys need."""
    require_positive("hash_block_size", sizes.hash_block)
    require_positive("scheduler_block_size", sizes.scheduler_block)
    if not groups:
        raise SpecError("a coordinator needs at least one KV-cache group, got none")
    if sizes.scheduler_block % sizes.hash_block:
        raise SpecError(
            f"scheduler_block_size={sizes.scheduler_block} is not a multiple of hash_block_size={sizes.hash_block}"
        )
    for index, spec in enumerate(groups):
        if spec.block_size % sizes.hash_block:
            raise SpecError(
                f"group {index}: block_size={spec.block_size} is not a multiple of hash_block_size={sizes.hash_block}; "
                "a chunk is named by the hash unit that closes it"
            )
        if sizes.scheduler_block % spec.block_size:
            raise SpecError(
                f"group {index}: block_size={spec.block_size} does not divide "
                f"scheduler_block_size={sizes.scheduler_block}; "
                "use the least common multiple of the groups' block sizes"
            )


def check_chunked_local(spec_groups: Sequence[SpecGroup], sizes: Sizes) -> None:
    """Raise `SpecError` for chunked local attention that vLLM itself cannot look up (it asserts)."""
    for group in spec_groups:
        if group.spec.kind is not GroupKind.CHUNKED_LOCAL:
            continue
        if group.eagle:
            raise SpecError(
                f"groups {list(group.members)}: chunked local attention cannot be pruned for EAGLE/MTP; "
                "flag the group that the drafter reads, or turn use_eagle off"
            )
        if group.spec.block_size != sizes.alignment:
            raise SpecError(
                f"groups {list(group.members)}: chunked local attention needs block_size == hit alignment, got "
                f"{group.spec.block_size} and {sizes.alignment}; give all groups one block size"
            )
