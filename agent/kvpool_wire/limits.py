"""The limits of the wire (BOUNDED): what a message may hold before it is refused.

Every number says why it is that number. They bound what an agent allocates for a caller that it does not trust.
"""

from typing import Final

MAX_MESSAGE_BYTES: Final = 96 * 1024 * 1024
"""One gRPC message. A plan for a million tokens in units of 1 token with 64-byte hashes is 64 MiB."""

FIRST_HASHES: Final = 256
"""Hash units that a client sends unasked. A miss is decided on these, whatever the prompt's length."""

MAX_HASH_UNITS: Final = 1 << 20
"""Hash units of one request: a million tokens even at one token a unit."""

MIN_HASH_SIZE: Final = 8
"""Bytes. A shorter hash collides by chance within the life of a pool."""

MAX_HASH_SIZE: Final = 64
"""Bytes: SHA-512, the longest that any engine's hash algorithm gives."""

MAX_GROUPS: Final = 64
MAX_LAYERS: Final = 4096
"""Layers of one engine, all groups together."""

MAX_TENSORS_PER_LAYER: Final = 16
MAX_AXES: Final = 8
MAX_SHARDS: Final = 4096
"""KV shards of one group: tensor-parallel ranks times pipeline stages."""

MAX_STORAGES: Final = 4096
MAX_BLOCKS: Final = (1 << 31) - 1
"""Block ids travel as int32."""

MAX_STRING_BYTES: Final = 1024
"""One name, salt or revision."""

MAX_MEDIA: Final = 4096
"""Media items of one request."""

MAX_REQUEST_ID_BYTES: Final = 256

MAX_DEADLINE_MS: Final = 600_000
"""Ten minutes; a caller that would wait longer has lost its request anyway."""

MAX_POOL_NAME_BYTES: Final = 128
"""`namespace.name` of the pool, both DNS labels."""

MAX_STORAGE_BYTES: Final = 1 << 46
"""64 TiB, past any device's memory; offsets computed from it stay far inside 64 bits."""

MAX_CHUNK_BYTES: Final = 1 << 30
"""Payload of one chunk. Recurrent states of the largest models are a quarter of it; a ring has to hold several."""
