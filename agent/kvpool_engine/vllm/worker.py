"""The connector on one rank of vLLM: carries out loads and saves, and says how each has ended.

Promises: every load that the scheduler was told of is reported, with each chunk in place or its block named
(LOADED_OR_REPORTED), at the latest a little after its deadline; no call waits for the agent. Blocks that somebody might
still touch are reported as held before vLLM may reuse them (FENCED). Jobs carry the attempt that they belong to: what a
failed load did not bring is saved only after vLLM has computed it again (NO_SAVE_AFTER_FAILURE).
"""

import contextlib
import logging
import time
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from opentelemetry import context, propagate

from kvpool_engine import aio
from kvpool_engine.hashes import PackedHashes
from kvpool_engine.loop import shared_loop
from kvpool_engine.plan import Plan
from kvpool_engine.tensors import Declaration, declare
from kvpool_engine.types import FenceState, IpcEvent, TransferResult
from kvpool_engine.vllm.compat import KVCacheConfig, VllmConfig
from kvpool_engine.vllm.identity import block_tensors, build_identity
from kvpool_engine.vllm.messages import Handshake, LoadJob, SaveJob, StepMetadata, WorkerReport
from kvpool_engine.vllm.settings import Settings
from kvpool_engine.vllm.stats import Counts, reason
from kvpool_wire import agent_pb2 as pb

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

PATIENCE: Final = 2.0
"""Seconds past a load's deadline after which even the client library is no longer waited for (BOUNDED)."""

NULL_BLOCK: Final = 0
"""vLLM's placeholder; it is never written nor read."""


@dataclass(slots=True)
class _Running:
    """A transfer and until when vLLM waits for it."""

    future: "Future[TransferResult]"
    give_up: float


@dataclass(slots=True)
class Outcome:
    """How loads have ended since the last step."""

    finished: set[str]
    """vLLM's request ids."""
    failed: set[str]
    """Of those, the ones whose blocks must be given up altogether."""
    invalid: set[int]
    """Blocks whose chunk did not arrive."""


