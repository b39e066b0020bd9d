"""One engine process's session: what it may call, what it holds, and its end.

Promises: a session ends once; when `close` returns, nothing of this agent touches the engine's blocks any more
(FENCED), its loader process is gone, its memory is unmapped and its ring is freed, whatever was under way; an engine
that does not read its events is cut off instead of being waited for (BOUNDED). Refuses: to outlive its stream.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, TypedDict, Unpack

from typing_extensions import override

from kvpool_agent.coordinator import KVCoordinator
from kvpool_agent.pools.memory import SealedMemory
from kvpool_agent.server.descriptors import Channel
from kvpool_agent.store.protocol import Loader
from kvpool_agent.transfer.manager import TransferManager
from kvpool_agent.transfer.movers import CopyMover
from kvpool_agent.transfer.types import FenceResult, FenceState
from kvpool_wire import agent_pb2 as pb
from kvpool_wire.keys import KeySpace

log = logging.getLogger(__name__)

MAX_EVENTS: Final = 4096
"""Events that wait for a client that does not read its stream; a session has far fewer transfers under way."""


class Outbox:
    """Events on their way to one client, in order, bounded."""

    def __init__(self, limit: int = MAX_EVENTS) -> None:
        self._events: deque[pb.ServerEvent] = deque()
        self._limit = limit
        self._filled = asyncio.Event()
        self.overflowed: Final = asyncio.Event()

    def put(self, event: pb.ServerEvent) -> None:
        """Add one; past the limit it is dropped and the session has to end."""
        if len(self._events) >= self._limit:
            self.overflowed.set()
            return
        self._events.append(event)
        self._filled.set()

    async def get(self) -> pb.ServerEvent:
        """Wait for the next one."""
        while not self._events:
            self._filled.clear()
            await self._filled.wait()
        return self._events.popleft()


class SessionArguments(TypedDict):
    """What every session is made of; see `Session`."""

    number: int
    engine_id: str
    keyspace: KeySpace
    coordinator: KVCoordinator
    channel: Channel
    outbox: Outbox


class Session:
    """What scheduler and worker sessions have in common.

    Attributes:
        number: unique in this agent's life.
        engine_id: equal for all sessions of one engine.
        keyspace: the engine's keys.
        coordinator: the engine's hit search.
        outbox: events to the client.
        ended: set when somebody decided that the session is over.
    """

    role: str = "scheduler"

    def __init__(
        self,
        *,
        number: int,
        engine_id: str,
        keyspace: KeySpace,
        coordinator: KVCoordinator,
        channel: Channel,
        outbox: Outbox,
    ) -> None:
        self.number: Final = number
        self.engine_id: Final = engine_id
        self.keyspace: Final = keyspace
        self.coordinator: Final = coordinator
        self.outbox: Final = outbox
        self.ended: Final = asyncio.Event()
        self.end_reason = ""
        self._channel = channel
        self._closing: asyncio.Task[None] | None = None

    @property
    def token(self) -> bytes:
        """What its calls carry."""
        return self._channel.token

    @property
    def strides(self) -> list[int]:
        """Hash units per block, one per group."""
        unit = self.coordinator.sizes.hash_block
        return [group.block_size // unit for group in self.coordinator.groups]

    def end(self, reason: str) -> None:
        """Decide that the session is over; the first reason stays."""
        if not self.ended.is_set():
            self.end_reason = reason
            self.ended.set()

    async def close(self) -> None:
        """End the session and return when nothing of it is left. Every caller waits for the same end."""
        self.end("closed")
        if self._closing is None:
            # A task of its own: the stream whose end brings us here may be cancelled at any moment.
            self._closing = asyncio.get_running_loop().create_task(
                self._close(), name=f"close-session-{self.number}"
            )
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._channel.close()


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """What a worker session holds beside the rest.

    Attributes:
        rank: the engine's number of it.
        mode: "mapped" or "copy".
        memory: the ring's.
        loader: the process that moves bytes between ring and store.
        manager: its transfers; closing it closes the mover, and with that the mapping.
        copying: the mover, in copy mode.
    """

    rank: int
    mode: str
    memory: SealedMemory
    loader: Loader
    manager: TransferManager
    copying: CopyMover | None


class WorkerSession(Session):
    """A rank's session: it loads and saves."""

    role = "worker"

    def __init__(self, parts: WorkerParts, **common: Unpack[SessionArguments]) -> None:
        super().__init__(**common)
        self._parts = parts
        self.fence_failed = False
        """True once it has ended without proof that its blocks are touched no more."""

    @property
    def gone(self) -> bool:
        """True once it has ended, and nothing of it touches a block any more."""
        return self._closing is not None and self._closing.done() and not self.fence_failed

    @property
    def manager(self) -> TransferManager:
        """Its transfers."""
        return self._parts.manager

    @property
    def mode(self) -> str:
        """`mapped` or `copy`."""
        return self._parts.mode

    async def release(
        self, *, request_id: str | None = None, transfer: int | None = None, deadline: float
    ) -> FenceResult:
        """FENCED for what is named, see `TransferManager.release`; also while the session ends, and after it."""
        result = await self.manager.release(request_id=request_id, transfer=transfer, deadline=deadline)
        if self.fence_failed:
            return FenceResult(FenceState.FENCE_UNCONFIRMED, result.unconfirmed)
        return result

    def copy_done(self, done: pb.CopyDone) -> None:
        """Hand the client's answer to whoever asked.

        Raises:
            CopyProtocolError: it answers what was never asked; the session has to end.
        """
        if self._parts.copying is None:
            log.warning("CopyDone in a mapped session ignored", extra={"session": self.number})
            return
        self._parts.copying.on_copy_done(done)

    @override
    async def _close(self) -> None:
        # Order: first nobody touches blocks, then nobody touches the ring, then the ring goes.
        steps: tuple[tuple[str, Callable[[], Awaitable[None]]], ...] = (
            ("transfers", self._parts.manager.close),
            ("loader", self._parts.loader.close),
            ("ring", self._free_ring),
        )
        fenced = True
        for name, step in steps:
            try:
                await step()
            except Exception:  # each part has to be ended, whatever became of the one before
                log.exception("closing %s failed", name, extra={"session": self.number})
                fenced = fenced and name != "transfers"
        if fenced:
            await super()._close()
            return
        self.fence_failed = True
        # FENCED: the client takes the end of its descriptor socket as the word that its blocks are touched no more.
        log.critical(
            "it cannot be known that the blocks of session %d are touched no more; its engine withholds them until "
            "this process has ended: restart the agent",
            self.number,
        )

    async def _free_ring(self) -> None:
        self._parts.memory.close()
