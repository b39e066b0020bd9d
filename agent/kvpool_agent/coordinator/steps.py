"""Staged probing: which units to ask the store about, in what order, until the plan is certain.

Promises that the result is exactly the plan over the complete presence, that every chunk the plan loads was
asked about, and that with a full-attention group and an empty store the number of probes does not depend on
the length of the prompt. It makes no calls: the caller asks the store and feeds the answers.

How: plan as if every unit not asked yet were present. The plan's evidence is what it rests on. If all of it
has been asked, then every finder would give the same answer over the complete presence (what it found is
known to be there, what it passed over is known to be absent), so the plan stands. Otherwise ask for the
missing evidence, and for more around it each time, and plan again.
"""

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import numpy as np

from kvpool_agent.coordinator.finders import window_chunks
from kvpool_agent.coordinator.masks import BoolArray, IntArray
from kvpool_agent.coordinator.plan import Plan
from kvpool_agent.coordinator.specs import GroupKind, GroupSpec, Sizes, SpecGroup

Evidence: TypeAlias = list[list[range]]

FIRST_UNITS = 256
"""Units of full attention in the first question: enough to settle a miss, few enough to be free."""
GROWTH = 4
"""How much further to the left each question to the other groups reaches."""

_NOTHING: IntArray = np.zeros(0, dtype=np.int64)


class LookupStateError(RuntimeError):
    """A staged lookup was used out of order, or fed answers of another shape than its questions."""


class Planner(Protocol):
    """What a staged lookup needs of the coordinator."""

    groups: tuple[GroupSpec, ...]
    spec_groups: tuple[SpecGroup, ...]
    sizes: Sizes

    def plan_with_evidence(
        self, num_units: int, max_length: int, presence: list[BoolArray]
    ) -> tuple[Plan, Evidence]:
        """Return the plan over `presence` and the units that it rests on."""
        ...


