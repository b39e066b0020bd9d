"""BOUNDED: a proof of order that never comes holds no transfer past its deadline, no thread, and no session's end."""

import asyncio
import threading
import time
from collections.abc import Callable

from typing_extensions import override

from kvpool_agent.pools.pool import PoolError
from kvpool_agent.transfer.settings import TransferSettings
from kvpool_agent.transfer.types import FenceState
from kvpool_wire import agent_pb2 as pb
from support.manual_loop import advance, manual_time, turns, until
from support.transfers import PoolWrapper, Rig, failed_chunks

TOKENS = 96


class NeverPool(PoolWrapper):
    """An engine whose event never happens; like the CUDA pool, it waits in the calling thread."""

    waiting = 0
    lock = threading.Lock()

    @override
    def wait_ordering(self, ordering: pb.Ordering, *, give_up: Callable[[], bool]) -> None:
        with self.lock:
            NeverPool.waiting += 1
        try:
            while not give_up():
                time.sleep(0.0005)  # noqa: TID251 - the pool itself asks a device like this, which has no event
            raise PoolError("the event did not happen")
        finally:
            with self.lock:
                NeverPool.waiting -= 1


@manual_time
async def test_bounded_a_load_whose_event_never_happens_times_out_and_leaves_no_thread_behind() -> None:
    async with await Rig.make(pool=NeverPool) as rig:
        rig.stock(TOKENS)
        number, chunks = rig.manager.start_load(rig.load_job(TOKENS, seconds=10))
        await until(lambda: NeverPool.waiting == 1)
        advance(11)
        failed = failed_chunks(await rig.result(number))
        assert (len(failed), set(failed.values())) == (chunks, {"TIMED_OUT"})
        await until(lambda: NeverPool.waiting == 0)
        rig.check_memory()


@manual_time
async def test_bounded_release_and_close_do_not_wait_for_an_event_that_never_happens() -> None:
    rig = await Rig.make(pool=NeverPool, settings=TransferSettings(batch_chunks=3))
    async with rig:
        rig.stock(TOKENS)
        for name in ("r", "s", "t"):
            first = {"r": 1, "s": 7, "t": 13}[name]
            rig.manager.start_load(rig.load_job(TOKENS, request=name, first_block=first))
        await until(lambda: NeverPool.waiting == 2)  # the mover has two threads
        now = asyncio.get_running_loop().time()
        assert (await rig.manager.release(request_id="r", deadline=now + 1)).state is FenceState.FENCED
        await turns()
        assert [result.request_id for result in rig.reported] == ["r"]
    # The end of the session, clock standing still.
    assert NeverPool.waiting == 0
    assert {result.request_id for result in rig.reported} == {"r", "s", "t"}
