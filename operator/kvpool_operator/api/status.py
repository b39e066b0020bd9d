"""`status` of a pool: what the operator saw, written only by it.

Promises: a figure that could not be read is absent, never 0; figures are whole and rounded, so that traffic does not
change a status every minute. What belongs to one node is in its KVStoreNode.
"""

from typing import Annotated

from pydantic import Field

from kvpool_operator.api.conditions import Condition
from kvpool_operator.api.model import Int32, Int64, Section, as_map, unique_by
from kvpool_operator.api.quantity import Size

Count = Annotated[Int32, Field(ge=0)]
Text = Annotated[str, Field(max_length=512)]


class AgentCounts(Section):
    """Agents, counted."""

    desired: Count | None = None
    """Nodes that should run an agent."""

    ready: Count | None = None
    """Agents that are ready."""

    updated: Count | None = None
    """Agents that run what the spec now asks for; the others wait for their rollout."""

    draining: Count | None = None
    """Agents that are being emptied."""

    summary: Annotated[str, Field(max_length=32)] | None = None
    """`ready/desired`, for the printed column."""


class Capacity(Section):
    """Memory of the pool, read from the master."""

    total: Size | None = None
    """What all segments hold together."""

    used: Size | None = None
    """What chunks take of it."""


class EngineCounts(Section):
    """Engines, counted."""

    attached: Count | None = None
    """Engine processes that are attached, on all nodes."""

    identities: Count | None = None
    """Different identities among them; engines of one identity share their chunks."""


class Socket(Section):
    """Where engines find the agent on their node."""

    host_path: Text
    """Folder of the sockets, on every node of the pool. Mount it read-only."""

    gid: Annotated[Int64, Field(ge=1, le=2_147_483_647)]
    """Supplemental group that an engine needs to use it."""


class Images(Section):
    """Images that the pool holds, by digest where the release table gives one."""

    agent: Text
    """Image of the agents."""

    master: Text
    """Image of the masters."""


class PoolStatus(Section):
    """What the operator saw."""

    observed_generation: Annotated[Int64, Field(ge=0)] | None = None
    """Generation of the spec that the operator has acted on."""

    conditions: Annotated[tuple[Condition, ...], Field(max_length=32), unique_by("type"), as_map("type")] = ()
    """Statements about the pool; `Ready` sums them up."""

    version: Annotated[str, Field(max_length=32)] | None = None
    """Release that the pool holds."""

    store_version: Annotated[str, Field(max_length=32)] | None = None
    """Version of Mooncake in it; clients work only within its minor line."""

    images: Images | None = None
    """Images that the pool holds."""

    master_address: Text | None = None
    """Where clients find the master."""

    agents: AgentCounts | None = None
    """Agents, counted."""

    capacity: Capacity | None = None
    """Memory of the pool."""

    keys: Annotated[Int64, Field(ge=0)] | None = None
    """Chunks in the pool."""

    engines: EngineCounts | None = None
    """Engines, counted."""

    hit_percent: Annotated[Int32, Field(ge=0, le=100)] | None = None
    """Tokens found among tokens asked for, over the last minutes."""

    socket: Socket | None = None
    """Where engines find the agent on their node."""