class LookupSteps:
    """One lookup, asked piece by piece.

    First full attention's first units, then the rest of it, then what the other groups still can need. Use:
    while `next_probes()` gives units, ask the store about them and `feed` the answers; then take `result()`.
    """

    def __init__(self, planner: Planner, num_units: int, max_length: int) -> None:
        """Start a lookup over a chain of `num_units` hash units for a hit of at most `max_length` tokens."""
        self._planner = planner
        self._num_units = num_units
        self._max_length = max_length
        # Units not asked yet count as present.
        self._maybe = [np.ones(num_units, dtype=np.bool_) for _ in planner.groups]
        self._asked = [np.zeros(num_units, dtype=np.bool_) for _ in planner.groups]
        # Filled on demand: a miss ends before any group but full attention is asked.
        self._useful: dict[int, BoolArray] = {}
        self._reach = FIRST_UNITS
        self._plan: Plan | None = None
        self._probes: tuple[IntArray, ...] | None = None
        self._advance()

    @property
    def units_needed(self) -> int:
        """How many hash units from the start of the chain the current step needs at most; 0 when finished."""
        return max((int(units[-1]) + 1 for units in self._probes or () if units.size), default=0)

    def next_probes(self) -> tuple[IntArray, ...] | None:
        """Return per group the hash units to ask about now, ascending, perhaps none; None when finished."""
        return self._probes

    def feed(self, answers: Sequence[BoolArray]) -> None:
        """Take the store's answers to the current step: per group, one boolean per unit asked.

        Raises:
            LookupStateError: nothing was asked, or the answers do not have the shape of the question.
        """
        if self._probes is None:
            raise LookupStateError("the lookup is finished, there is nothing to feed; take result()")
        if len(answers) != len(self._probes):
            raise LookupStateError(
                f"{len(answers)} answers for {len(self._probes)} groups; give one array per group"
            )
        checked = [np.asarray(answer) for answer in answers]
        for group, (units, answer) in enumerate(zip(self._probes, checked, strict=True)):
            if answer.shape != units.shape or (answer.dtype != np.bool_ and units.size):
                raise LookupStateError(
                    f"group {group}: {units.size} units asked, the answer is {answer.dtype} with shape {answer.shape}"
                )
        for group, (units, answer) in enumerate(zip(self._probes, checked, strict=True)):
            self._asked[group][units] = True
            self._maybe[group][units] = answer
        self._advance()

    def result(self) -> Plan:
        """Return the plan.

        Raises:
            LookupStateError: there is still something to ask.
        """
        if self._plan is None:
            raise LookupStateError("the lookup is not finished; ask next_probes() and feed the answers first")
        return self._plan

    def _advance(self) -> None:
        plan, evidence = self._planner.plan_with_evidence(self._num_units, self._max_length, self._maybe)
        full = [spec.kind is GroupKind.FULL_ATTENTION for spec in self._planner.groups]
        # Full attention bounds all others, so they wait until it is known.
        probes = tuple(
            self._full_attention_probes(group, ranges) if full[group] else _NOTHING
            for group, ranges in enumerate(evidence)
        )
        if not any(units.size for units in probes):
            probes = tuple(
                _NOTHING
                if full[group]
                else self._widened(group, self._not_asked(group, ranges, self._num_units))
                for group, ranges in enumerate(evidence)
            )
            self._reach *= GROWTH
        if any(units.size for units in probes):
            self._probes = probes
        else:
            self._probes, self._plan = None, plan

    def _not_asked(self, group: int, ranges: list[range], high: int) -> IntArray:
        """Return the units below `high` in `ranges` that have not been asked about, ascending."""
        asked = self._asked[group][:high]
        # The searches of one lookup mostly rest on the same units.
        distinct = {units for units in ranges if not asked[units.start : units.stop : units.step].all()}
        if not distinct:
            return _NOTHING
        open_units = np.zeros(asked.size, dtype=np.bool_)
        for units in distinct:
            open_units[units.start : units.stop : units.step] = True
        return np.flatnonzero(open_units & ~asked)

    def _full_attention_probes(self, group: int, ranges: list[range]) -> IntArray:
        """Return what is missing in the first question's range, or all that is missing once that is known."""
        stride = self._planner.groups[group].block_size // self._planner.sizes.hash_block
        head = self._not_asked(group, ranges, max(FIRST_UNITS, stride))
        return head if head.size else self._not_asked(group, ranges, self._num_units)

    def _widened(self, group: int, units: IntArray) -> IntArray:
        """Return `units`, and the useful units not asked yet between them and within reach to their left."""
        if not units.size:
            return units
        low = max(0, int(units[0]) - self._reach)
        high = int(units[-1]) + 1
        if group not in self._useful:
            self._useful[group] = self._useful_units(group)
        wanted = self._useful[group][low:high] & ~self._asked[group][low:high]
        wanted[units - low] = True
        return np.flatnonzero(wanted) + low

    def _useful_units(self, member: int) -> BoolArray:
        """Return the units that a hit of this group can need: of windows and states those at aligned boundaries."""
        group = next(group for group in self._planner.spec_groups if member in group.members)
        sizes, block = self._planner.sizes, group.spec.block_size
        stride = block // sizes.hash_block
        useful = np.zeros(self._num_units, dtype=np.bool_)
        if group.spec.kind is GroupKind.MAMBA and sizes.alignment < block:
            useful[:] = True
            return useful
        closing = useful[stride - 1 :: stride]
        closing[:] = True
        step = int(np.lcm(block, sizes.alignment)) // block
        if group.spec.kind is GroupKind.MAMBA and step > 1:
            closing[:] = np.arange(1, closing.size + 1) % step == 0
        if group.spec.kind is GroupKind.SLIDING_WINDOW:
            # The window itself and, for the prune, one chunk past it.
            need = max(1, window_chunks(group.spec)) + int(group.eagle)
            if need < step:
                closing[:] = (np.arange(closing.size) - int(group.eagle)) % step >= step - need
        return useful
