"""Opens sessions: who attaches, with which identity, as what.

SAME_IDENTITY: the engine's identity decides its key space here, once for the session. Promises: a session is open with
everything in order, or refused with a reason, and then nothing of it is left. Refuses: protocols that this build does
not serve, identities that no hit can be computed for, and more sessions than the configuration allows.
"""

from dataclasses import dataclass

from kvpool_agent.config import EngineVersion
from kvpool_agent.errors import SessionRefused
from kvpool_agent.server import codec
from kvpool_agent.server.descriptors import Channel
from kvpool_agent.server.registry import Sessions
from kvpool_agent.server.session import Outbox, Session, SessionArguments
from kvpool_agent.server.worker import Send, WorkerTools, open_worker
from kvpool_wire import PROTOCOLS, VERSION, limits
from kvpool_wire import agent_pb2 as pb
from kvpool_wire.identity import IdentityError
from kvpool_wire.keys import KeySpace


@dataclass(frozen=True, slots=True)
class Opened:
    """A session and what its client is told."""

    session: Session
    ready: pb.Ready


class Attacher:
    """Opens the sessions of one agent."""

    def __init__(self, tools: WorkerTools, sessions: Sessions) -> None:
        self._tools = tools
        self._sessions = sessions

    async def open(self, request: pb.AttachRequest, channel: Channel, send: Send) -> Opened:
        """Open the session that `request` asks for.

        Raises:
            SessionRefused: why not; nothing of the session is left, `channel` is still the caller's.
        """
        protocol = next((one for one in PROTOCOLS if one in request.protocols), None)
        if protocol is None:
            raise SessionRefused(
                "ProtocolUnknown",
                f"the client speaks protocols {list(request.protocols)[:8]}, this agent {list(PROTOCOLS)}; "
                "upgrade the older of the two",
            )
        if not 0 < len(request.engine_id.encode()) <= limits.MAX_STRING_BYTES:
            raise SessionRefused("EngineIdInvalid", f"engine_id has 1 to {limits.MAX_STRING_BYTES} bytes")
        number = self._sessions.reserve()
        if number is None:
            raise SessionRefused(
                "TooManySessions", "the agent serves no more sessions; see engines.maxSessions"
            )
        try:
            opened = await self._open(request, self._common(request, channel, number), send)
        except BaseException:
            self._sessions.unreserve()
            raise
        self._sessions.add(opened.session)
        opened.ready.protocol = protocol
        return opened

    def _common(self, request: pb.AttachRequest, channel: Channel, number: int) -> SessionArguments:
        config = self._tools.config
        with_engine = config.engines.engine_version is EngineVersion.MATCH
        try:
            keyspace = KeySpace.of(config.pool.full_name, request.identity, with_engine=with_engine)
        except IdentityError as error:
            raise SessionRefused("IdentityInvalid", str(error)) from error
        return SessionArguments(
            number=number,
            engine_id=request.engine_id,
            keyspace=keyspace,
            coordinator=codec.coordinator_of(request.identity),
            channel=channel,
            outbox=Outbox(),
        )

    async def _open(self, request: pb.AttachRequest, common: SessionArguments, send: Send) -> Opened:
        ready = pb.Ready(
            session=common["number"],
            identity_digest=common["keyspace"].digest,
            pool=self._tools.config.pool.full_name,
            agent_version=VERSION,
        )
        match request.WhichOneof("role"):
            case "scheduler":
                return Opened(Session(**common), ready)
            case "worker":
                worker = await open_worker(self._tools, request.worker, common, send=send, ready=ready)
                return Opened(worker, ready)
            case _:
                raise SessionRefused("RoleMissing", "the Attach names neither scheduler nor worker")
