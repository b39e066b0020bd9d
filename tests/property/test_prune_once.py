"""PRUNE_ONCE: the EAGLE prune happens in a lookup, once; a load mask never prunes.

Single-group layouts matter here: with several groups a second prune is mostly invisible, because an eagle group looks
one block past the candidate and drops back onto it.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import assume, example, given
from hypothesis import strategies as st

from support import oracle
from support.oracle import CHUNKED, FULL, MAMBA, WINDOW, Case, Group
from support.strategies import (
    any_case,
    as_lists,
    attention_with_states,
    cases,
    coordinator,
    hashes,
    indices,
    presence,
)

LENGTHS = st.integers(0, 40 * 16)

# Full attention finds the key at 64 only by looking past a limit of 48; without the prune it may not look there.
LOOKS_PAST_THE_LIMIT = Case(
    groups=(Group(FULL, 32, eagle=True), Group(MAMBA, 32)),
    unit=16,
    scheduler_block=32,
    use_eagle=True,
    partial=True,
    num_hashes=4,
    max_length=48,
    exists=frozenset({(0, 1), (0, 3), (1, 2)}),
)


@given(st.one_of(any_case(), attention_with_states(eagle=True)))
@example(LOOKS_PAST_THE_LIMIT)
def test_prune_once_lookup_equals_oracle(case: Case) -> None:
    masks, hit = coordinator(case).find_longest_cache_hit(hashes(case), case.max_length, presence(case))
    assert (hit, as_lists(masks)) == oracle.lookup(case)


@given(any_case())
@example(LOOKS_PAST_THE_LIMIT)
def test_prune_once_lookup_without_eagle_equals_oracle(case: Case) -> None:
    masks, hit = coordinator(case).find_longest_cache_hit(
        hashes(case), case.max_length, presence(case), apply_eagle=False
    )
    assert (hit, as_lists(masks)) == oracle.lookup(case, prune=False)


@given(any_case())
def test_prune_once_plan_equals_oracle(case: Case) -> None:
    plan = coordinator(case).plan(hashes(case), case.max_length, presence(case))
    assert (plan.hit_length, as_lists([g.mask for g in plan.groups])) == oracle.plan(case)


@given(st.one_of(cases(), cases(max_groups=1), cases(eagle=True)), st.integers(0, 50))
def test_prune_once_load_mask_equals_oracle_at_every_hit(case: Case, steps: int) -> None:
    """At every length that can be a hit, whether or not this store reaches it."""
    length = min(steps, case.chain // case.align) * case.align
    assert as_lists(coordinator(case).load_mask(hashes(case), length)) == oracle.load_mask(case, length)


@given(st.one_of(cases(max_groups=1, eagle=True), cases(eagle=True)), LENGTHS)
def test_prune_once_load_mask_of_any_length_is_the_search_without_prune(case: Case, length: int) -> None:
    """The same search as a lookup's, on a full store, also for lengths that no lookup returns or no chain covers."""
    assert as_lists(coordinator(case).load_mask(hashes(case), length)) == oracle.load_mask_by_search(
        case, length
    )


@given(st.one_of(cases(max_groups=1, eagle=True), any_case()))
def test_prune_once_load_mask_of_a_hit_keeps_its_trailing_block(case: Case) -> None:
    unit = coordinator(case)
    plan = unit.plan(hashes(case), case.max_length, presence(case))
    assume(plan.hit_length > 0)
    for group, mask in zip(case.groups, unit.load_mask(hashes(case), plan.hit_length), strict=True):
        assert len(mask) == oracle.ceil_div(plan.hit_length, group.block)
        starts_a_chunk = (
            group.kind == CHUNKED and plan.hit_length // group.chunk * group.chunk // group.block == len(mask)
        )
        assert mask[-1] or starts_a_chunk


