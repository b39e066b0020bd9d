"""The connector inside vLLM's scheduler: lookups, which blocks to load, which to save, and when blocks may be reused.

Promises: it never waits for the agent; what is not known in time is a miss. The hit length goes to vLLM as it came: it
was pruned where it was found (PRUNE_ONCE). What vLLM is told is loaded, is loaded or reported (LOADED_OR_REPORTED).
Refuses: to look up or save a request whose KV depends on something that is not in the key.
"""

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from opentelemetry import context, propagate

from kvpool_engine import aio
from kvpool_engine.loop import shared_loop
from kvpool_engine.plan import Plan
from kvpool_engine.types import Extras, MissReason
from kvpool_engine.vllm.compat import KVCacheBlocks, KVConnectorOutput, Request, SchedulerOutput
from kvpool_engine.vllm.messages import Handshake, LoadJob, SaveJob, StepMetadata, WorkerReport
from kvpool_engine.vllm.pins import Pins, Pool
from kvpool_engine.vllm.requests import Tracked, uncacheable, wire_key
from kvpool_engine.vllm.settings import Settings
from kvpool_engine.vllm.stats import Counts, reason
from kvpool_engine.vllm.support import UnsupportedEngineError
from kvpool_wire import agent_pb2 as pb

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0
PATIENCE = 2.0
"""Seconds beyond a lookup's own deadline after which it is a miss, whatever the client's thread does."""


def trace_of(headers: Mapping[str, str] | None) -> dict[str, str] | None:
    """The W3C part of a request's headers."""
    if not headers:
        return None
    return {name: headers[name] for name in ("traceparent", "tracestate") if name in headers} or None


