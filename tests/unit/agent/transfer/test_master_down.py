"""A master that cannot be reached costs loads their chunks, never a loader its process: no byte was on its way."""

import pytest

from kvpool_agent.store.faults import Fault, FaultKind, Operation
from kvpool_agent.store.protocol import ChunkStatus
from kvpool_agent.transfer.settings import TransferSettings
from support.manual_loop import manual_time, turns
from support.transfers import Rig, failed_chunks

TOKENS = 96


async def _count_replacements(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> list[None]:
    replacements: list[None] = []
    real = rig.loader.replace

    async def replace() -> None:
        replacements.append(None)
        await real()

    monkeypatch.setattr(rig.loader, "replace", replace)
    return replacements


@manual_time
async def _loads(monkeypatch: pytest.MonkeyPatch) -> None:
    async with await Rig.make() as rig:
        rig.stock(TOKENS)
        replacements = await _count_replacements(rig, monkeypatch)
        rig.store.inject(Fault(FaultKind.STATUS, Operation.GET, status=ChunkStatus.MASTER_FAILED))
        for number in range(6):
            result = await rig.load(rig.load_job(TOKENS, request=f"r{number}"))
            assert set(failed_chunks(result).values()) == {"MASTER_UNREACHABLE"}
            await turns()
        assert (len(replacements), rig.ring.quarantined_slots) == (0, 0)
        assert rig.ring.free_slots == rig.ring.slots


@manual_time
async def _saves(monkeypatch: pytest.MonkeyPatch) -> None:
    async with await Rig.make(settings=TransferSettings(batch_chunks=3)) as rig:
        rig.compute(TOKENS)
        replacements = await _count_replacements(rig, monkeypatch)
        rig.store.inject(Fault(FaultKind.STATUS, Operation.PUT, status=ChunkStatus.MASTER_FAILED))
        for number in range(6):
            result = await rig.save(rig.save_job(TOKENS, request=f"r{number}"))
            assert set(failed_chunks(result).values()) == {"MASTER_UNREACHABLE"}
            await turns()
        assert (len(replacements), rig.ring.quarantined_slots) == (0, 0)


def test_loads_during_an_outage_of_the_master_keep_their_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    _loads(monkeypatch)


def test_saves_during_an_outage_of_the_master_keep_their_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    _saves(monkeypatch)
