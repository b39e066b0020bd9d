"""FENCED where groups share memory: block 7 of one group is block 7 of the other (hybrid engines have one pool)."""

import numpy as np
import pytest

import support.transfers as rigs
from kvpool_agent.transfer.errors import BadBlocks, BlocksBusy
from kvpool_agent.transfer.fence import BlockTable
from kvpool_agent.transfer.types import TransferKind
from kvpool_wire import agent_pb2 as pb
from support.manual_loop import manual_time
from support.transfers import FULL, PAD, WINDOW, EngineMemory, Rig, ids, layer_bytes


class SharedMemory(EngineMemory):
    """The window's layers lie in the bytes of the first full-attention layers, block by block."""

    def worker(self, *, mode: "pb.Mode.ValueType" = pb.MAPPED) -> pb.Worker:
        worker = super().worker(mode=mode)
        for tensor in worker.tensors:
            if tensor.group == WINDOW:
                tensor.storage = FULL
                tensor.offset = self._at(FULL, int(tensor.layer[-1]), 0)
                tensor.strides[0] = layer_bytes(FULL) + PAD
        return worker


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rigs, "EngineMemory", SharedMemory)


@pytest.mark.usefixtures("shared")
@manual_time
async def test_fenced_one_load_cannot_name_the_same_memory_in_two_groups() -> None:
    async with await Rig.make() as rig:
        rig.stock(96)
        both = (np.arange(1, 7, dtype=np.int32), np.array([*range(20, 30), 1, 2], np.int32))
        with pytest.raises(BadBlocks, match="block 1 is named by group 0 and by group 1"):
            rig.manager.start_load(rig.load_job(96, blocks=both))
        rig.check_memory()
        apart = (both[0], np.arange(15, 27, dtype=np.int32))
        assert not (await rig.load(rig.load_job(96, blocks=apart))).failed


@pytest.mark.usefixtures("shared")
@manual_time
async def test_fenced_a_block_that_one_group_holds_is_busy_for_the_other() -> None:
    async with await Rig.make() as rig:
        rig.stock(96)
        first = (np.arange(1, 7, dtype=np.int32), np.arange(10, 22, dtype=np.int32))
        number, _ = rig.manager.start_load(rig.load_job(96, blocks=first))
        # The window loads its last two chunks alone: blocks 5 and 6 of it are blocks 5 and 6 of full attention.
        second = (np.arange(22, 28, dtype=np.int32), np.array([*range(22, 32), 5, 6], np.int32))
        with pytest.raises(BlocksBusy, match="block 5 is held by load 1"):
            rig.manager.start_load(rig.load_job(96, blocks=second, request="s"))
        assert rig.manager.withheld(WINDOW) == rig.manager.withheld(FULL)
        await rig.result(number)
        assert rig.manager.withheld(WINDOW) == frozenset()
        assert not (await rig.load(rig.load_job(96, blocks=second, request="s"))).failed


@manual_time
async def test_groups_of_their_own_memory_use_the_same_numbers_freely() -> None:
    async with await Rig.make() as rig:
        rig.stock(96)
        assert not (await rig.load(rig.load_job(96, blocks=ids(96)))).failed


@manual_time
async def test_fenced_saves_of_both_groups_may_read_one_block_and_let_go_of_it_one_by_one() -> None:
    table = BlockTable(3, overlap=(0, 0, 2))
    one = table.claim(transfer=1, request_id="r", kind=TransferKind.SAVE, blocks={0: [4], 1: [4, 5], 2: [4]})
    two = table.claim(transfer=2, request_id="r", kind=TransferKind.SAVE, blocks={1: [4]})
    one.finish()
    assert (table.busy(0), table.busy(2)) == (frozenset({4}), frozenset())
    with pytest.raises(BlocksBusy, match="block 4 is held by save 2"):
        table.claim(transfer=3, request_id="r", kind=TransferKind.LOAD, blocks={0: [4]})
    two.finish()
    table.claim(transfer=3, request_id="r", kind=TransferKind.LOAD, blocks={0: [4], 2: [4]})
    with pytest.raises(BlocksBusy, match="block 4 is held by load 3"):
        table.claim(transfer=4, request_id="r", kind=TransferKind.SAVE, blocks={1: [4]})