class SchedulerSide:
    """One engine's scheduler. Every method is called by vLLM's scheduler thread and returns at once."""

    def __init__(self, settings: Settings, *, block_size: int, eagle: bool, ranks: int) -> None:
        self._settings = settings
        self._block_size = block_size
        self._eagle = eagle
        self._ranks = ranks
        self._client: aio.SchedulerClient | None = None
        self._pins: Pins | None = None
        self._requests: dict[str, Tracked] = {}
        self._loads: list[LoadJob] = []
        self._release: list[str] = []
        self._serial = 0
        self._off = ""
        """Why the cache is no longer used."""
        self.counts = Counts()

    # ------------------------------------------------------------------------------------------------ at start

    def bind(self, pool: Pool) -> None:
        """Take vLLM's block pool, in which transfers pin what they touch."""
        self._pins = Pins(pool, ranks=self._ranks)

    def attach(self, workers: Mapping[int, Handshake]) -> None:
        """Begin the session with the identity that the workers have found.

        Raises:
            UnsupportedEngineError: ranks that differ in what decides their KV.
        """
        if not workers:
            raise UnsupportedEngineError(
                "vLLM's workers sent no handshake, so that the engine has no identity"
            )
        first, *others = workers.values()
        if any(other != first for other in others):
            raise UnsupportedEngineError(
                "the engine's ranks differ in model, layout or packing of their KV, so they cannot share its keys:"
                " give all of them one kind of machine and one checkpoint"
            )
        identity = pb.Identity.FromString(first.identity)
        self._client = aio.SchedulerClient(self._settings.socket_dir, identity, first.engine_id)
        shared_loop().loop.call_soon_threadsafe(self._client.start)

    def close(self) -> None:
        """End the session."""
        if self._client is not None:
            try:
                shared_loop().run(self._client.close(), deadline=CLOSE_SECONDS)
            except TimeoutError:
                logger.warning("kvpool: detaching took longer than %.0f s; the agent ends it", CLOSE_SECONDS)

    # ------------------------------------------------------------------------------------------------- lookups

    def matched(self, request: Request, local: int) -> tuple[int | None, bool]:
        """Tokens beyond `local` that can be loaded; None while the answer is on its way."""
        tracked = self._tracked(request)
        if self._off or not tracked.cached or request.skip_reading_prefix_cache:
            return 0, False
        if tracked.load_failed:
            self.counts.add("lookup_miss:after_failed_load")
            return 0, False
        if request.num_tokens <= self._block_size:
            return 0, False
        plan = tracked.answer(lambda: self._ask(tracked), patience=self._settings.lookup_timeout + PATIENCE)
        if plan is None:
            return None, False
        if plan.hit_length <= local or not self._sane(plan, request):
            tracked.offered = None
            return 0, False
        tracked.offered = plan.hit_length - local
        return tracked.offered, True

    def _ask(self, tracked: Tracked) -> "Future[Plan]":
        request = tracked.request
        # A prune leaves at least one block to compute; without one the last token is left out of the question.
        longest = request.num_tokens if self._eagle else request.num_tokens - 1
        client = self._client
        if client is None:
            return _resolved(Plan.miss(MissReason.AGENT_UNAVAILABLE))
        trace = trace_of(request.trace_headers)
        token = context.attach(propagate.extract(trace)) if trace else None
        try:
            asked = shared_loop().submit(
                client.lookup(
                    tracked.key,
                    list(request.block_hashes),
                    longest,
                    extras=tracked.extras,
                    deadline=self._settings.lookup_timeout,
                )
            )
        finally:
            if token is not None:
                context.detach(token)
        return self._counted(asked)

    def _counted(self, asked: "Future[Plan]") -> "Future[Plan]":
        """The same answer, with an error turned into the miss that it is; cancelled together."""
        answer: Future[Plan] = Future()

        def take(done: "Future[Plan]") -> None:
            if not answer.set_running_or_notify_cancel():
                return
            error = None if done.cancelled() else done.exception()
            if done.cancelled() or error is not None:
                logger.warning("kvpool: a lookup failed and counts as a miss: %s", error or "cancelled")
                answer.set_result(Plan.miss(MissReason.AGENT_UNAVAILABLE))
            else:
                answer.set_result(done.result())

        asked.add_done_callback(take)
        return answer

    def _sane(self, plan: Plan, request: Request) -> bool:
        """Would vLLM be left with a token to compute, on a boundary of its blocks?"""
        if plan.hit_length < request.num_tokens and plan.hit_length % self._block_size == 0:
            return True
        logger.error("kvpool: a hit of %d tokens for a prompt of %d", plan.hit_length, request.num_tokens)
        return False

    def allocated(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """The offer was taken (`external` > 0) or left; called again when a loaded request goes on."""
        tracked = self._tracked(request)
        plan, offered = tracked.plan, tracked.offered
        self._count_answer(tracked)
        tracked.drop_lookup()
        if external > 0:
            self._begin_load(tracked, plan, offered, blocks.get_block_ids()[0], external)
        else:
            if plan is not None:
                tracked.saved = plan.hit_length
            if tracked.load is None:
                tracked.load_failed = False

    def _begin_load(
        self, tracked: Tracked, plan: Plan | None, offered: int | None, ids: list[int], external: int
    ) -> None:
        hit = plan.hit_length if plan is not None else external
        start = hit - external
        # vLLM waits for this load now: one that cannot be right has to be reported failed by the workers.
        right = plan is not None and offered == external
        if not right:
            logger.error("kvpool: vLLM took %d external tokens, %s were offered", external, offered)
        size = self._block_size
        tracked.load = LoadJob(
            number=self._next(),
            request_id=tracked.request.request_id,
            key=tracked.key,
            plan=plan.to_bytes() if right and plan is not None else b"",
            start=start,
            blocks=tuple(ids[start // size : -(-hit // size)]),
            trace=trace_of(tracked.request.trace_headers),
            attempt=tracked.attempt,
        )
        tracked.saved = hit
        self._loads.append(tracked.load)
        self.counts.add("load_tokens", external)

    def _count_answer(self, tracked: Tracked) -> None:
        plan = tracked.plan
        if plan is None:
            return
        if plan.hit_length:
            self.counts.add("lookup_hit")
            self.counts.add("hit_tokens", plan.hit_length)
            self.counts.add("pruned_tokens", plan.pruned_tokens)
        else:
            self.counts.add(f"lookup_miss:{reason(plan.miss_reason.value)}")

    # --------------------------------------------------------------------------------------------------- steps

    def step(self, output: SchedulerOutput) -> StepMetadata:
        """What the workers have to do with this step."""
        for request_id in output.finished_req_ids:
            self._finish(request_id)
        for request_id in output.preempted_req_ids or ():
            if (tracked := self._requests.get(request_id)) is not None:
                self._notice_preemption(tracked)
        saves = self._saves(output)
        metadata = StepMetadata(tuple(self._loads), saves, tuple(self._release))
        self._loads, self._release = [], []
        return metadata

    def _finish(self, request_id: str) -> None:
        tracked = self._requests.pop(request_id, None)
        if tracked is None:
            return
        tracked.drop_lookup()
        if tracked.load is not None:
            # Aborted while it waits: the sooner the load ends, the sooner vLLM has its blocks back.
            self._release.append(tracked.key)

    def _saves(self, output: SchedulerOutput) -> tuple[SaveJob, ...]:
        scheduled: dict[str, int] = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        scheduled.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        jobs: list[SaveJob] = []
        for request_id, computed in scheduled.items():
            tracked = self._requests.get(request_id)
            if tracked is None or not tracked.cached or self._off:
                continue
            until = computed + output.num_scheduled_tokens[request_id]
            job = self._save(
                tracked,
                computed,
                until,
                lambda name=request_id: _block_ids(output, name),  # type: ignore[misc]
            )
            if job is not None:
                jobs.append(job)
        return tuple(jobs)

    def _save(
        self, tracked: Tracked, computed: int, until: int, block_ids: Callable[[], list[int]]
    ) -> SaveJob | None:
        """Save the whole blocks of the prompt that this step completes; draft tokens never lie in those."""
        request, size = tracked.request, self._block_size
        tracked.prefill_end = tracked.prefill_end or request.num_tokens
        # After a failed load vLLM computes again from the first block that is missing.
        tracked.saved = min(tracked.saved, computed) // size * size
        whole = min(until, tracked.prefill_end, len(request.block_hashes) * size) // size * size
        if whole <= tracked.saved:
            return None
        blocks = tuple(block_ids()[tracked.saved // size : whole // size])
        if len(blocks) < (whole - tracked.saved) // size or 0 in blocks:
            self.counts.add("save_skipped:no_blocks")
            return None
        number = self._next()
        if self._pins is None or not self._pins.pin_save(number, blocks):
            # Tried again with the next step of this request, as long as it prefills.
            self.counts.add("save_skipped:pinned_blocks")
            return None
        hashes = request.block_hashes[: whole // size]
        start, tracked.saved = tracked.saved, whole
        return SaveJob(
            number=number,
            key=tracked.key,
            hashes=b"".join(hashes),
            hash_size=len(hashes[0]),
            start=start,
            end=whole,
            num_prompt_tokens=request.num_prompt_tokens,
            blocks=blocks,
            extras=tracked.extras,
            trace=trace_of(request.trace_headers),
            attempt=tracked.attempt,
        )

    def reported(self, output: KVConnectorOutput) -> None:
        """Take what has ended on the workers."""
        report = output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            self._take_report(report)
        for request_id in output.finished_recving or ():
            if (tracked := self._requests.get(request_id)) is not None:
                tracked.load = None

    def _take_report(self, report: WorkerReport) -> None:
        if self._pins is not None:
            for name, blocks in report.held.items():
                self._pins.hold(name, blocks)
            for name in report.lifted:
                self._pins.lift(name)
            for number, ranks in report.saves_over.items():
                self._pins.save_over(number, ranks)
        for request_id in report.failed_loads:
            if (tracked := self._requests.get(request_id)) is not None:
                # What any rank misses, vLLM computes again before it schedules a step that is saved from.
                tracked.attempt += not tracked.load_failed
                tracked.load_failed = True

    @property
    def busy(self) -> bool:
        """True while saves are under way: an idle engine then goes on stepping, so that their blocks come free."""
        return self._pins is not None and self._pins.saving

    def reset(self) -> bool:
        """The engine drops what it cached, perhaps since its weights changed: nothing stored before may be read again.

        The keys name the weights that this engine started with, so it leaves the pool alone from now on.
        """
        self._off = "the prefix cache was reset"
        for tracked in self._requests.values():
            tracked.drop_lookup()
        logger.warning("kvpool: %s; this engine neither looks up nor saves until it is restarted", self._off)
        return True

    # ------------------------------------------------------------------------------------------------ requests

    def _tracked(self, request: Request) -> Tracked:
        tracked = self._requests.get(request.request_id)
        if tracked is None or tracked.request is not request:
            why = uncacheable(request)
            if why:
                self.counts.add(f"uncacheable:{why}")
            tracked = Tracked(
                request=request,
                key=wire_key(request.request_id, self._next()),
                reason=why,
                preemptions=request.num_preemptions,
                extras=Extras(cache_salt=request.cache_salt or ""),
            )
            self._requests[request.request_id] = tracked
        self._notice_preemption(tracked)
        return tracked

    def _notice_preemption(self, tracked: Tracked) -> None:
        """FENCED: its blocks are reused at once but for those that are pinned; what is under way for it ends."""
        seen: int = tracked.request.num_preemptions
        if seen != tracked.preemptions:
            key = wire_key(tracked.request.request_id, self._next())
            self._release.append(tracked.begin_again(key, seen))

    def _next(self) -> int:
        self._serial += 1
        return self._serial


def _block_ids(output: SchedulerOutput, request_id: str) -> list[int]:
    state: Any = output.kv_connector_block_state
    found = None if state is None else state.get_block_ids(request_id)
    return [] if found is None else list(found[0])


def _resolved(plan: Plan) -> "Future[Plan]":
    future: Future[Plan] = Future()
    future.set_result(plan)
    return future
