"""The orderly end: engines are told, transfers finish, the segment is unmounted, telemetry goes last.

Promises: within the drain timeout whatever was under way ends by itself, then it is ended; a second signal ends the
wait at once; each step has a bound of its own (BOUNDED), so that the whole is known in advance. A new lookup is a miss
and a new save is skipped from the first moment. Refuses to wait for engines: they go on without the cache.
"""

import asyncio
import logging
from typing import Final

from kvpool_agent.server.registry import Sessions
from kvpool_agent.server.session import WorkerSession
from kvpool_agent.server.status import AgentStatus
from kvpool_wire import agent_pb2 as pb

log = logging.getLogger(__name__)

STORE_SECONDS: Final = 10.0
"""For unmounting the segment: the master answers within 3 s, and copies off it may be under way."""


async def drain(status: AgentStatus, sessions: Sessions, *, seconds: float, hurry: asyncio.Event) -> None:
    """Tell engines, let transfers finish for at most `seconds` or until `hurry`, then end every session."""
    status.draining = True
    begun = asyncio.get_running_loop().time()
    log.info("draining", extra={"sessions": len(sessions), "in_flight": sessions.in_flight()})
    sessions.broadcast(pb.ServerEvent(draining=pb.Draining(deadline_ms=int(seconds * 1000))))
    if not hurry.is_set():
        await _finish(sessions, begun + seconds, hurry)
    left = sessions.in_flight()
    if left:
        log.warning("%d transfers did not finish in time and are ended", left)
    await sessions.close_all("the agent is going away")
    log.info("drained", extra={"seconds": round(asyncio.get_running_loop().time() - begun, 3)})


async def _finish(sessions: Sessions, deadline: float, hurry: asyncio.Event) -> None:
    workers = [one for one in sessions if isinstance(one, WorkerSession)]
    hurrying = asyncio.ensure_future(hurry.wait())
    finishing = asyncio.ensure_future(_all_drained(workers, deadline))
    try:
        await asyncio.wait((hurrying, finishing), return_when=asyncio.FIRST_COMPLETED)
    finally:
        hurrying.cancel()
        finishing.cancel()
        await asyncio.gather(hurrying, finishing, return_exceptions=True)


async def _all_drained(workers: list[WorkerSession], deadline: float) -> bool:
    await asyncio.gather(*(one.manager.drain(deadline) for one in workers))
    return True
