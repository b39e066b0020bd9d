"""The gRPC service: tokens to sessions, messages to jobs, errors to statuses.

Promises: every call carries a token and acts on that token's session alone; sizes are checked before anything is
allocated for them; a call answers by the deadline that it carries (BOUNDED); while the agent drains, lookups miss and
saves are skipped, so that no engine ever fails because of it. Refuses: to decide anything about chunks.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import Message

from kvpool_agent.config import CacheSection
from kvpool_agent.errors import CallRefused, Refusal
from kvpool_agent.server import codec, plans
from kvpool_agent.server.calls import Call, answering, now, serialize, token_of, trace_context, unknown_token
from kvpool_agent.server.descriptors import DescriptorServer
from kvpool_agent.server.registry import Sessions
from kvpool_agent.server.session import Session, WorkerSession
from kvpool_agent.server.status import AgentStatus
from kvpool_agent.server.stream import DRAINING_TEXT, SessionStreams
from kvpool_agent.telemetry.metrics import AgentMetrics
from kvpool_agent.transfer.errors import TransferError
from kvpool_agent.transfer.guard import SaveGuard
from kvpool_agent.transfer.lookup import Lookups
from kvpool_agent.transfer.types import FenceResult, FenceState
from kvpool_wire import agent_pb2 as pb
from kvpool_wire import rpc


class AgentService:
    """Handlers of `kvpool.agent.v1.Agent`."""

    def __init__(
        self,
        *,
        sessions: Sessions,
        descriptors: DescriptorServer,
        streams: SessionStreams,
        lookups: Lookups,
        guard: SaveGuard,
        status: AgentStatus,
        metrics: AgentMetrics,
        cache: CacheSection,
        max_lookups: int,
    ) -> None:
        self._sessions = sessions
        self._descriptors = descriptors
        self._streams = streams
        self._lookups = lookups
        self._guard = guard
        self._status = status
        self._metrics = metrics
        self._cache = cache
        self._max_lookups = max_lookups
        self._looking_up = 0

    def handlers(self) -> "grpc.GenericRpcHandler[Any, Any]":
        """What a gRPC server registers. Requests are parsed here, not there: gRPC calls malformed bytes UNKNOWN."""
        unary: dict[str, tuple[Callable[..., Awaitable[Message]], type[Message]]] = {
            "Lookup": (self.lookup, pb.LookupRequest),
            "Resume": (self.resume, pb.ResumeRequest),
            "NoteFailure": (self.note_failure, pb.NoteFailureRequest),
            "Load": (self.load, pb.LoadRequest),
            "Save": (self.save, pb.SaveRequest),
            "Release": (self.release, pb.ReleaseRequest),
            "Status": (self.get_status, pb.StatusRequest),
        }
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            name: grpc.unary_unary_rpc_method_handler(
                answering(handler, request), response_serializer=serialize
            )
            for name, (handler, request) in unary.items()
        }
        methods["Attach"] = grpc.stream_stream_rpc_method_handler(
            self._streams.attach, response_serializer=serialize
        )
        return grpc.method_handlers_generic_handler(rpc.SERVICE, methods)

    # ---------------------------------------------------------------------------------------------------- calls

    async def lookup(self, request: pb.LookupRequest, context: Call) -> pb.LookupResponse:
        """How many tokens of a prompt need not be computed; PRUNE_ONCE is the coordinator's."""
        session = self._session(context)
        budget = codec.seconds(request.deadline_ms, longest=self._cache.lookup_timeout)
        job = codec.lookup_request(
            request,
            hash_block=session.coordinator.sizes.hash_block,
            deadline=now() + budget,
            context=trace_context(context),
        )
        if self._status.draining:
            self._metrics.lookup_done(
                seconds=0.0, hit_tokens=0, miss_tokens=job.max_length, pruned_tokens=0, outcome="draining"
            )
            return pb.LookupResponse(miss_reason=pb.DRAINING)
        if self._looking_up >= self._max_lookups:
            raise CallRefused(
                Refusal.BUSY, f"{self._max_lookups} lookups are under way; see engines.maxLookups"
            )
        self._looking_up += 1
        try:
            answer = await self._lookups.lookup(
                coordinator=session.coordinator, keyspace=session.keyspace, request=job
            )
        finally:
            self._looking_up -= 1
        response = pb.LookupResponse(
            need_hashes=answer.need_hashes, miss_reason=answer.miss_reason, probed_keys=answer.probed_keys
        )
        if answer.plan is not None:
            response.plan.CopyFrom(
                plans.plan_to_wire(
                    answer.plan,
                    job,
                    identity=session.keyspace.digest,
                    strides=session.strides,
                    until=answer.good_until_unix_ms,
                )
            )
        return response

    async def resume(self, request: pb.ResumeRequest, context: Call) -> pb.ResumeResponse:
        """Where the engine resumes after failures on some rank; never prunes (PRUNE_ONCE)."""
        session = self._session(context)
        coordinator = session.coordinator
        wire = plans.plan_from_wire(request.plan, identity=session.keyspace.digest, coordinator=coordinator)
        request_id = codec.request_id(request.request_id)
        length = plans.resume_length(coordinator, wire.plan, start=request.start, failed=request.failed)
        if request.failed:
            self._guard.failed(
                session.engine_id,
                request_id=request_id,
                attempt=request.attempt,
                position=min(one.chunk * coordinator.groups[one.group].block_size for one in request.failed),
            )
        return pb.ResumeResponse(resume_length=length)

    async def note_failure(self, request: pb.NoteFailureRequest, context: Call) -> pb.NoteFailureResponse:
        """NO_SAVE_AFTER_FAILURE: a load failed on some rank, which this agent may not have seen."""
        self._guard.failed(
            self._session(context).engine_id,
            request_id=codec.request_id(request.request_id),
            attempt=request.attempt,
            position=request.token,
        )
        return pb.NoteFailureResponse()

    async def load(self, request: pb.LoadRequest, context: Call) -> pb.LoadResponse:
        """Begin a load; its end is a TransferDone event. One that is refused has failed, too, for every rank."""
        session = self._worker(context)
        request_id = codec.request_id(request.request_id)
        try:
            return self._load(session, request, context)
        except (CallRefused, TransferError):
            self._guard.failed(
                session.engine_id, request_id=request_id, attempt=request.attempt, position=request.start
            )
            raise

    def _load(self, session: WorkerSession, request: pb.LoadRequest, context: Call) -> pb.LoadResponse:
        budget = codec.seconds(request.deadline_ms, longest=self._cache.load_timeout)
        wire = plans.plan_from_wire(
            request.plan, identity=session.keyspace.digest, coordinator=session.coordinator
        )
        job = codec.load_job(request, wire, deadline=now() + budget, context=trace_context(context))
        transfer, chunks = session.manager.start_load(job)
        return pb.LoadResponse(transfer=transfer, chunks=chunks)

    async def save(self, request: pb.SaveRequest, context: Call) -> pb.SaveResponse:
        """Begin a save; its end is a TransferDone event, unless there is nothing to do."""
        session = self._worker(context)
        budget = codec.seconds(request.deadline_ms, longest=self._cache.save_timeout)
        job = codec.save_job(
            request,
            groups=len(session.coordinator.groups),
            hash_block=session.coordinator.sizes.hash_block,
            deadline=now() + budget,
            context=trace_context(context),
        )
        if self._status.draining:
            return pb.SaveResponse(skipped=DRAINING_TEXT)
        start = session.manager.start_save(job)
        return pb.SaveResponse(transfer=start.transfer, chunks=start.chunks, skipped=start.skipped)

    async def release(self, request: pb.ReleaseRequest, context: Call) -> pb.ReleaseResponse:
        """Return when FENCED holds for what is named, or say at the deadline that it cannot be known."""
        session = self._session(context)
        deadline = now() + codec.seconds(request.deadline_ms, longest=self._cache.load_timeout)
        what = request.WhichOneof("what")
        if what is None:
            raise codec.invalid("release names nothing: give a request_id, a transfer, or everything")
        if what == "transfer" and not isinstance(session, WorkerSession):
            raise codec.invalid("release.transfer: transfers belong to worker sessions; name a request_id")
        workers = (
            [session] if isinstance(session, WorkerSession) else self._sessions.workers_of(session.engine_id)
        )
        results = await asyncio.gather(
            *(
                worker.release(
                    request_id=codec.request_id(request.request_id) if what == "request_id" else None,
                    transfer=request.transfer if what == "transfer" else None,
                    deadline=deadline,
                )
                for worker in workers
            )
        )
        return _joined(results)

    async def get_status(self, _: pb.StatusRequest, context: Call) -> pb.StatusResponse:
        """What the agent is and has; also for a token that has not attached yet."""
        token = token_of(context)
        if token is None or not (self._descriptors.waits(token) or self._sessions.find(token)):
            raise unknown_token()
        return self._status.message()

    def _session(self, context: Call) -> Session:
        token = token_of(context)
        session = self._sessions.find(token) if token is not None else None
        if session is None:
            raise unknown_token()
        return session

    def _worker(self, context: Call) -> WorkerSession:
        session = self._session(context)
        if not isinstance(session, WorkerSession):
            raise CallRefused(
                Refusal.WRONG_ROLE, "a scheduler session cannot load or save; call from a worker's"
            )
        return session


def _joined(results: list[FenceResult]) -> pb.ReleaseResponse:
    unconfirmed = [transfer for result in results for transfer in result.unconfirmed]
    fenced = all(result.state is FenceState.FENCED for result in results)
    return pb.ReleaseResponse(state=pb.FENCED if fenced else pb.FENCE_UNCONFIRMED, unconfirmed=unconfirmed)
