"""Errors to gRPC statuses: one table, so that a caller sees what, where and how to mend it, and never a traceback.

ABORTED says: refused before anything was touched, and not by the caller's fault; a client goes on without the cache and
withholds no block. UNAVAILABLE and INTERNAL leave that open (FENCED).
Errors that nobody foresaw become INTERNAL with a number that the agent's log explains; their text stays inside.
"""

import logging
import secrets
from typing import Final

import grpc

from kvpool_agent.coordinator import PlanError
from kvpool_agent.errors import CallRefused, Refusal
from kvpool_agent.store.errors import StoreDeadline, StoreError
from kvpool_agent.transfer.errors import (
    BadBlocks,
    BadPlan,
    BlocksBusy,
    CopyProtocolError,
    Draining,
    QueueFull,
    RingBroken,
    SessionClosed,
    TransferError,
)
from kvpool_wire.identity import IdentityError

log = logging.getLogger(__name__)

_KINDS: Final = {
    Refusal.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    Refusal.UNKNOWN_TOKEN: grpc.StatusCode.UNAUTHENTICATED,
    Refusal.WRONG_ROLE: grpc.StatusCode.PERMISSION_DENIED,
    Refusal.FOREIGN: grpc.StatusCode.FAILED_PRECONDITION,
    Refusal.BUSY: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Refusal.DRAINING: grpc.StatusCode.ABORTED,
}

# The first class that matches decides: the special ones stand before their bases.
_TABLE: Final[tuple[tuple[type[Exception], grpc.StatusCode], ...]] = (
    (BadPlan, grpc.StatusCode.INVALID_ARGUMENT),
    (BadBlocks, grpc.StatusCode.INVALID_ARGUMENT),
    (BlocksBusy, grpc.StatusCode.ABORTED),
    (QueueFull, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (Draining, grpc.StatusCode.ABORTED),
    (SessionClosed, grpc.StatusCode.ABORTED),
    (RingBroken, grpc.StatusCode.ABORTED),
    (CopyProtocolError, grpc.StatusCode.INVALID_ARGUMENT),
    (TransferError, grpc.StatusCode.FAILED_PRECONDITION),
    (PlanError, grpc.StatusCode.INVALID_ARGUMENT),
    (IdentityError, grpc.StatusCode.INVALID_ARGUMENT),
    (StoreDeadline, grpc.StatusCode.DEADLINE_EXCEEDED),
    (StoreError, grpc.StatusCode.UNAVAILABLE),
)


def status_of(error: Exception) -> tuple[grpc.StatusCode, str]:
    """The status and the message that a caller gets for `error`."""
    if isinstance(error, CallRefused):
        return _KINDS[error.kind], str(error)
    for kind, code in _TABLE:
        if isinstance(error, kind):
            return code, str(error)
    number = secrets.token_hex(4)
    log.error("call failed, incident %s", number, exc_info=error)
    return grpc.StatusCode.INTERNAL, f"internal error; the agent's log has it as incident {number}"
