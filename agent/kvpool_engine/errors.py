"""The client library's errors, one tree.

    KvpoolError
    ├── AgentUnavailableError    no session with the agent, and the call has no "no cache" to answer
    ├── AttachRefusedError       the agent answered Attach with a reason: it will not serve this engine as declared
    ├── RequestRejectedError     the agent refused one call as wrong; nothing was touched
    ├── DeclarationError         tensors and identity do not fit together (also a ValueError)
    ├── PlanError                bytes that are no plan of this version (also a ValueError)
    └── ClientClosedError        the client was closed

A cache that is slow, full or gone never raises: it answers a miss, a skipped save, or failed chunks.
"""


class KvpoolError(Exception):
    """Anything that this library raises on purpose."""


class AgentUnavailableError(KvpoolError):
    """There is no session with the node's agent; the message says where it was looked for and what went wrong."""


class AttachRefusedError(KvpoolError):
    """The agent refused the session.

    Attributes:
        reason: one CamelCase word.
        message: what, where and how to mend it, in the agent's words.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.message = message


class RequestRejectedError(KvpoolError):
    """The agent found a call wrong in itself (a bad block id, a foreign plan); nothing was touched.

    Attributes:
        code: name of the gRPC status, such as INVALID_ARGUMENT.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class DeclarationError(KvpoolError, ValueError):
    """Tensors that do not fit the identity, or memory that cannot be shared in the mode that was asked for."""


class PlanError(KvpoolError, ValueError):
    """Bytes that are no plan, or one of another version."""


class ClientClosedError(KvpoolError):
    """The client was closed before the call."""
