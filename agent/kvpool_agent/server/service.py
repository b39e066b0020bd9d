"""The gRPC service: tokens to sessions, messages to jobs, errors to statuses.

Promises: every call carries a token and acts on that token's session alone; sizes are checked before anything is
allocated for them; a call answers by the deadline that it carries (BOUNDED); while the agent drains, lookups miss and
saves are skipped, so that no engine ever fails because of it. Refuses: to decide anything about chunks.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message
from opentelemetry.context import Context
from opentelemetry.propagate import extract

from kvpool_agent.config import CacheSection
from kvpool_agent.errors import CallRefused, Refusal, SessionRefused
from kvpool_agent.server import codec
from kvpool_agent.server.attach import Attacher
from kvpool_agent.server.descriptors import Channel, DescriptorServer
from kvpool_agent.server.refusals import status_of
from kvpool_agent.server.registry import Sessions
from kvpool_agent.server.session import Session, WorkerSession
from kvpool_agent.server.status import AgentStatus
from kvpool_agent.transfer.errors import CopyProtocolError
from kvpool_agent.transfer.lookup import Lookups
from kvpool_agent.transfer.types import FenceResult, FenceState
from kvpool_wire import agent_pb2 as pb
from kvpool_wire import rpc

log = logging.getLogger(__name__)

Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)
Call = grpc.aio.ServicerContext[Any, Any]

DRAINING_TEXT: Final = "the agent is draining"


class AgentService:
    """Handlers of `kvpool.agent.v1.Agent`."""

    def __init__(
        self,
        *,
        sessions: Sessions,
        descriptors: DescriptorServer,
        attacher: Attacher,
        lookups: Lookups,
        status: AgentStatus,
        cache: CacheSection,
        attach_seconds: float,
        max_lookups: int,
    ) -> None:
        self._sessions = sessions
        self._descriptors = descriptors
        self._attacher = attacher
        self._lookups = lookups
        self._status = status
        self._cache = cache
        self._attach_seconds = attach_seconds
        self._max_lookups = max_lookups
        self._looking_up = 0

    def handlers(self) -> "grpc.GenericRpcHandler[Any, Any]":
        """What a gRPC server registers."""
        unary: dict[str, tuple[Callable[..., Awaitable[Message]], type[Message]]] = {
            "Lookup": (self.lookup, pb.LookupRequest),
            "Resume": (self.resume, pb.ResumeRequest),
            "Load": (self.load, pb.LoadRequest),
            "Save": (self.save, pb.SaveRequest),
            "Release": (self.release, pb.ReleaseRequest),
            "Status": (self.get_status, pb.StatusRequest),
        }
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            name: grpc.unary_unary_rpc_method_handler(
                _answering(handler), request_deserializer=request.FromString, response_serializer=_serialize
            )
            for name, (handler, request) in unary.items()
        }
        methods["Attach"] = grpc.stream_stream_rpc_method_handler(
            self.attach, request_deserializer=pb.ClientEvent.FromString, response_serializer=_serialize
        )
        return grpc.method_handlers_generic_handler(rpc.SERVICE, methods)

    # -------------------------------------------------------------------------------------------------- session

    async def attach(self, _: object, context: Call) -> None:
        """The session: from its first message to the end of its stream."""
        channel = self._claim(context)
        if channel is None:
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED,
                "no unclaimed token in kvpool-token: connect to fd.sock, and attach with the token that it gives, once",
            )
        try:
            session = await self._open(channel, context)
        except BaseException:
            channel.close()
            raise
        if session is None:
            channel.close()
            return
        try:
            await self._serve(session, context)
        finally:
            await self._sessions.close(session)

    def _claim(self, context: Call) -> Channel | None:
        token = _token(context)
        return self._descriptors.claim(token) if token is not None else None

    async def _open(self, channel: Channel, context: Call) -> Session | None:
        """Open a session and write Ready; None after a refusal."""
        try:
            async with asyncio.timeout(self._attach_seconds):
                event = await context.read()
            if not isinstance(event, pb.ClientEvent) or event.WhichOneof("event") != "attach":
                raise SessionRefused(
                    "AttachMissing", "the first message of the stream has to be an AttachRequest"
                )
            if self._status.draining:
                raise SessionRefused("Draining", DRAINING_TEXT)
            opened = await self._attacher.open(event.attach, channel, context.write)
        except TimeoutError:
            await _refuse(
                context, "AttachMissing", f"no AttachRequest came within {self._attach_seconds:g} s"
            )
            return None
        except SessionRefused as error:
            await _refuse(context, error.reason, str(error))
            return None
        session = opened.session
        try:
            await context.write(pb.ServerEvent(ready=opened.ready))
        except BaseException:
            session.end("the client went away before Ready")
            await self._sessions.close(session)
            raise
        log.info(
            "session begun",
            extra={
                "session": session.number,
                "role": session.role,
                "engine": session.engine_id,
                "identity": session.keyspace.digest.hex(),
                "uid": channel.peer.uid,
                "mode": session.mode if isinstance(session, WorkerSession) else "",
                "mode_reason": opened.ready.mode_reason,
            },
        )
        return session

    async def _serve(self, session: Session, context: Call) -> None:
        """Move events both ways until one side is over."""
        tasks = [
            asyncio.ensure_future(self._read_events(session, context)),
            asyncio.ensure_future(_write_events(session, context)),
            asyncio.ensure_future(session.outbox.overflowed.wait()),
            asyncio.ensure_future(session.ended.wait()),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if session.outbox.overflowed.is_set():
                session.end("the client does not read its events")
            for task in tasks[:2]:
                if task.done() and task.exception() is not None:
                    session.end(f"the stream broke: {task.exception()}")
            session.end("the client closed the stream")
        except asyncio.CancelledError:
            session.end("the client went away")
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read_events(self, session: Session, context: Call) -> None:
        while isinstance(event := await context.read(), pb.ClientEvent):
            if event.WhichOneof("event") == "copy_done" and isinstance(session, WorkerSession):
                try:
                    session.copy_done(event.copy_done)
                except CopyProtocolError as error:
                    session.end(f"copy protocol broken: {error}")
                    return

    # ---------------------------------------------------------------------------------------------------- calls

    async def lookup(self, request: pb.LookupRequest, context: Call) -> pb.LookupResponse:
        """How many tokens of a prompt need not be computed; PRUNE_ONCE is the coordinator's."""
        session = self._session(context)
        budget = codec.seconds(request.deadline_ms, longest=self._cache.lookup_timeout)
        job = codec.lookup_request(
            request,
            hash_block=session.coordinator.sizes.hash_block,
            deadline=_now() + budget,
            context=_trace_context(context),
        )
        if self._status.draining:
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
                codec.plan_to_wire(
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
        wire = codec.plan_from_wire(request.plan, identity=session.keyspace.digest, coordinator=coordinator)
        sizes = [group.block_size for group in coordinator.groups]
        there = codec.arrived(wire.plan, sizes, start=request.start, failed=request.failed)
        return pb.ResumeResponse(resume_length=coordinator.resume_length(wire.plan, there))

    async def load(self, request: pb.LoadRequest, context: Call) -> pb.LoadResponse:
        """Begin a load; its end is a TransferDone event."""
        session = self._worker(context)
        budget = codec.seconds(request.deadline_ms, longest=self._cache.load_timeout)
        wire = codec.plan_from_wire(
            request.plan, identity=session.keyspace.digest, coordinator=session.coordinator
        )
        job = codec.load_job(request, wire, deadline=_now() + budget, context=_trace_context(context))
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
            deadline=_now() + budget,
            context=_trace_context(context),
        )
        if self._status.draining:
            return pb.SaveResponse(skipped=DRAINING_TEXT)
        start = session.manager.start_save(job)
        return pb.SaveResponse(transfer=start.transfer, chunks=start.chunks, skipped=start.skipped)

    async def release(self, request: pb.ReleaseRequest, context: Call) -> pb.ReleaseResponse:
        """Return when FENCED holds for what is named, or say at the deadline that it cannot be known."""
        session = self._session(context)
        deadline = _now() + codec.seconds(request.deadline_ms, longest=self._cache.load_timeout)
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
                worker.manager.release(
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
        token = _token(context)
        if token is None or not (self._descriptors.waits(token) or self._sessions.find(token)):
            raise _unknown_token()
        return self._status.message()

    def _session(self, context: Call) -> Session:
        token = _token(context)
        session = self._sessions.find(token) if token is not None else None
        if session is None:
            raise _unknown_token()
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


def _answering(handler: Callable[..., Awaitable[Message]]) -> Callable[..., Awaitable[Message]]:
    """The handler with its errors turned into statuses."""

    async def answer(request: Message, context: Call) -> Message:
        try:
            return await handler(request, context)
        except Exception as error:  # noqa: BLE001 - the border of the process: every error becomes a status
            code, message = status_of(error)
            await context.abort(code, message)

    return answer


async def _write_events(session: Session, context: Call) -> None:
    while True:
        await context.write(await session.outbox.get())


async def _refuse(context: Call, reason: str, message: str) -> None:
    log.warning("attach refused: %s: %s", reason, message)
    await context.write(pb.ServerEvent(refused=pb.Refused(reason=reason, message=message)))


def _unknown_token() -> CallRefused:
    return CallRefused(
        Refusal.UNKNOWN_TOKEN,
        f"no session has this {rpc.TOKEN_METADATA}: the session is over, or was never attached; attach again",
    )


def _token(context: Call) -> bytes | None:
    for key, value in context.invocation_metadata() or ():
        if key == rpc.TOKEN_METADATA and isinstance(value, str) and len(value) == 2 * rpc.TOKEN_BYTES:
            try:
                return bytes.fromhex(value)
            except ValueError:
                return None
    return None


def _trace_context(context: Call) -> Context | None:
    """The caller's trace context; None without one, so that nothing of the SDK runs then."""
    carrier = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
    return extract(carrier) if "traceparent" in carrier else None


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


def _now() -> float:
    return asyncio.get_running_loop().time()
