"""`KVCoordinator`: what of a prompt is cached, and which chunks must hold real bytes for it.

Promises: PRUNE_ONCE (only a lookup prunes), LOAD_SUBSET_OF_VERIFIED (a plan names only keys that were seen),
MASK_COVERS_HIT (one mask entry per block of the hit). Pure: the same arguments give the same answer, nothing
is read but the arguments, no clock, no store. It knows hash units by number only; what the hashes are is the
caller's affair.
"""

from collections.abc import Callable, Sequence, Sized
from typing import TypeAlias

from kvpool_agent.coordinator.finders import make_finder, merge_members
from kvpool_agent.coordinator.masks import (
    BoolArray,
    Everything,
    KeyUnitCache,
    MaskCache,
    MaskShape,
    Seen,
    unit_presence,
)
from kvpool_agent.coordinator.plan import (
    GroupPlan,
    Plan,
    PlanError,
    arrived_units,
    check_group,
    expected_group,
    group_plan,
    tail_candidates,
)
from kvpool_agent.coordinator.retention import group_probe_mask, group_store_mask, replay_boundaries
from kvpool_agent.coordinator.search import Found, Member, find_common_hit, longest_supported
from kvpool_agent.coordinator.specs import (
    GroupSpec,
    Sizes,
    SpecError,
    SpecGroup,
    check_chunked_local,
    check_sizes,
    form_spec_groups,
)
from kvpool_agent.coordinator.steps import Evidence, LookupSteps

Presence: TypeAlias = Sequence[BoolArray]
Masks: TypeAlias = tuple[BoolArray, ...]


def _tokens(name: str, value: int) -> int:
    if value < 0:
        raise ValueError(f"{name} must not be negative, got {value}")
    return value


