"""What engine and agent must agree on: messages, keys, the chunk trailer, limits.

Depends on protobuf only, so that both sides can install it; holds no I/O and no policy.
"""

from typing import Final

VERSION: Final = "0.1.0.dev0"
"""Version of the distribution, as both sides report it to each other."""

PROTOCOL: Final = 1
"""Version of the RPC that this build speaks; it also serves the one before, once there is one."""

PROTOCOLS: Final = (1,)
"""Versions of the RPC that this build serves, newest first."""
