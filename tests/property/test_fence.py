"""FENCED: every interleaving of copies, releases, deadlines and failures that hypothesis can think of.

The mover is a stand-in whose every copy is taken apart into "looks at its ticket and begins" and "writes and ends"; the
machine decides which copy goes on when. What is guarded is real: the manager, the block table, the pipelines.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvpool_agent.pools.pool import MoveItem
from kvpool_agent.store.faults import Fault, FaultKind, Operation
from kvpool_agent.transfer.errors import BlocksBusy
from kvpool_agent.transfer.settings import TransferSettings
from kvpool_agent.transfer.types import Check, FenceResult, FenceState, Landed, LandOutcome, Seal, Ticket
from kvpool_agent.transfer.workers import to_the_end
from kvpool_wire import agent_pb2 as pb
from support.manual_loop import ManualLoop, turns
from support.transfers import FULL, Rig

TOKENS = 32


@dataclass(eq=False)
class Touch:
    """One copy that has begun: from here on its block is touched until it ends."""

    transfer: int
    item: MoveItem
    write: bool
    ends: "asyncio.Future[bool]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class SteppedMover:
    """Copies one item at a time, each in two steps that the machine takes."""

    def __init__(self) -> None:
        self.touching: list[Touch] = []
        self.writes: list[tuple[int, int, int]] = []

    @property
    def mode(self) -> str:
        return "mapped"

    async def order(self, ordering: pb.Ordering, *, give_up: Callable[[], bool]) -> None:
        """Nothing to wait for."""

    async def land(self, items: Sequence[MoveItem], check: Check, *, ticket: Ticket) -> list[LandOutcome]:
        try:
            return [check(at) or await self._copy(item, ticket, write=True) for at, item in enumerate(items)]
        finally:
            ticket.quiet()

    async def collect(self, items: Sequence[MoveItem], seal: Seal, *, ticket: Ticket) -> list[Landed]:
        outcomes = []
        try:
            for at, item in enumerate(items):
                outcomes.append(await self._copy(item, ticket, write=False))
                if outcomes[-1] is Landed.OK:
                    seal(at)
        finally:
            ticket.quiet()
        return outcomes

    async def close(self) -> None:
        while self.touching:
            await to_the_end([touch.ends for touch in self.touching])
            await asyncio.sleep(0)

    async def _copy(self, item: MoveItem, ticket: Ticket, *, write: bool) -> Landed:
        if ticket.stopped:
            return Landed.STOPPED
        touch = Touch(ticket.transfer, item, write)
        self.touching.append(touch)
        good = await touch.ends
        self.touching.remove(touch)
        self.writes.append((ticket.transfer, item.group, item.block))
        return Landed.OK if good else Landed.ENGINE_FAILED


class FenceMachine(RuleBasedStateMachine):
    """One session, many transfers, one scheduler: the machine."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner(loop_factory=ManualLoop)
        self.rig: Rig
        self.mover: SteppedMover
        self.live: dict[int, frozenset[int]] = {}
        self.fenced: set[int] = set()
        self.releases: list[tuple[int, asyncio.Future[FenceResult]]] = []
        self.hang: asyncio.Event

    @initialize(batch=st.integers(1, 3))
    def begin(self, batch: int) -> None:
        async def make() -> None:
            self.mover = SteppedMover()
            self.rig = await Rig.make(
                mover=lambda _: self.mover, settings=TransferSettings(batch_chunks=batch), ring_chunks=6
            )
            self.rig.stock(TOKENS)
            self.rig.stock(TOKENS, prompt="s")

        self.runner.run(make())

    def teardown(self) -> None:
        async def end() -> None:
            closing = asyncio.ensure_future(self.rig.manager.close())
            while not closing.done():
                for touch in self.mover.touching:
                    if not touch.ends.done():
                        touch.ends.set_result(True)
                await turns(3)
                self.advance(20)
            touched = len(self.mover.writes)
            await turns()
            assert len(self.mover.writes) == touched, "nothing is touched after close"
            assert set(self.rig.results) == set(self.live), "every transfer has exactly one result"
            assert self.rig.manager.withheld(FULL) == frozenset()
            assert self.rig.ring.free_slots + self.rig.ring.quarantined_slots == self.rig.ring.slots
            self.rig.ring_memory.close()
            self.rig.engine.close()

        if hasattr(self, "rig"):
            self.runner.run(end())
        self.runner.close()

    def advance(self, seconds: float) -> None:
        loop = self.runner.get_loop()
        assert isinstance(loop, ManualLoop)
        loop.advance(seconds)

    def settle(self) -> None:
        """Let the session do all that it can, then look at the releases that have answered."""
        self.runner.run(turns(30))
        for transfer, release in self.releases:
            if release.done() and release.result().state is FenceState.FENCED:
                self.fenced.add(transfer)
        self.releases = [(transfer, release) for transfer, release in self.releases if not release.done()]

    @rule(first=st.integers(1, 6), seconds=st.sampled_from([3.0, 50.0]))
    def load(self, first: int, seconds: float) -> None:
        self._start(
            lambda: self.rig.manager.start_load(
                self.rig.load_job(TOKENS, first_block=first, seconds=seconds)
            )[0],
            first,
        )

    @rule(first=st.integers(1, 6), seconds=st.sampled_from([3.0, 50.0]))
    def save(self, first: int, seconds: float) -> None:
        def begin() -> int:
            self.rig.store.cluster.objects.clear()
            self.rig.stock(TOKENS)
            job = self.rig.save_job(
                TOKENS, first_block=first, seconds=seconds, prompt=f"s{first}", request="saves"
            )
            return self.rig.manager.start_save(job).transfer

        self._start(begin, first)

    def _start(self, begin: "object", first: int) -> None:
        async def start() -> None:
            try:
                transfer = begin()  # type: ignore[operator]
            except BlocksBusy:
                return
            self.live[transfer] = frozenset({first, first + 1})

        self.runner.run(start())
        self.settle()

    @precondition(lambda self: self.mover.touching)
    @rule(pick=st.integers(0, 10), good=st.sampled_from([True, True, True, False]))
    def copy_ends(self, pick: int, good: bool) -> None:
        touch = self.mover.touching[pick % len(self.mover.touching)]

        async def end() -> None:
            touch.ends.set_result(good)

        self.runner.run(end())
        self.settle()

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0, 10), patience=st.sampled_from([0.0, 2.0, 30.0]))
    def release(self, pick: int, patience: float) -> None:
        transfer = sorted(self.live)[pick % len(self.live)]

        async def begin() -> None:
            deadline = asyncio.get_running_loop().time() + patience
            work = self.rig.manager.release(transfer=transfer, deadline=deadline)
            self.releases.append((transfer, asyncio.ensure_future(work)))

        self.runner.run(begin())
        self.settle()

    @rule(seconds=st.sampled_from([1.0, 4.0]))
    def time_passes(self, seconds: float) -> None:
        self.advance(seconds)
        self.settle()

    @rule(
        operation=st.sampled_from([Operation.GET, Operation.PUT]),
        kind=st.sampled_from([FaultKind.HANG, FaultKind.DIE]),
    )
    def the_store_fails_next(self, operation: Operation, kind: FaultKind) -> None:
        self.rig.store.inject(Fault(kind, operation, times=1))

    @invariant()
    def fenced_transfers_touch_nothing(self) -> None:
        if hasattr(self, "rig"):
            touching = {touch.transfer for touch in self.mover.touching}
            assert not touching & self.fenced, "FENCED"

    @invariant()
    def no_block_is_written_beside_another_transfer(self) -> None:
        if hasattr(self, "rig"):
            for one in self.mover.touching:
                for other in self.mover.touching:
                    if one.transfer != other.transfer and (one.write or other.write):
                        assert (one.item.group, one.item.block) != (other.item.group, other.item.block)

    @invariant()
    def whatever_is_touched_is_withheld(self) -> None:
        if hasattr(self, "rig"):
            for touch in self.mover.touching:
                assert touch.item.block in self.rig.manager.withheld(touch.item.group)


FenceMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
TestFence = FenceMachine.TestCase
