"""Mooncake's numbers, translated once.

Promises: every code that Mooncake's `types.h` names has a name and a status; a code that it does not name becomes
`INTERNAL` and keeps its number. Refuses to guess: zero, positive and negative mean different things per operation, so
there is one function per operation and none for "a code".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvpool_agent.store.errors import StoreDeadline, StoreError, StoreMisuse, StoreRefused, StoreUnavailable
from kvpool_agent.store.protocol import ChunkStatus

_S = ChunkStatus

CODES: Final[dict[int, tuple[str, ChunkStatus]]] = {
    -1: ("INTERNAL_ERROR", _S.INTERNAL),
    -10: ("BUFFER_OVERFLOW", _S.INVALID),
    -100: ("SHARD_INDEX_OUT_OF_RANGE", _S.INTERNAL),
    -101: ("SEGMENT_NOT_FOUND", _S.PEER_FAILED),
    -102: ("SEGMENT_ALREADY_EXISTS", _S.INTERNAL),
    -103: ("CLIENT_NOT_FOUND", _S.MASTER_FAILED),
    -200: ("NO_AVAILABLE_HANDLE", _S.FULL),
    -300: ("INVALID_VERSION", _S.INTERNAL),
    -400: ("INVALID_KEY", _S.INVALID),
    -500: ("WRITE_FAIL", _S.INTERNAL),
    -600: ("INVALID_PARAMS", _S.INVALID),
    -601: ("ILLEGAL_CLIENT", _S.INVALID),
    -700: ("INVALID_WRITE", _S.INTERNAL),
    -701: ("INVALID_READ", _S.INTERNAL),
    -702: ("INVALID_REPLICA", _S.INTERNAL),
    -703: ("REPLICA_IS_NOT_READY", _S.NOT_READY),
    -704: ("OBJECT_NOT_FOUND", _S.ABSENT),
    -705: ("OBJECT_ALREADY_EXISTS", _S.INTERNAL),
    -706: ("OBJECT_HAS_LEASE", _S.LEASED),
    -707: ("LEASE_EXPIRED", _S.LEASE_EXPIRED),
    -708: ("OBJECT_HAS_REPLICATION_TASK", _S.LEASED),
    -709: ("OBJECT_NO_REPLICATION_TASK", _S.INTERNAL),
    -710: ("REPLICA_NOT_FOUND", _S.ABSENT),
    -711: ("REPLICA_ALREADY_EXISTS", _S.INTERNAL),
    -712: ("REPLICA_IS_GONE", _S.ABSENT),
    -713: ("REPLICA_NOT_IN_LOCAL_MEMORY", _S.ABSENT),
    -714: ("OBJECT_REPLICA_BUSY", _S.LEASED),
    -800: ("TRANSFER_FAIL", _S.PEER_FAILED),
    -801: ("CHECKSUM_MISMATCH", _S.CORRUPT),
    -900: ("RPC_FAIL", _S.MASTER_FAILED),
    -901: ("RPC_TIMEOUT", _S.MASTER_FAILED),
    -1000: ("ETCD_OPERATION_ERROR", _S.MASTER_FAILED),
    -1001: ("ETCD_KEY_NOT_EXIST", _S.MASTER_FAILED),
    -1002: ("ETCD_TRANSACTION_FAIL", _S.MASTER_FAILED),
    -1003: ("ETCD_CTX_CANCELLED", _S.MASTER_FAILED),
    -1004: ("HA_LEASE_ERROR", _S.MASTER_FAILED),
    -1005: ("OPLOG_ENTRY_NOT_FOUND", _S.MASTER_FAILED),
    -1006: ("OPLOG_ERROR", _S.MASTER_FAILED),
    -1007: ("OPLOG_ERROR", _S.MASTER_FAILED),
    -1010: ("UNAVAILABLE_IN_CURRENT_STATUS", _S.MASTER_FAILED),
    -1011: ("UNAVAILABLE_IN_CURRENT_MODE", _S.MASTER_FAILED),
    -1012: ("NOT_SUPPORTED", _S.INVALID),
    **dict.fromkeys(range(-1106, -1099), ("FILE_ERROR", _S.INTERNAL)),
    **dict.fromkeys(range(-1203, -1199), ("BUCKET_ERROR", _S.INTERNAL)),
    **dict.fromkeys((-1301, -1300), ("OFFLOAD_ERROR", _S.INTERNAL)),
    **dict.fromkeys(range(-1402, -1399), ("TASK_ERROR", _S.INTERNAL)),
    **dict.fromkeys(range(-1503, -1499), ("PERSIST_ERROR", _S.INTERNAL)),
    **dict.fromkeys(range(-1603, -1599), ("DFS_ERROR", _S.INTERNAL)),
}
"""Code to (name, status), after Mooncake 0.3.13 `mooncake-store/include/types.h`."""

_EXISTS: Final = -705
"""Good news for a put, nonsense for every other operation."""

_TOO_LONG: Final = frozenset({-600, -10})
"""What a get answers where the object is longer than its destination."""

UNSETTLED: Final = frozenset({_S.PEER_FAILED, _S.INTERNAL})
"""After these the process may still move bytes for the call: Mooncake writes late after a transfer timeout. The other
failures are told before a transfer begins or after it has ended."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A translated code: the status, and the number and name for logs and counters."""

    status: ChunkStatus
    code: int
    name: str


