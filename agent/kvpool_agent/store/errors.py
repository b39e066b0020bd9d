"""Typed errors of the store layer.

Per-chunk trouble is never an exception: it is a `ChunkStatus` in the reply. These errors are for whole calls.

    StoreError
    ├── StoreUnavailable      the master cannot be reached, or no worker process is up
    │   └── WorkerDied        the process that held the call died before it answered
    ├── StoreDeadline         no answer by the deadline that the caller gave
    ├── StoreMisuse           the caller broke a rule (range, overlap, key); also a ValueError
    ├── StoreRefused          the store answered with an error code that is none of the above
    └── FenceUnconfirmed      a killed worker could not be reaped in time: its ring must not be reused
"""

from __future__ import annotations


class StoreError(Exception):
    """Base of every error that this package raises."""


class StoreUnavailable(StoreError):
    """The store cannot answer now: the master is unreachable or the worker process is not up. Retry later."""


class WorkerDied(StoreUnavailable):
    """The worker process died with the call in flight; nothing is known about the call's effect on the store."""


class StoreDeadline(StoreError):
    """The store did not answer by the caller's deadline."""


class StoreMisuse(StoreError, ValueError):
    """The call breaks a rule of this layer and was refused before it reached Mooncake, which would crash or lie."""


class StoreRefused(StoreError):
    """The store refused a whole call.

    Attributes:
        code: Mooncake's number, kept as it came.
    """

    def __init__(self, message: str, *, code: int) -> None:
        super().__init__(message)
        self.code = code


class FenceUnconfirmed(StoreError):
    """A killed worker was not reaped in time, so it may still write its ring.

    Attributes:
        pid: the process that would have to be gone.
    """

    def __init__(self, message: str, *, pid: int) -> None:
        super().__init__(message)
        self.pid = pid
