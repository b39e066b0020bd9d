"""FENCED on the client where groups share memory: a block is withheld in all of them, and named by one of them."""

import numpy as np
import pytest

from kvpool_engine.aio import WorkerClient
from kvpool_engine.tensors import declare
from kvpool_engine.transfer import Transfer
from kvpool_engine.types import Mode, TransferKind
from kvpool_engine.withheld import Withheld
from unit.engine import samples
from unit.engine.conftest import FAST
from unit.engine.fake_agent import FakeAgent

PLAN = samples.plan([[1, 1, 1], [0, 1, 1]], 12)


def transfer(blocks: list[list[int]]) -> Transfer:
    ids = [np.array(group, np.int32) for group in blocks]
    return Transfer(
        kind=TransferKind.LOAD, request_id="r", chunks=(), blocks=ids, fallback_length=0, deadline=1
    )


def test_fenced_a_block_of_shared_memory_is_withheld_in_every_group_that_has_it() -> None:
    withheld = Withheld(3, overlap=(0, 0, 2))
    one = withheld.hold(owner=transfer([[1], [2], [3]]), why="x")
    two = withheld.hold(owner=transfer([[2], [], []]), why="x")
    assert withheld.snapshot == (frozenset({1, 2}), frozenset({1, 2}), frozenset({3}))
    withheld.lift(one)
    assert withheld.snapshot == (frozenset({2}), frozenset({2}), frozenset())
    withheld.lift(two)
    assert withheld.snapshot == (frozenset(), frozenset(), frozenset())


@pytest.mark.parametrize("mode", [Mode.COPY, Mode.MAPPED])
async def test_fenced_one_block_for_two_chunks_is_refused_before_it_travels(
    agent: FakeAgent, mode: Mode
) -> None:
    """In copy mode the agent does not know where the blocks lie, so the client has to see it."""
    engine = samples.engine()
    both = declare(
        samples.identity(),
        {"full": engine.full, "window": engine.full.view()},
        null_blocks=[0, 0],
        shared=(engine.storage,),
    )
    assert both.layout.overlap == (0, 0)
    client = WorkerClient(agent.folder, samples.identity(), "engine-1", both, mode=mode, backoff=FAST)
    with pytest.raises(ValueError, match="block 6 is named by group 0 and by group 1"):
        await client.load("r", PLAN, 0, [[5, 6, 7], [5, 8, 6]])
    # Block 5 of the window is masked off: nothing is written there.
    assert (
        await client.load("r", PLAN, 0, [[5, 6, 7], [5, 8, 9]])
    ).result().error == "no session with the agent"
    await client.close(deadline=0.2)
