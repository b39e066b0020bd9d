"""Typed errors of the transfer layer. What goes wrong with one chunk is never an exception: it is in the result.

TransferError
├── TransferRefused          nothing was touched and no result will come
│   ├── BadPlan              the plan is not what its own hit length means, or lacks the hashes that it names
│   ├── BadBlocks            block ids that are out of range, null, doubled, or too few or too many
│   ├── BlocksBusy           a block is still held by another transfer of the same session
│   ├── QueueFull            too many transfers under way: do without the cache, or ask again (BOUNDED)
│   ├── Draining             the agent is going away
│   └── SessionClosed        the session is over
├── RingBroken               a process that may still write the ring could not be reaped: the ring is not used again
├── MoverFailed              the engine's blocks cannot be touched (no proof of order, mapping gone)
└── CopyProtocolError        the client answered a copy that cannot be: the session has to end
"""


class TransferError(Exception):
    """Base of every error that this package raises."""


class TransferRefused(TransferError):
    """The transfer was refused before anything was touched; no result will come."""


class BadPlan(TransferRefused):
    """The plan contradicts the coordinator (MASK_COVERS_HIT) or does not carry the hashes that it names."""


class BadBlocks(TransferRefused):
    """The block ids cannot be this request's: out of range, the null block, doubled, or of the wrong number."""


class BlocksBusy(TransferRefused):
    """A block is held by another transfer of the session; release that one first (FENCED)."""


class QueueFull(TransferRefused):
    """Too many transfers are under way in the session (BOUNDED)."""


class Draining(TransferRefused):
    """The agent is draining and takes no new transfers."""


class SessionClosed(TransferRefused):
    """The session is over."""


class RingBroken(TransferError):
    """A process that may still write the ring could not be reaped; attach again to get another ring."""


class MoverFailed(TransferError):
    """The engine's blocks cannot be touched safely; every chunk of the transfer fails with ENGINE_FAILED."""


class CopyProtocolError(TransferError):
    """A CopyDone that answers items which were never asked for; the client cannot be trusted with more."""
