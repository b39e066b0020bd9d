"""`Prober` over a worker process.

Promises: an answer, or an error by the deadline; while the master is known to be down the error comes at once and no
call is sent. Refuses to read anything but 1 as "present", and to guess for keys that the master did not answer for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvpool_agent.store import frames
from kvpool_agent.store.codes import error_for, exist_outcome, remove_outcome
from kvpool_agent.store.errors import StoreDeadline, StoreError, StoreMisuse, StoreUnavailable
from kvpool_agent.store.frames import Op
from kvpool_agent.store.guards import check_key, check_keys
from kvpool_agent.store.protocol import ChunkStatus, ReplicaLocation
from kvpool_agent.store.reach import MasterReach
from kvpool_agent.store.supervisor import Supervisor

MAX_KEYS: Final = 1 << 22


class MooncakeProber:
    """See `protocol.Prober`."""

    def __init__(self, supervisor: Supervisor, reach: MasterReach) -> None:
        self._supervisor = supervisor
        self._reach = reach

    async def exists(
        self, prefixes: Sequence[bytes], hashes: bytes, hash_size: int, *, deadline: float
    ) -> NDArray[np.uint8]:
        """See `Prober.exists`."""
        if hash_size <= 0 or len(hashes) % hash_size:
            raise StoreMisuse(f"{len(hashes)} bytes are no whole number of hashes of {hash_size} bytes")
        shape = (len(prefixes), len(hashes) // hash_size)
        count = shape[0] * shape[1]
        if count > MAX_KEYS:
            raise StoreMisuse(f"{count} keys in one question, the limit is {MAX_KEYS}; ask in parts")
        for index, prefix in enumerate(prefixes):
            check_key(prefix, where=f"prefix {index}")
        if count == 0:
            return np.zeros(shape, dtype=np.uint8)
        payload = frames.pack_hashes(prefixes, hashes, hash_size)
        codes = frames.unpack_codes(await self._ask(Op.EXISTS, payload, count, deadline), count=count)
        present = codes == 1
        strange = codes[~present & (codes != 0)]
        if strange.size:
            code = int(strange[0])
            raise self._failed(code, f"existence of {count} keys")
        self._reach.answered()
        answer: NDArray[np.uint8] = present.astype(np.uint8).reshape(shape)
        return answer

    async def exists_keys(self, keys: Sequence[bytes], *, deadline: float) -> list[ChunkStatus]:
        """See `Prober.exists_keys`."""
        check_keys(keys)
        if not keys:
            return []
        answer = await self._ask(Op.EXISTS_KEYS, frames.pack_keys(keys), len(keys), deadline)
        codes = frames.unpack_codes(answer, count=len(keys))
        statuses = [exist_outcome(int(code)).status for code in codes]
        if all(status is ChunkStatus.MASTER_FAILED for status in statuses):
            raise self._failed(int(codes[0]), f"existence of {len(keys)} keys")
        self._reach.answered()
        return statuses

    async def remove(self, keys: Sequence[bytes], *, deadline: float) -> list[ChunkStatus]:
        """See `Prober.remove`."""
        check_keys(keys)
        unique = list(dict.fromkeys(keys))
        if not unique:
            return []
        answer = await self._ask(Op.REMOVE, frames.pack_keys(unique), len(unique), deadline)
        codes = frames.unpack_codes(answer, count=len(unique))
        by_key = {key: remove_outcome(int(code)).status for key, code in zip(unique, codes, strict=True)}
        return [by_key[key] for key in keys]

    async def locate(self, keys: Sequence[bytes], *, deadline: float) -> list[ReplicaLocation | None]:
        """See `Prober.locate`. Mooncake answers "nowhere" also when its master does not answer."""
        check_keys(keys)
        if not keys:
            return []
        answer = await self._ask(Op.LOCATE, frames.pack_keys(keys), len(keys), deadline)
        return frames.unpack_locations(answer, count=len(keys))

    def _failed(self, code: int, what: str) -> StoreError:
        """The error for a code; if it is the master's, nobody else needs to find out."""
        outcome = exist_outcome(code)
        if outcome.status is ChunkStatus.MASTER_FAILED:
            self._reach.failed(f"{what}: {outcome.name}")
        return error_for(code, what)

    async def _ask(self, op: Op, payload: bytes, count: int, deadline: float) -> bytes:
        if self._reach.known_down:
            raise StoreUnavailable(f"the master does not answer: {self._reach.why}")
        future = self._supervisor.current().send(op, payload)
        try:
            async with asyncio.timeout_at(deadline):
                return await future
        except TimeoutError:
            raise StoreDeadline(f"{op.name} of {count} keys: no answer by the deadline") from None
