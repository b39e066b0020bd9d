"""The asynchronous client: an engine's scheduler and its workers; `kvpool_engine.client` runs it for synchronous code.

Every call returns within the deadline it was given. A cache that is slow, full or gone answers "no hit", "skipped" or
"failed chunks"; only a call that is wrong in itself raises. All methods belong to one event loop; the properties may be
read from any thread. Arguments and results are documented on the synchronous twins.
"""

from kvpool_engine.base import Client
from kvpool_engine.scheduler import SchedulerClient
from kvpool_engine.worker import Blocks, WorkerClient

__all__ = ["Blocks", "Client", "SchedulerClient", "WorkerClient"]
