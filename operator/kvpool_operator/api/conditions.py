"""Conditions: their types, their reasons, and how they change.

Promises: `lastTransitionTime` moves only when a status changes; every condition says which generation it judges; a type
appears once; the order never changes, so that a status without news is byte for byte the old one. Types and reasons are
part of the API: scripts wait for them. Refuses to read a clock: the time of a change is an argument.
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Final

from pydantic import Field

from kvpool_operator.api.model import Int64, Section

LONGEST_MESSAGE: Final = 4096
"""Characters; the API would take 32,768, but nobody reads those in a terminal."""


class Status(StrEnum):
    """The answer of a condition."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class PoolCondition(StrEnum):
    """What is said of a pool, in the order in which people should read it."""

    READY = "Ready"
    ACCEPTED = "Accepted"
    STORE_AVAILABLE = "StoreAvailable"
    STORE_WRITABLE = "StoreWritable"
    AGENTS_AVAILABLE = "AgentsAvailable"
    TRANSPORT_READY = "TransportReady"
    ENGINES_COMPATIBLE = "EnginesCompatible"
    CACHE_AT_RISK = "CacheAtRisk"
    DRAINING = "Draining"
    PROGRESSING = "Progressing"
    DEGRADED = "Degraded"


class NodeCondition(StrEnum):
    """What is said of one node of a pool."""

    READY = "Ready"
    PREFLIGHT_PASSED = "PreflightPassed"
    SEGMENT_MOUNTED = "SegmentMounted"
    DRAINING = "Draining"


class Reason(StrEnum):
    """Why: one word for scripts; the sentence for people is the message."""

    ACCEPTED = "Accepted"
    INVALID = "Invalid"
    CRD_OUTDATED = "CRDOutdated"
    PAUSED = "Paused"
    UNKNOWN_VERSION = "UnknownVersion"
    RELEASE_LACKS_FEATURE = "ReleaseLacksFeature"
    IMAGE_NOT_ALLOWED = "ImageNotAllowed"
    HOST_NETWORK_FORBIDDEN = "HostNetworkForbidden"
    HOST_PATH_FORBIDDEN = "HostPathForbidden"
    NAME_TAKEN = "NameTaken"
    APPLY_FAILED = "ApplyFailed"
    ALL_UP = "AllUp"
    NOT_READY = "NotReady"
    NOT_OBSERVED = "NotObserved"
    EXTERNAL = "External"
    PROBE_SUCCEEDED = "ProbeSucceeded"
    PROBE_FAILED = "ProbeFailed"
    AGENTS_MISSING = "AgentsMissing"
    NO_NODES = "NoNodes"
    PREFLIGHT_PASSED = "PreflightPassed"
    PREFLIGHT_FAILED = "PreflightFailed"
    FELL_BACK_TO_TCP = "FellBackToTCP"
    NO_ENGINES = "NoEngines"
    CLIENT_VERSION_SKEW = "ClientVersionSkew"
    IDENTITY_REFUSED = "IdentityRefused"
    COMPATIBLE = "Compatible"
    SINGLE_MASTER = "SingleMaster"
    INTEGRITY_RELAXED = "IntegrityRelaxed"
    AS_WANTED = "AsWanted"
    ROLLOUT_WAITING = "RolloutWaiting"
    ROLLING_OUT = "RollingOut"
    DRAIN_STARTED = "DrainStarted"
    DRAIN_BLOCKED = "DrainBlocked"
    DRAIN_DONE = "DrainDone"
    NOTHING_TO_DO = "NothingToDo"
    MOUNTED = "Mounted"
    NOT_MOUNTED = "NotMounted"
    SILENT = "Silent"


class Condition(Section):
    """One statement about an object, in the form of `metav1.Condition`."""

    type: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Z][A-Za-z0-9]*$")]
    """What is stated."""

    status: Status
    """Whether it holds."""

    observed_generation: Annotated[Int64, Field(ge=0)] = 0
    """Generation of the spec that was judged."""

    last_transition_time: Annotated[
        str, Field(min_length=20, max_length=32, pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.]{8,15}Z$")
    ]
    """When `status` changed last, in UTC."""

    reason: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Z][A-Za-z0-9]*$")]
    """Why, in one word for scripts."""

    message: Annotated[str, Field(max_length=LONGEST_MESSAGE)] = ""
    """Why, and what to do about it, for people."""


def set_condition(
    conditions: Iterable[Condition],
    kind: PoolCondition | NodeCondition,
    status: Status,
    *,
    reason: Reason,
    message: str,
    generation: int,
    now: str,
) -> tuple[Condition, ...]:
    """`conditions` with one of them replaced or added, in the order of its enumeration.

    `now` is the present time as RFC 3339 in UTC with whole seconds, used only when `status` differs from what is there;
    a message longer than `LONGEST_MESSAGE` is cut.
    """
    kept = {one.type: one for one in conditions}
    before = kept.get(kind)
    since = before.last_transition_time if before is not None and before.status is status else now
    kept[str(kind)] = Condition.model_validate(
        {
            "type": str(kind),
            "status": status,
            "observedGeneration": generation,
            "lastTransitionTime": since,
            "reason": str(reason),
            "message": message[:LONGEST_MESSAGE],
        }
    )
    order = {str(one): place for place, one in enumerate(type(kind))}
    return tuple(sorted(kept.values(), key=lambda one: (order.get(one.type, len(order)), one.type)))


def find(conditions: Iterable[Condition], kind: PoolCondition | NodeCondition) -> Condition | None:
    """The condition of a type, None while nobody has stated it."""
    return next((one for one in conditions if one.type == kind), None)