@given(st.one_of(cases(max_groups=1, eagle=True), cases(eagle=True), attention_with_states()))
def test_prune_once_load_mask_needs_no_hash_past_the_hit(case: Case) -> None:
    """A loader may know the chain only up to the hit: there is then no block past it that a second prune could drop."""
    unit = coordinator(case)
    hit = unit.plan(hashes(case), case.max_length, presence(case)).hit_length
    short = unit.load_mask(range(hit // case.unit), hit)
    assert as_lists(short) == as_lists(unit.load_mask(hashes(case), hit)) == oracle.load_mask(case, hit)


@given(cases(kinds=(FULL,), max_groups=1, eagle=True))
def test_prune_once_hit_is_exactly_one_step_below_what_one_full_attention_group_matched(case: Case) -> None:
    unit = coordinator(case)
    step = min(case.groups[0].block, case.align)
    _, matched = unit.find_longest_cache_hit(hashes(case), case.max_length, presence(case), apply_eagle=False)
    plan = unit.plan(hashes(case), case.max_length, presence(case))
    assert plan.hit_length == max(0, matched - step)
    assert plan.hit_length_without_eagle == matched


@given(cases(kinds=(WINDOW,), max_groups=1, eagle=True))
def test_prune_once_window_hit_has_its_proof_block_and_no_more_is_dropped(case: Case) -> None:
    """The largest length with the window before it and one block after it; the dropped block is that one alone."""
    group = case.groups[0]
    need = max(1, oracle.ceil_div(group.window - 1, group.block))
    assume(group.window > 1 and oracle.lookup(case)[0] // group.block >= need)
    hit = coordinator(case).plan(hashes(case), case.max_length, presence(case)).hit_length

    def proven(length: int) -> bool:
        blocks = length // group.block
        return all((0, case.closing(0, c)) in case.exists for c in range(blocks - need, blocks + 1))

    longest = max(
        n
        for n in range(0, case.limit, group.block)
        if n + group.block <= case.limit and n // group.block >= need and proven(n)
    )
    assert hit == longest


def _matched(case: Case, group: int) -> int:
    """How far full attention alone is present: whole blocks, and with partial hits the last unit of the next one."""
    run = 0
    while (group, case.closing(group, run)) in case.exists:
        run += 1
    inside = (
        range(case.closing(group, run - 1) + 1, case.closing(group, run) + 1) if case.partial else range(0)
    )
    return max(
        [run * case.groups[group].block, *((u + 1) * case.unit for u in inside if (group, u) in case.exists)]
    )


@given(st.one_of(cases(eagle=True), attention_with_states(eagle=True)))
def test_prune_once_full_attention_of_a_pruned_hit_was_matched_one_step_further(case: Case) -> None:
    hit = coordinator(case).plan(hashes(case), case.max_length, presence(case)).hit_length
    pruning = [g for g in oracle.eagle_groups(case) if case.groups[g].kind == FULL]
    assume(hit > 0 and pruning)
    for g in pruning:
        step = case.unit if case.partial else case.groups[g].block
        assert _matched(case, g) >= hit + step


@given(st.one_of(cases(partial=False), cases(max_groups=1), cases(eagle=True, partial=False)))
def test_prune_once_lookup_without_eagle_is_never_shorter(case: Case) -> None:
    """Holds where no hit ends inside a block; see the counterexample below for partial hits."""
    plan = coordinator(case).plan(hashes(case), case.max_length, presence(case))
    assert plan.hit_length_without_eagle >= plan.hit_length


def test_prune_once_with_partial_hits_the_prune_may_look_past_the_limit() -> None:
    """The one case in which the figure without the prune is smaller: the proof key lies past `max_length`."""
    case = LOOKS_PAST_THE_LIMIT
    unit = coordinator(case)
    _, pruned = unit.find_longest_cache_hit(hashes(case), case.max_length, presence(case))
    _, plain = unit.find_longest_cache_hit(hashes(case), case.max_length, presence(case), apply_eagle=False)
    assert (pruned, plain) == (48, 0)


@given(any_case())
def test_prune_once_nothing_is_pruned_where_no_group_is_flagged(case: Case) -> None:
    plainly = replace(case, use_eagle=False, groups=tuple(replace(g, eagle=False) for g in case.groups))
    unit = coordinator(plainly)
    plan = unit.plan(hashes(plainly), plainly.max_length, presence(plainly))
    pruning_off = unit.find_longest_cache_hit(
        hashes(case), case.max_length, presence(case), apply_eagle=False
    )
    assert plan.hit_length == oracle.longest_verified(plainly, pruning_off[1])
    assert len(plan.groups) == len(indices(case))
