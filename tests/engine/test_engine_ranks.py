"""Two ranks, each a process with half of the heads: both save, both load, and one rank's shards are not the other's."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.conftest import MAX_TOKENS, Pair
from engine.rig import prompts
from engine.rig.engines import Engine, options

pytestmark = pytest.mark.timeout(600)

ROUNDS = 20
"""Runs within which one has to find everything in the pool."""


@pytest.fixture(scope="module")
def ranks(work: Path, plain: Pair) -> Iterator[Engine]:
    """An engine of two ranks on node a, in processes of their own as vLLM starts them."""
    folder = work / "ranks"
    folder.mkdir()
    made = options(folder, eagle=False, socket_dir=plain.cluster.agents["a"].socket_dir)
    engine = Engine(
        "two-ranks",
        made | {"tensor_parallel_size": 2},
        folder,
        driver="engine.rig.served",
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
    )
    try:
        yield engine.ready()
    finally:
        engine.close()


def test_two_ranks_save_and_load(ranks: Engine, plain: Pair) -> None:
    """Answers equal those of one rank without a cache; a hit needs every shard, and one rank's keys are not read."""
    plain.store("ranks")
    asked = plain.prompts("ranks")
    expected = [prompts.stored_hit(len(prompt), eagle=False) for prompt in asked]

    first = ranks.call("generate", prompts=asked, max_tokens=MAX_TOKENS)
    plain.check("ranks", first)
    shared = [output["cached"] for output in first["outputs"]]
    assert shared[0] == 0, "the engine of one rank has stored this prompt under another identity"
    # A session's first transfers wait for their loader, saves may end after the answers, and three processes that spin
    # leave few cores for loads here: what comes too late is computed. Right it has to be every time.
    for _ in range(ROUNDS):
        assert ranks.call("forget")["done"]
        again = ranks.call("generate", prompts=asked, max_tokens=MAX_TOKENS)
        plain.check("ranks", again)
        if [output["cached"] for output in again["outputs"]] == expected:
            break
    assert [output["cached"] for output in again["outputs"]] == expected
    print(f"\ntwo ranks: {sum(expected)} of {sum(map(len, asked))} tokens cached, {again['seconds']:.1f} s")
