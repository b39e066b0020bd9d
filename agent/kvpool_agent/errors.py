"""The agent's own errors. Each message says what is wrong, where, and how to mend it.

    AgentError
    ├── ConfigFault      the configuration cannot be used; the process ends with exit code 2
    ├── StartFault       the configuration is right but the node is not (a socket in use); exit code 3
    ├── SessionRefused   an Attach is answered by `Refused`; `reason` is one CamelCase word
    └── CallRefused      a call is answered by a gRPC status; `kind` says which

Errors of the store, the pools and the transfers have trees of their own; `server/refusals.py` maps those onto these.
"""

from enum import StrEnum
from pathlib import Path


class AgentError(Exception):
    """Base of what the agent's shell raises."""


class ConfigFault(AgentError):
    """The configuration cannot be used.

    Attributes:
        source: file or environment variable.
        problems: one line each: field, what is wrong, how to mend it.
    """

    def __init__(self, source: Path | str, *problems: str) -> None:
        super().__init__(f"{source}: " + "; ".join(problems))
        self.source = source
        self.problems = problems


class StartFault(AgentError):
    """This node cannot run the agent as configured."""


class SessionRefused(AgentError):
    """An engine's Attach cannot be served.

    Attributes:
        reason: one CamelCase word for machines.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Refusal(StrEnum):
    """Why a call is refused; each has one gRPC status."""

    INVALID = "invalid"
    """The request itself is wrong; sending it again cannot help (INVALID_ARGUMENT)."""
    UNKNOWN_TOKEN = "unknown_token"
    """No session has this token (UNAUTHENTICATED)."""
    WRONG_ROLE = "wrong_role"
    """The session is of the other kind (PERMISSION_DENIED)."""
    FOREIGN = "foreign"
    """The plan is of another identity than the session (FAILED_PRECONDITION)."""
    BUSY = "busy"
    """Too much is under way (RESOURCE_EXHAUSTED); try again, or do without the cache."""
    DRAINING = "draining"
    """The agent is going away (UNAVAILABLE)."""


class CallRefused(AgentError):
    """A call cannot be served.

    Attributes:
        kind: decides the gRPC status.
    """

    def __init__(self, kind: Refusal, message: str) -> None:
        super().__init__(message)
        self.kind = kind