def failure(code: int) -> Outcome:
    """Translate a negative code. Unknown ones are `INTERNAL` and keep the number."""
    name, status = CODES.get(code, (f"UNKNOWN({code})", _S.INTERNAL))
    return Outcome(status, code, name)


def get_outcome(code: int, *, expected: int) -> Outcome:
    """Translate one entry of a batch get: the number of bytes delivered, or a code.

    An object of another size than `expected` is `BAD_SIZE`: a destination that is longer than the object is filled in
    part and reported as a success, one that is shorter is refused as a wrong argument. No other argument of a get can
    be wrong: keys and addresses were checked before the call.
    """
    if code == expected:
        return Outcome(_S.OK, code, "OK")
    if code in _TOO_LONG:
        return Outcome(_S.BAD_SIZE, code, CODES[code][0])
    return failure(code) if code < 0 else Outcome(_S.BAD_SIZE, code, "SIZE")


def put_outcome(code: int) -> Outcome:
    """Translate one entry of a batch put: 0 is good, and so is "was there already"; all else is not."""
    if code in (0, _EXISTS):
        return Outcome(_S.OK, code, "OK" if code == 0 else CODES[code][0])
    return failure(code) if code < 0 else Outcome(_S.INTERNAL, code, f"UNKNOWN({code})")


def exist_outcome(code: int) -> Outcome:
    """Translate one entry of `batch_is_exist`. Only 1 means present; errors are negative and thus true in Python."""
    if code == 1:
        return Outcome(_S.OK, code, "OK")
    if code == 0:
        return Outcome(_S.ABSENT, code, "OK")
    return failure(code) if code < 0 else Outcome(_S.INTERNAL, code, f"UNKNOWN({code})")


def remove_outcome(code: int) -> Outcome:
    """Translate one entry of `batch_remove`: 0 is removed, all else is not."""
    return failure(code) if code == _EXISTS else put_outcome(code)


def error_for(code: int, what: str) -> StoreError:
    """The error to raise when a whole call answered with `code`. `what` says which call, to whom."""
    outcome = failure(code)
    message = f"{what}: {outcome.name} ({code})"
    if code == -901:
        return StoreDeadline(f"{message}: the master accepted the request and did not answer in time")
    if outcome.status is _S.MASTER_FAILED:
        return StoreUnavailable(f"{message}: check that the master runs and that its address is right")
    if outcome.status is _S.INVALID:
        return StoreMisuse(f"{message}: the arguments were refused; the worker's log has the reason")
    return StoreRefused(message, code=code)
