"""Two vLLM engines on two agents: the second answers with the first one's KV, and nobody can tell from the answers."""

import pytest

from engine.conftest import SHARED, Pair
from engine.rig import prompts

pytestmark = pytest.mark.timeout(600)

CONTROL = 60
"""Prompts of the control, the first ones of the shared set."""


def test_second_engine_answers_with_the_first_ones_kv(pair: Pair) -> None:
    """200 prompts: tokens, logprobs, every loaded byte, and exactly the hits that PRUNE_ONCE allows."""
    first = pair.store("shared")
    pair.check("shared", first)
    pair.fresh(pair.b)
    second = pair.run(pair.b, "shared", forget=True)
    pair.check("shared", second)
    loaded = pair.check_loaded(pair.b)
    pair.idle(pair.b)

    expected = [prompts.stored_hit(len(prompt), eagle=pair.eagle) for prompt in pair.prompts("shared")]
    found = [output["cached"] for output in second["outputs"]]
    assert found == expected, (first["counts"], second["counts"])
    assert loaded >= sum(expected) // 64, "most of what was cached came from the pool"
    assert not [name for name in second["counts"] if name.startswith("load_failed")]
    gap = prompts.largest_gap(pair.right["shared"], second["outputs"])
    print(
        f"\n{SHARED} prompts, {sum(map(len, pair.prompts('shared')))} tokens, {sum(found)} of them cached,"
        f" {loaded} blocks loaded; first run {first['seconds']:.1f} s, second {second['seconds']:.1f} s;"
        f" largest difference of a logprob {gap:.1e}; counts {second['counts']}"
    )


def test_local_and_pooled_prefixes_mix(pair: Pair) -> None:
    """With vLLM's own prefix cache kept, loads begin where it ends."""
    pair.fresh(pair.b)
    answer = pair.run(pair.b, "shared")
    pair.check("shared", answer)
    pair.check_loaded(pair.b)
    pair.idle(pair.b)


def test_control_one_zeroed_block_is_seen(pair: Pair) -> None:
    """These tests can see a wrong block: one zeroed block of a load changes at least 90 % of the answers."""
    pair.fresh(pair.b)
    pair.b.call("spoil", zero_block=True)
    chosen = pair.prompts("shared")[:CONTROL]
    answer = pair.b.call("generate", prompts=chosen, max_tokens=5, forget=True)
    pair.b.call("spoil", zero_block=False)
    pair.idle(pair.b)
    wrong = prompts.differences(pair.right["shared"][:CONTROL], answer["outputs"])
    print(f"\ncontrol: {len(wrong)} of {CONTROL} answers changed")
    assert len(wrong) >= 0.9 * CONTROL


def test_prune_once_a_second_prune_turns_the_run_red(pair: Pair) -> None:
    """The bug that the project exists for, put back: blocks stay poisoned, and the answers say so."""
    pair.fresh(pair.b)
    pair.b.call("spoil", double_prune=True)
    chosen = pair.prompts("shared")[:CONTROL]
    answer = pair.b.call("generate", prompts=chosen, max_tokens=5, forget=True)
    pair.b.call("spoil", double_prune=False)
    seen = pair.b.call("seen")
    pair.idle(pair.b)
    pair.fresh(pair.b)
    wrong = prompts.differences(pair.right["shared"][:CONTROL], answer["outputs"])
    print(f"\nsecond prune: {len(wrong)} of {CONTROL} answers wrong, no error reported")
    assert len(wrong) >= 0.9 * CONTROL
    assert seen["loaded"], "what the pruned loads brought was right all the same"
