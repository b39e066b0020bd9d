"""The hybrid engine attached to an agent over the wire: scheduler and ranks; save, lookup and load in one line."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvpool_wire import agent_pb2 as pb
from support import hybrid_engine as model
from support.wire_client import Client, client


@dataclass
class Ranked:
    """One attached rank."""

    memory: model.Rank
    client: Client
    copier: asyncio.Task[None] | None = None
    done: dict[int, asyncio.Future[pb.TransferDone]] = field(default_factory=dict)
    other: list[pb.ServerEvent] = field(default_factory=list)
    answering: bool = True

    def result(self, transfer: int) -> asyncio.Future[pb.TransferDone]:
        """The report of a transfer."""
        return self.done.setdefault(transfer, asyncio.get_running_loop().create_future())

    async def serve(self) -> None:
        """Take events; in copy mode do the copies."""
        ring = mmap.mmap(self.client.ring_fd, self.client.ready.ring_size)
        while isinstance(event := await self.client.stream.read(), pb.ServerEvent):
            match event.WhichOneof("event"):
                case "transfer_done":
                    self.result(event.transfer_done.transfer).set_result(event.transfer_done)
                case "copy_wanted" if self.answering:
                    wanted = event.copy_wanted
                    self.memory.copy(ring, wanted)
                    done = pb.CopyDone(transfer=wanted.transfer, batch=wanted.batch)
                    await self.client.stream.write(pb.ClientEvent(copy_done=done))
                case _:
                    self.other.append(event)


@dataclass
class EngineOnWire:
    """One engine: a scheduler and its ranks on one agent."""

    name: str
    scheduler: Client
    ranks: list[Ranked]

    async def lookup(
        self, prompt: str, units: int, *, sent: int | None = None, max_length: int | None = None
    ) -> pb.LookupResponse:
        """Look a prompt up; asks again with all hashes when the agent wants more."""
        chain = model.hashes(prompt, units)
        request = pb.LookupRequest(
            request_id=prompt,
            total_hashes=units,
            hash_size=32,
            hashes=b"".join(chain[:sent]),
            max_length=units * model.BLOCK if max_length is None else max_length,
        )
        response: pb.LookupResponse = await self.scheduler.call("Lookup", request)
        return response

    async def save(self, prompt: str, units: int, blocks: Sequence[int]) -> list[pb.TransferDone]:
        """Write the prompt's content into these blocks of both groups on every rank, and save them."""
        chain = model.hashes(prompt, units)
        for ranked in self.ranks:
            for unit, block in enumerate(blocks):
                for group in model.LAYERS:
                    ranked.memory.write(group, block, model.payload(chain[unit], group, ranked.memory.shard))
        request = pb.SaveRequest(
            request_id=prompt,
            hash_size=32,
            hashes=b"".join(chain),
            end=units * model.BLOCK,
            blocks=[model.ids(list(blocks)), model.ids(list(blocks))],
            ordering=pb.Ordering(synchronised=True),
        )
        reports = []
        for ranked in self.ranks:
            started = await ranked.client.call("Save", request)
            assert started.transfer, started.skipped
            reports.append(await asyncio.wait_for(ranked.result(started.transfer), 20))
        return reports

    async def load(
        self, prompt: str, plan: pb.Plan, blocks: Sequence[int], *, start: int = 0
    ) -> list[pb.TransferDone]:
        """Load a plan into these blocks on every rank."""
        reports = []
        for ranked in self.ranks:
            started = await ranked.client.call("Load", self.load_request(prompt, plan, blocks, start=start))
            reports.append(await asyncio.wait_for(ranked.result(started.transfer), 20))
        return reports

    def load_request(
        self, prompt: str, plan: pb.Plan, blocks: Sequence[int], *, start: int = 0
    ) -> pb.LoadRequest:
        """The message of a load."""
        return pb.LoadRequest(
            request_id=prompt,
            plan=plan,
            start=start,
            blocks=[model.ids(list(blocks)), model.ids(list(blocks))],
            ordering=pb.Ordering(synchronised=True),
        )

    def check_loaded(
        self, prompt: str, plan: pb.Plan, blocks: Sequence[int], before: bytes = b"\xa5"
    ) -> None:
        """Every byte of every rank: loaded blocks hold the prompt's content, all others what they held before."""
        chain = model.hashes(prompt, plan.total_hashes)
        for ranked in self.ranks:
            for group in model.LAYERS:
                bits = np.unpackbits(np.frombuffer(plan.groups[group].mask, np.uint8), bitorder="little")
                loaded = {
                    blocks[int(chunk)]: int(chunk)
                    for chunk in np.flatnonzero(bits[: plan.groups[group].blocks])
                }
                for block in range(model.BLOCKS):
                    found = ranked.memory.read(group, block)
                    if block in loaded:
                        wanted = model.payload(chain[loaded[block]], group, ranked.memory.shard)
                    else:
                        wanted = before * len(found)
                    assert found == wanted, f"group {group} block {block} of shard {ranked.memory.shard}"


@asynccontextmanager
async def engine_on_wire(
    folder: Path, name: str, *modes: pb.Mode.ValueType, identity: str = "hybrid"
) -> AsyncIterator[EngineOnWire]:
    """Attach a scheduler and one rank per mode (two mapped ones by default)."""
    async with AsyncExitStack() as stack:
        scheduler = await stack.enter_async_context(client(folder))
        await scheduler.attach(model.attach_request(name, model=identity))
        engine = EngineOnWire(name, scheduler, [])
        for shard, mode in enumerate(modes or (pb.MAPPED, pb.MAPPED)):
            memory = model.Rank(shard, mode)
            stack.callback(memory.close)
            one = await stack.enter_async_context(client(folder))
            storages = [] if mode == pb.COPY else [memory.fd]
            await one.attach(model.attach_request(name, rank=memory, model=identity), storages)
            ranked = Ranked(memory, one)
            ranked.copier = asyncio.ensure_future(ranked.serve())
            stack.push_async_callback(_stop, ranked.copier)
            engine.ranks.append(ranked)
        yield engine


async def _stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
