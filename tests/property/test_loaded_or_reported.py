"""LOADED_OR_REPORTED: whatever the store, the client and the engine do, there is no third state."""

import asyncio
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool_agent.store.faults import Fault, FaultKind
from kvpool_agent.store.protocol import ChunkStatus
from kvpool_agent.transfer.settings import TransferSettings
from support.manual_loop import ManualLoop, advance, turns, until
from support.transfers import FULL, Rig, failed_chunks

TOKENS = 96
LOADED = [*((0, chunk) for chunk in range(6)), *((1, chunk) for chunk in range(7, 12))]
"""What a load of 96 tokens moves with a window of 40 tokens."""


@dataclass(frozen=True)
class Wrong:
    """One thing that goes wrong with one chunk."""

    chunk: tuple[int, int]
    how: str


wrongs = st.lists(
    st.builds(
        Wrong,
        st.sampled_from(LOADED),
        st.sampled_from(
            [
                "absent",
                "flip",
                "short",
                "foreign",
                "swap",
                "peer",
                "lease",
                "torn",
                "hang",
                "die",
                "refuse",
                "master",
            ]
        ),
    ),
    max_size=5,
)

REASONS = {
    "EVICTED",
    "CORRUPT",
    "PEER_UNREACHABLE",
    "MASTER_UNREACHABLE",
    "TIMED_OUT",
    "INTERNAL",
    "ENGINE_FAILED",
}
"""Why a chunk may fail without a release."""

_STATUSES = {
    "peer": ChunkStatus.PEER_FAILED,
    "lease": ChunkStatus.LEASE_EXPIRED,
    "master": ChunkStatus.MASTER_FAILED,
}
_KINDS = {"torn": FaultKind.TORN, "hang": FaultKind.HANG, "die": FaultKind.DIE, "foreign": FaultKind.FOREIGN}


def arrange(rig: Rig, wrong: Wrong) -> None:
    key, objects = rig.key(*wrong.chunk), rig.store.cluster.objects
    if wrong.how in _STATUSES:
        rig.store.inject(Fault(FaultKind.STATUS, keys=frozenset({key}), status=_STATUSES[wrong.how]))
    elif wrong.how in _KINDS:
        other = rig.key(wrong.chunk[0], (wrong.chunk[1] + 1) % 6)
        rig.store.inject(Fault(_KINDS[wrong.how], keys=frozenset({key}), other_key=other, times=1))
    elif wrong.how == "refuse" and rig.client is not None:
        rig.client.refuse.add((wrong.chunk[0], wrong.chunk[1] + 1))
    elif key in objects:
        if wrong.how == "absent":
            del objects[key]
        elif wrong.how == "flip":
            objects[key] = objects[key][:-9] + bytes([objects[key][-9] ^ 4]) + objects[key][-8:]
        elif wrong.how == "short":
            objects[key] = objects[key][: len(objects[key]) // 2]
        elif wrong.how == "swap":
            other = rig.key(FULL, 0)
            if other in objects:
                objects[key], objects[other] = objects[other], objects[key]


@pytest.mark.parametrize("mode", ["mapped", "copy"])
@settings(max_examples=60)
@given(
    wrong=wrongs,
    batch=st.integers(1, 8),
    slots=st.integers(2, 12),
    start=st.sampled_from([0, 16, 72]),
    release_after=st.none() | st.integers(0, 60),
)
def test_loaded_or_reported_every_chunk_holds_its_own_bytes_or_is_named_once(
    mode: str, wrong: list[Wrong], batch: int, slots: int, start: int, release_after: int | None
) -> None:
    async def scenario() -> None:
        limits = TransferSettings(batch_chunks=batch)
        async with await Rig.make(mode=mode, settings=limits, ring_chunks=slots, window=40) as rig:
            rig.stock(TOKENS)
            for one in wrong:
                arrange(rig, one)
            job = rig.load_job(TOKENS, start=start)
            wanted = rig.loaded(job.plan, start=start)
            transfer, chunks = rig.manager.start_load(job)
            assert chunks == len(wanted)
            if release_after is not None:
                await turns(release_after)
                now = asyncio.get_running_loop().time()
                released = asyncio.ensure_future(rig.manager.release(transfer=transfer, deadline=now + 60))
                await asyncio.wait({released})
            waiting = asyncio.ensure_future(rig.result(transfer))
            await turns()
            if not waiting.done() and any(one.how == "hang" for one in wrong):
                # What moves without the store may go on; what hangs ends at the deadline.
                struck = [fault.struck for fault in rig.store.faults.armed if fault.kind is FaultKind.HANG]
                await until(lambda: waiting.done() or any(event.is_set() for event in struck))
                advance(11)
            result = await waiting

            failed = failed_chunks(result)
            assert set(failed) <= set(wanted)
            good = [chunk for chunk in wanted if chunk not in failed]
            assert result.good == len(good)
            if release_after is None:
                rig.expect(good, start=start)
                rig.check_memory()
                assert set(failed.values()) <= REASONS
            elif "CANCELLED" in failed.values():
                assert result.good == 0
            if not wrong and release_after is None:
                assert failed == {}
            arrived = [group.mask.copy() for group in job.plan.groups]
            for group, chunk in failed:
                arrived[group][chunk] = False
            assert result.resume_length == rig.coordinator.resume_length(job.plan, arrived, start=start)
            await turns()
            assert len(rig.reported) == 1
            assert rig.manager.withheld(0) | rig.manager.withheld(1) == frozenset()

    with asyncio.Runner(loop_factory=ManualLoop) as runner:
        runner.run(scenario())
