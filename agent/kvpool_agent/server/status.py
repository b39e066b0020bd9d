"""What the agent says about itself: to engines by RPC, to Kubernetes by health pages, to metrics as gauges.

One object answers all three, so that they cannot disagree. Refuses to ask anybody: it tells what is known now.
"""

from collections.abc import Callable
from typing import Final

from kvpool_agent.config import AgentConfig
from kvpool_agent.server.registry import Sessions
from kvpool_agent.store.protocol import StoreHealth
from kvpool_agent.telemetry import names
from kvpool_agent.telemetry.metrics import Gauges
from kvpool_wire import PROTOCOL, VERSION
from kvpool_wire import agent_pb2 as pb


class AgentStatus:
    """The state of one agent.

    Attributes:
        serving: the sockets answer (proved by the agent's own call over them).
        draining: the agent is going away.
    """

    def __init__(self, config: AgentConfig, sessions: Sessions, health: Callable[[], StoreHealth]) -> None:
        self.serving = False
        self.draining = False
        self._config: Final = config
        self._sessions = sessions
        self._health = health

    def message(self) -> pb.StatusResponse:
        """The answer to the Status call."""
        health, counts = self._health(), self._sessions.counts()
        workers = counts["mapped"] + counts["copy"]
        return pb.StatusResponse(
            pool=self._config.pool.full_name,
            agent_version=VERSION,
            protocol=PROTOCOL,
            draining=self.draining,
            store_reachable=health.master_reachable,
            # None leaves the field out: never answered is neither "just now" nor any other number.
            store_last_success_age_s=health.last_success_age,
            scheduler_sessions=counts["scheduler"],
            worker_sessions=workers,
            transfers_in_flight=self._sessions.in_flight(),
            modes=[mode for mode in ("mapped", "copy") if counts[mode]],
            segment_bytes=health.segment_mounted_bytes,
            integrity=self._config.cache.integrity.value,
        )

    def not_ready(self) -> str:
        """Why the agent should get no new engines, "" if it should.

        A store that is down does not make an agent unready: its engines go on with misses, and taking the agent away
        would only cost them the session.
        """
        if self.draining:
            return "draining"
        return "" if self.serving else "starting"

    def gauges(self) -> Gauges:
        """The gauges of the catalogue."""
        health = self._health()
        found: Gauges = {
            names.SEGMENT_BYTES: {
                ("configured",): self._config.segment.size,
                ("mounted",): health.segment_mounted_bytes,
            },
            names.ENGINE_ATTACHED: {(role,): count for role, count in self._sessions.counts().items()},
            names.INFLIGHT: {(): self._sessions.in_flight()},
            names.DRAINING: {(): int(self.draining)},
        }
        if health.last_success_age is not None:
            found[names.STORE_AGE] = {(): health.last_success_age}
        return found