class KVCoordinator:
    """The hit search of one engine's KV-cache groups.

    Args:
        groups: one spec per group, in group order.
        hash_block_size: tokens in one hash unit; divides every block size.
        scheduler_block_size: tokens; every block size divides it, and it is the alignment of a hit.
        use_eagle: speculative decoding drops the last matched block of the eagle groups (of all groups if
            none is flagged).
        retention_interval: tokens between two saved windows of a sliding-window group; 0 for none, None for
            one a scheduler block.
        partial_hits: a hit may end on any hash unit, inside a block.

    Raises:
        SpecError: the sizes do not divide each other, or a chunked-local group would have to be pruned or
            realigned.
    """

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        *,
        hash_block_size: int,
        scheduler_block_size: int,
        use_eagle: bool,
        retention_interval: int | None = None,
        partial_hits: bool = False,
    ) -> None:
        """Check the sizes and form the spec groups; see the class."""
        alignment = hash_block_size if partial_hits else scheduler_block_size
        self.groups: tuple[GroupSpec, ...] = tuple(groups)
        self.sizes = Sizes(hash_block_size, scheduler_block_size, alignment)
        check_sizes(self.groups, self.sizes)
        if retention_interval is not None and (
            retention_interval < 0 or retention_interval % scheduler_block_size
        ):
            raise SpecError(
                f"retention_interval={retention_interval} must be a multiple of "
                f"scheduler_block_size={scheduler_block_size}, 0 for no interval, or None"
            )
        self.retention_interval = retention_interval
        self.spec_groups: tuple[SpecGroup, ...] = form_spec_groups(self.groups, use_eagle=use_eagle)
        check_chunked_local(self.spec_groups, self.sizes)
        self._alone = tuple(
            SpecGroup(self.groups[member], (member,), eagle=False)
            for group in self.spec_groups
            for member in group.members
        )
        self._merges = len(self._alone) != len(self.spec_groups)
        self._cache = MaskCache()
        self._keys = KeyUnitCache()

    @property
    def alignment(self) -> int:
        """Every hit length is a multiple of this many tokens."""
        return self.sizes.alignment

    @property
    def eagle_groups(self) -> tuple[int, ...]:
        """Indices of the groups that a lookup prunes, ascending."""
        return tuple(sorted(member for group in self.spec_groups if group.eagle for member in group.members))

    def find_longest_cache_hit(
        self, hashes: Sized, max_length: int, exists: Presence, *, apply_eagle: bool = True
    ) -> tuple[Masks, int]:
        """Return the lookup masks and the hit length, exactly as vLLM 0.32 finds them.

        That includes a defect of vLLM: where a window is one token wide and pruned, the chunk at the end of
        the hit was never looked at, and its mask entry is False. `plan` repairs that; load by a plan, never
        by these masks.

        Args:
            hashes: the request's hash chain; only its length counts.
            max_length: the longest hit allowed, tokens. Clipped to the chain. An engine has to compute at
                least one token of its prompt, so a scheduler passes the number of prompt tokens less one. (A
                hit that turns out to cover the whole prompt must be searched again with that limit; cutting
                it by arithmetic could end where a window is not present.)
            exists: per group, presence by hash unit; what is past the end of an array is absent. A chunk is
                present only if every KV shard of it is; chunk i of a group whose block has s units is the
                entry (i + 1) * s - 1.
            apply_eagle: prune for EAGLE/MTP. PRUNE_ONCE: a lookup is the only caller that leaves this on.

        Returns:
            One read-only boolean array per group with one entry per block that the hit covers, and the hit in
            tokens.

        Raises:
            ValueError: `exists` has another shape, or `max_length` is negative.
        """
        num_units = len(hashes)
        presence = unit_presence(exists, len(self.groups), num_units)
        found = self._search(self._members(presence), num_units, max_length, apply_eagle=apply_eagle)
        return self._group_masks(found), found.hit

    def load_mask(self, hashes: Sized, token_len: int) -> Masks:
        """Return which chunks must hold real bytes for a prefix of `token_len` tokens.

        This is the search above with `apply_eagle=False` on a pool in which everything exists. PRUNE_ONCE:
        `token_len` is a hit length, so a lookup has already pruned it. Pruning here again leaves the trailing
        block out of the load while the scheduler believes that it is cached; the engine then reads
        uninitialised memory and answers with other users' prompts (vLLM #43516).

        Args:
            hashes: the request's whole chain; only its length counts.
            token_len: tokens; what exceeds the chain or the last aligned boundary is not covered.

        Returns:
            One read-only boolean array per group. MASK_COVERS_HIT: exactly ceil(token_len / block_size)
            entries for a hit length.
        """
        found = self._load_shapes(len(hashes), token_len)
        return self._group_masks(found)

    def probe_mask(self, aligned_length: int) -> tuple[BoolArray | None, ...]:
        """Return per group which chunks below `aligned_length` tokens an aligned hit can need; None means all."""
        _tokens("aligned_length", aligned_length)
        return self._per_group(lambda group: group_probe_mask(group, self.sizes, aligned_length))

    def store_mask(
        self, token_len: int, *, start: int = 0, num_prompt_tokens: int | None = None
    ) -> tuple[BoolArray | None, ...]:
        """Return per group which chunks are worth saving; None means all.

        Args:
            token_len: tokens whose KV is complete.
            start: tokens already saved; the masks begin at the first chunk that starts at or after it.
            num_prompt_tokens: with a retention interval the windows that a replay of this prompt needs are
                kept too.
        """
        for name, value in (
            ("token_len", token_len),
            ("start", start),
            ("num_prompt_tokens", num_prompt_tokens or 0),
        ):
            _tokens(name, value)
        boundaries: tuple[int, ...] = ()
        if num_prompt_tokens:
            any_eagle = any(group.eagle for group in self.spec_groups)
            boundaries = replay_boundaries(num_prompt_tokens, self.sizes, any_eagle=any_eagle)
        return self._per_group(
            lambda group: group_store_mask(
                group,
                self.sizes,
                token_len,
                start=start,
                retention=self.retention_interval,
                boundaries=boundaries,
            )
        )

    def plan(self, hashes: Sized, max_length: int, exists: Presence) -> Plan:
        """Look up: hit length, masks, and per loaded chunk the key that was seen.

        LOAD_SUBSET_OF_VERIFIED: every chunk that the plan loads was present in `exists` under the unit it
        names. Where vLLM's own arithmetic breaks that, the hit is the longest one, not above vLLM's, for
        which it holds. The masks are always `load_mask(hashes, hit_length)`, which is what the loading side
        recomputes. Arguments and errors are those of `find_longest_cache_hit`.
        """
        num_units = len(hashes)
        presence = unit_presence(exists, len(self.groups), num_units)
        return self.plan_with_evidence(num_units, max_length, presence)[0]

    def plan_with_evidence(
        self, num_units: int, max_length: int, presence: list[BoolArray]
    ) -> tuple[Plan, Evidence]:
        """Return the plan, and per group the hash units that it rests on.

        If those are present and what `presence` calls absent is absent, no other unit can change the plan.

        Args:
            num_units: hash units in the chain.
            max_length: tokens.
            presence: one boolean array of exactly `num_units` per group.
        """
        evidence: Evidence = [[] for _ in self.groups]
        merged = self._members(presence)
        pruned = self._search(merged, num_units, max_length, apply_eagle=True)
        self._collect(evidence, self.spec_groups, pruned)
        unpruned = pruned
        if self.eagle_groups:
            unpruned = self._search(merged, num_units, max_length, apply_eagle=False)
            self._collect(evidence, self.spec_groups, unpruned)
        alone = self._members_alone(presence) if self._merges else merged
        supported = longest_supported(alone, self.sizes, pruned.hit)
        self._collect(evidence, self._alone, supported)
        plan = self._build_plan(num_units, supported.hit, max(supported.hit, unpruned.hit), presence)
        for index, spec in enumerate(self.groups):
            tail = tail_candidates(spec, self.sizes, plan.hit_length, num_units)
            if tail and plan.groups[index].mask[-1]:
                evidence[index].append(tail)
        return plan, evidence

    def check_plan(self, hashes: Sized, plan: Plan) -> None:
        """Refuse a plan that differs from what its own hit length means: the guard that a loading agent runs.

        MASK_COVERS_HIT: recomputes `load_mask(hashes, plan.hit_length)` and compares lengths and values. Every
        loaded chunk must be named by a unit of its own: the closing one, or one at or past the hit in the
        chunk inside which the hit ends.

        Raises:
            PlanError: saying what differs.
        """
        hit, num_units = plan.hit_length, len(hashes)
        if len(plan.groups) != len(self.groups):
            raise PlanError(f"plan has {len(plan.groups)} groups, the coordinator {len(self.groups)}")
        if not 0 <= hit <= num_units * self.sizes.hash_block:
            raise PlanError(
                f"plan has a hit of {hit} tokens, the chain covers 0 to {num_units * self.sizes.hash_block}"
            )
        if plan.hit_length_without_eagle < hit:
            raise PlanError(
                f"plan has a hit of {hit} tokens, above its {plan.hit_length_without_eagle} without the prune"
            )
        covered = self._load_shapes(num_units, hit)
        if covered.hit != hit:
            raise PlanError(f"no hit can end at {hit} tokens; the longest below it ends at {covered.hit}")
        for index, (shape, spec) in enumerate(zip(self._group_shapes(covered), self.groups, strict=True)):
            check_group(index, spec, self.sizes, plan, self._expected(spec, hit, shape), num_units)

    def resume_length(self, plan: Plan, arrived: Sequence[BoolArray], *, start: int = 0) -> int:
        """Return the tokens that need not be computed when only `arrived` came through of a load of `plan`.

        LOADED_OR_REPORTED: the longest aligned length, not above the hit, whose load mask names only chunks that
        arrived or are local; PRUNE_ONCE: found with the prune off. So it never exceeds the hit, equals it if every
        loaded chunk arrived, and turning a failed chunk into a good one never lowers it. A chunk that arrived and
        ends at the hit inside a block serves up to the hit; a recurrent state serves its own boundary only.

        Below `start` only what a hit of exactly `start` needs is local (see `plan.local_chunks`): a window that has
        moved on is gone. So where `start` is a boundary of every group the answer is `start` or more, and where it
        cuts a block an answer below it is proven by the masks or 0.

        Args:
            plan: made by this coordinator, or checked by it.
            arrived: per group, one boolean per block of the hit: True where the chunk arrived verified, or is known
                to be there; False for a chunk that the plan loads says that it failed, wherever it lies.
            start: tokens that the engine had before the load.

        Raises:
            ValueError: `arrived` has another shape, or `start` is negative.
        """
        presence = arrived_units(self.groups, self.sizes, plan, arrived, start=_tokens("start", start))
        return longest_supported(self._members_alone(presence), self.sizes, plan.hit_length).hit

    def lookup(self, hashes: Sized, max_length: int) -> LookupSteps:
        """Return a staged lookup: it says which units to ask about next, and ends in what `plan` would say."""
        return LookupSteps(self, len(hashes), _tokens("max_length", max_length))

    def _members(self, presence: list[BoolArray]) -> list[Member]:
        return self._with_finders(self.spec_groups, presence)

    def _members_alone(self, presence: list[BoolArray]) -> list[Member]:
        """Return one member per group.

        Without a prune, merging changes nothing but this: groups may know the last chunk by different keys.
        """
        return self._with_finders(self._alone, presence)

    def _with_finders(self, groups: Sequence[SpecGroup], presence: list[BoolArray]) -> list[Member]:
        members = []
        for group in groups:
            units = merge_members(presence, group.members)
            members.append(Member(group, make_finder(group.spec, self.sizes, Seen(units), units.size)))
        return members

    def _search(self, members: list[Member], num_units: int, max_length: int, *, apply_eagle: bool) -> Found:
        chain = num_units * self.sizes.hash_block
        limit = min(_tokens("max_length", max_length), chain)
        return find_common_hit(members, self.sizes, limit, chain, apply_eagle=apply_eagle)

    def _load_shapes(self, num_units: int, token_len: int) -> Found:
        everything = Everything(num_units)
        members = [
            Member(group, make_finder(group.spec, self.sizes, everything, num_units))
            for group in self.spec_groups
        ]
        return self._search(members, num_units, token_len, apply_eagle=False)

    def _group_shapes(self, found: Found) -> list[MaskShape]:
        shapes = [MaskShape(0, 0)] * len(self.groups)
        for group, shape in zip(self.spec_groups, found.shapes, strict=True):
            for member in group.members:
                shapes[member] = shape
        return shapes

    def _per_group(self, mask_of: Callable[[SpecGroup], BoolArray | None]) -> tuple[BoolArray | None, ...]:
        masks: list[BoolArray | None] = [None] * len(self.groups)
        for group in self.spec_groups:
            mask = mask_of(group)
            for member in group.members:
                masks[member] = mask
        return tuple(masks)

    def _group_masks(self, found: Found) -> Masks:
        return tuple(self._cache.mask(shape) for shape in self._group_shapes(found))

    def _build_plan(self, num_units: int, hit: int, without_eagle: int, presence: list[BoolArray]) -> Plan:
        covered = self._load_shapes(num_units, hit)
        if covered.hit != hit:
            raise PlanError(f"the search ended at {hit} tokens, the load mask covers {covered.hit}")
        groups = tuple(
            group_plan(spec, self.sizes, hit, self._expected(spec, hit, shape), shape.first, units)
            for spec, shape, units in zip(self.groups, self._group_shapes(covered), presence, strict=True)
        )
        return Plan(hit, without_eagle, groups)

    def _expected(self, spec: GroupSpec, hit: int, shape: MaskShape) -> GroupPlan:
        closing = self._keys.closing(spec.block_size // self.sizes.hash_block, shape.length)
        return expected_group(spec, self.sizes, hit, self._cache.mask(shape), shape.first, closing)

    @staticmethod
    def _collect(evidence: Evidence, groups: Sequence[SpecGroup], found: Found) -> None:
        for group, ranges in zip(groups, found.evidence, strict=True):
            for member in group.members:
                evidence[member].extend(ranges)


def check_plan(coordinator: KVCoordinator, hashes: Sized, plan: Plan) -> None:
    """Raise `PlanError` unless `plan` is what its own hit length means; see `KVCoordinator.check_plan`."""
    coordinator.check_plan(hashes, plan)
