"""Names of the RPC: paths, metadata keys, sockets. Both sides spell them from here."""

from typing import Final

SERVICE: Final = "kvpool.agent.v1.Agent"
"""Full name of the gRPC service."""


def path(method: str) -> str:
    """The gRPC path of a method of `SERVICE`."""
    return f"/{SERVICE}/{method}"


TOKEN_METADATA: Final = "kvpool-token"
"""Metadata key: the session's token, 32 hex digits, as the descriptor socket handed it out."""

RPC_SOCKET: Final = "agent.sock"
"""File name of the gRPC socket inside the pool's socket directory."""

DESCRIPTOR_SOCKET: Final = "fd.sock"
"""File name of the SOCK_SEQPACKET socket that passes descriptors, beside the other."""

TOKEN_BYTES: Final = 16

# Messages on the descriptor socket: one byte of kind, then what the kind says. Descriptors ride along (SCM_RIGHTS).
HELLO: Final = b"H"
"""Agent to client, at once after connect: HELLO + token (16 bytes) + agent epoch (8 bytes, little-endian) with one
descriptor: the pidfd of the process that writes engine memory."""

STORAGES: Final = b"S"
"""Client to agent, after DescriptorsWanted: STORAGES + first storage index (4 bytes) + count (4 bytes) with that many
descriptors (at most `DESCRIPTORS_PER_MESSAGE`), one sealed memory file per storage."""

RING: Final = b"R"
"""Agent to client, before Ready: RING + size (8 bytes) with one descriptor: the session's ring."""

DESCRIPTORS_PER_MESSAGE: Final = 128
"""Linux refuses more than 253 in one message."""