class WorkerSide:
    """One rank. Every method is called by vLLM's worker thread and returns at once."""

    def __init__(self, settings: Settings, config: VllmConfig, cache: KVCacheConfig, *, rank: int) -> None:
        self._settings = settings
        self._config = config
        self._cache = cache
        self._rank = rank
        self._block_size = int(cache.kv_cache_groups[0].kv_cache_spec.block_size)
        self._client: aio.WorkerClient | None = None
        self._declaration: Declaration | None = None
        self._identity = pb.Identity()
        self._cuda: torch.device | None = None
        self._loads: dict[int, tuple[LoadJob, _Running]] = {}
        self._saves: dict[int, tuple[SaveJob, _Running]] = {}
        self._held: dict[str, tuple[tuple[int, ...], Future[TransferResult]]] = {}
        self._report = WorkerReport()
        self.counts = Counts()

    # ------------------------------------------------------------------------------------------------ at start

    def register(self, caches: Mapping[str, "torch.Tensor"]) -> None:
        """Declare this rank's KV and begin the session; the agent may come later.

        Raises:
            UnsupportedEngineError, FingerprintError, DeclarationError: what cannot be served, and why.
        """
        tensors = block_tensors(self._cache, caches)
        self._identity = build_identity(
            self._config, self._cache, tensors, given_fingerprint=self._settings.fingerprint
        )
        first = next(iter(tensors.values()))
        self._cuda = first.device if first.is_cuda else None
        self._declaration = declare(
            self._identity, tensors, rank=self._rank, shards=[self._rank], null_blocks=[NULL_BLOCK]
        )
        self._client = aio.WorkerClient(
            self._settings.socket_dir,
            self._identity,
            self._engine_id,
            self._declaration,
            mode=self._settings.mode,
        )
        shared_loop().loop.call_soon_threadsafe(self._client.start)

    @property
    def _engine_id(self) -> str:
        """Equal on all ranks, another one after every start."""
        return f"{self._config.kv_transfer_config.engine_id}-{self._config.instance_id}"

    def handshake(self) -> Handshake:
        """What the scheduler has to know."""
        return Handshake(self._identity.SerializeToString(deterministic=True), self._engine_id)

    def close(self) -> None:
        """Detach; returns when nobody touches this rank's blocks any more, or after five seconds."""
        if self._client is None:
            return
        state = FenceState.FENCE_UNCONFIRMED
        with contextlib.suppress(TimeoutError):
            state = shared_loop().run(self._client.close(deadline=5.0), deadline=5.0)
        if state is not FenceState.FENCED:
            logger.warning("kvpool: the agent may still touch this engine's memory; it is not reused here")

    # --------------------------------------------------------------------------------------------------- steps

    def release(self, keys: tuple[str, ...]) -> None:
        """Let the transfers of these requests end soon; nobody waits here, their blocks are pinned."""
        for key in keys:
            if self._client is not None:
                shared_loop().submit(self._client.release(request_id=key))

    def load(self, jobs: tuple[LoadJob, ...]) -> None:
        """Begin these loads."""
        for job in jobs:
            future = self._submit(self._load(job, self._after()), job.trace)
            patience = self._settings.load_timeout + PATIENCE
            self._loads[job.number] = (job, _Running(future, time.monotonic() + patience))

    async def _load(self, job: LoadJob, after: IpcEvent | None) -> TransferResult:
        if self._client is None:
            raise RuntimeError("a load before the KV was registered")
        transfer = await self._client.load(
            job.key,
            Plan.from_bytes(job.plan),
            job.start,
            [job.blocks],
            attempt=job.attempt,
            deadline=self._settings.load_timeout,
            after=after,
        )
        return await transfer

    def save(self, jobs: tuple[SaveJob, ...]) -> None:
        """Begin these saves; the step that computed the blocks has been enqueued."""
        for job in jobs:
            future = self._submit(self._save(job, self._after()), job.trace)
            patience = self._settings.save_timeout + PATIENCE
            self._saves[job.number] = (job, _Running(future, time.monotonic() + patience))

    async def _save(self, job: SaveJob, after: IpcEvent | None) -> TransferResult:
        if self._client is None:
            raise RuntimeError("a save before the KV was registered")
        transfer = await self._client.save(
            job.key,
            PackedHashes(job.hashes, job.hash_size),
            job.start,
            job.end,
            [job.blocks],
            extras=job.extras,
            num_prompt_tokens=job.num_prompt_tokens,
            attempt=job.attempt,
            deadline=self._settings.save_timeout,
            after=after,
        )
        return await transfer

    def _submit(
        self, work: Coroutine[Any, Any, TransferResult], trace: Mapping[str, str] | None
    ) -> "Future[TransferResult]":
        token = context.attach(propagate.extract(trace)) if trace else None
        try:
            return shared_loop().submit(work)
        finally:
            if token is not None:
                context.detach(token)

    def _after(self) -> IpcEvent | None:
        """What the kernels enqueued so far end with; on a CPU they have run already."""
        if self._cuda is None:
            return None
        import torch  # noqa: PLC0415 - the tensors brought it

        event = torch.cuda.Event(interprocess=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._cuda))
        return event

    def outcome(self) -> Outcome:
        """Which loads have ended; every one is named here once (LOADED_OR_REPORTED)."""
        outcome = Outcome(set(), set(), set())
        now = time.monotonic()
        for number, (job, running) in list(self._loads.items()):
            if running.future.done() or now > running.give_up:
                del self._loads[number]
                outcome.finished.add(job.request_id)
                self._judge(job, running.future, outcome)
        self._collect_saves()
        self._lift()
        return outcome

    def _judge(self, job: LoadJob, future: "Future[TransferResult]", outcome: Outcome) -> None:
        if not future.done():
            self._hold(job, future, outcome, "the client library does not answer")
            return
        try:
            result = future.result()
        except Exception as error:  # noqa: BLE001 - whatever it was, the request is computed and the error told
            # Raised before anything was begun: no block was touched.
            self._count_failed(job, f"{type(error).__name__}: {error}", {})
            outcome.invalid.update(job.blocks)
            return
        self.counts.add("load_chunks", result.good)
        self.counts.add("load_bytes", result.bytes)
        if not (result.failed or result.error):
            return
        if result.withheld:
            self._hold(job, future, outcome, result.error)
            return
        first = job.start // self._block_size
        failed = {job.blocks[item.chunk - first] for item in result.failed}
        reasons: dict[str, int] = {}
        for item in result.failed:
            reasons[item.reason.name] = reasons.get(item.reason.name, 0) + 1
        self._count_failed(job, result.error, reasons)
        outcome.invalid.update(failed or job.blocks)

    def _hold(self, job: LoadJob, future: "Future[TransferResult]", outcome: Outcome, why: str) -> None:
        """The request gets other blocks; these come back when nobody can write them any more."""
        name = f"{self._rank}/{job.number}"
        self._held[name] = (job.blocks, future)
        self._report.held[name] = job.blocks
        outcome.failed.add(job.request_id)
        self._count_failed(job, why, {})

    def _count_failed(self, job: LoadJob, why: str, reasons: Mapping[str, int]) -> None:
        self._report.failed_loads.add(job.request_id)
        self.counts.add("load_failed")
        for name, number in reasons.items():
            self.counts.add(f"load_failed_chunks:{reason(name)}", number)
        logger.warning(
            "kvpool: a load of request %s did not arrive whole, vLLM computes the rest: %s",
            job.request_id,
            ", ".join(f"{number} chunks {name}" for name, number in reasons.items()) or why,
        )

    def _collect_saves(self) -> None:
        now = time.monotonic()
        for number, (job, running) in list(self._saves.items()):
            if not running.future.done():
                if now > running.give_up:
                    self.release((job.key,))
                    running.give_up = now + PATIENCE
                continue
            if self._withheld(job.blocks):
                continue  # still pinned: somebody may be reading
            del self._saves[number]
            self._report.saves_over[number] += 1
            self._count_save(running.future)

    def _count_save(self, future: "Future[TransferResult]") -> None:
        if future.exception() is not None:
            self.counts.add("save_failed")
            logger.warning("kvpool: a save was refused: %s", future.exception())
            return
        result = future.result()
        self.counts.add("save_chunks", result.good)
        self.counts.add("save_already_stored", result.already_stored)
        self.counts.add("save_bytes", result.bytes)
        if result.skipped:
            self.counts.add(f"save_skipped:{reason(result.skipped)}")
        if result.error and not result.failed:
            self.counts.add(f"save_failed:{reason(result.error)}")
        for item in result.failed:
            self.counts.add(f"save_failed_chunks:{reason(item.reason.name)}")

    def _lift(self) -> None:
        for name, (blocks, future) in list(self._held.items()):
            if future.done() and not self._withheld(blocks):
                del self._held[name]
                self._report.lifted.add(name)

    def _withheld(self, blocks: tuple[int, ...]) -> bool:
        client = self._client
        return client is not None and not client.withheld_blocks[0].isdisjoint(blocks)

    def report(self) -> WorkerReport | None:
        """What the scheduler has to hear; None if nothing."""
        report, self._report = self._report, WorkerReport()
        return None if report.empty else report

    def begin(self, metadata: StepMetadata) -> None:
        """Before the step runs: stop what is no longer wanted."""
        self.release(metadata.release)
