"""Messages to values and back. Pure: no clock, no state, nothing is allocated beyond the limits of the wire.

Promises: a job that left this module has the shapes that its identity implies, and every refusal names the field.
Plans have a module of their own, `plans`. Refuses: to judge block ids (the transfers do, before anything is touched).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, cast

import numpy as np
from numpy.typing import NDArray
from opentelemetry.context import Context

from kvpool_agent.coordinator import GroupKind, GroupSpec, KVCoordinator, Plan, SpecError
from kvpool_agent.errors import CallRefused, Refusal, SessionRefused
from kvpool_agent.transfer.lookup import LookupRequest
from kvpool_agent.transfer.types import HashChain, LoadJob, SaveJob, TransferResult
from kvpool_wire import agent_pb2 as pb
from kvpool_wire import limits
from kvpool_wire.identity import IdentityError, check_extras

_KINDS: Final = {
    pb.FULL_ATTENTION: GroupKind.FULL_ATTENTION,
    pb.SLIDING_WINDOW: GroupKind.SLIDING_WINDOW,
    pb.CHUNKED_LOCAL: GroupKind.CHUNKED_LOCAL,
    pb.MAMBA: GroupKind.MAMBA,
}


def invalid(message: str) -> CallRefused:
    """A refusal of the request itself."""
    return CallRefused(Refusal.INVALID, message)


# ------------------------------------------------------------------------------------------------------- identity


def coordinator_of(identity: pb.Identity) -> KVCoordinator:
    """The hit search of an identity that `check_identity` has passed.

    Raises:
        SessionRefused: the sizes do not fit together.
    """
    try:
        groups = [
            GroupSpec(
                kind=_KINDS[group.kind],
                block_size=group.block_size,
                sliding_window=group.sliding_window or None,
                chunk_size=group.chunk_size or None,
                eagle=group.eagle,
                variant=group.variant,
            )
            for group in identity.groups
        ]
        return KVCoordinator(
            groups,
            hash_block_size=identity.hash_block_size,
            scheduler_block_size=identity.scheduler_block_size,
            use_eagle=identity.use_eagle,
            retention_interval=identity.retention_interval
            if identity.HasField("retention_interval")
            else None,
            partial_hits=identity.partial_hits,
        )
    except SpecError as error:
        raise SessionRefused("UnservableGroups", f"identity.groups: {error}") from error


# --------------------------------------------------------------------------------------------------------- pieces


def request_id(text: str) -> str:
    """A request's id, refused if it is empty or too long."""
    if not 0 < len(text.encode()) <= limits.MAX_REQUEST_ID_BYTES:
        raise invalid(f"request_id has 1 to {limits.MAX_REQUEST_ID_BYTES} bytes, got {len(text.encode())}")
    return text


def seconds(deadline_ms: int, *, longest: float) -> float:
    """The time that a call may take: what it asks for, at most `longest`; 0 asks for all of it."""
    if deadline_ms > limits.MAX_DEADLINE_MS:
        raise invalid(f"deadline_ms {deadline_ms} is above {limits.MAX_DEADLINE_MS}; ask for less")
    return min(deadline_ms / 1000, longest) if deadline_ms else longest


def chain(packed: bytes, size: int, where: str) -> HashChain:
    """A packed hash chain, refused if it is not whole units of an acceptable size."""
    if not limits.MIN_HASH_SIZE <= size <= limits.MAX_HASH_SIZE:
        raise invalid(
            f"{where}.hash_size {size}: {limits.MIN_HASH_SIZE} to {limits.MAX_HASH_SIZE} bytes are served"
        )
    if len(packed) % size or len(packed) // size > limits.MAX_HASH_UNITS:
        raise invalid(
            f"{where}.hashes has {len(packed)} bytes; "
            f"whole hashes of {size}, at most {limits.MAX_HASH_UNITS}, are needed"
        )
    return HashChain(packed, size)


def extras_of(extras: pb.Extras) -> pb.Extras:
    """The extras of a request, refused if they cannot be part of a key."""
    try:
        check_extras(extras)
    except IdentityError as error:
        raise invalid(f"extras: {error}") from error
    return extras


def block_ids(blocks: Sequence[pb.BlockIds], groups: int) -> tuple[NDArray[np.int32], ...]:
    """Block ids per group, views of the message's own bytes."""
    if len(blocks) != groups:
        raise invalid(f"blocks has {len(blocks)} lists; one per group of the identity, {groups}, are needed")
    for index, some in enumerate(blocks):
        if len(some.ids) % 4 or len(some.ids) // 4 > limits.MAX_HASH_UNITS:
            raise invalid(
                f"blocks[{index}].ids has {len(some.ids)} bytes; whole little-endian int32 are needed"
            )
    return tuple(np.frombuffer(some.ids, dtype="<i4") for some in blocks)


@dataclass(frozen=True, slots=True)
class WirePlan:
    """A plan as it travels: the coordinator's, and what its keys are made of.

    Attributes:
        plan: checked against the coordinator.
        chain: hash units 0 .. at least the highest that a loaded chunk is keyed by.
        total_hashes: units of the whole chain.
        extras: of the request that was looked up.
    """

    plan: Plan
    chain: HashChain
    total_hashes: int
    extras: pb.Extras


# ----------------------------------------------------------------------------------------------------------- jobs


def lookup_request(
    message: pb.LookupRequest, *, hash_block: int, deadline: float, context: Context | None
) -> LookupRequest:
    """A lookup; `deadline` is event loop time."""
    request_id(message.request_id)
    units = chain(message.hashes, message.hash_size, "lookup")
    if message.total_hashes > limits.MAX_HASH_UNITS or len(units) > message.total_hashes:
        raise invalid(
            f"lookup.total_hashes {message.total_hashes} with {len(units)} hashes; "
            f"at least as many as were sent and at most {limits.MAX_HASH_UNITS} are served"
        )
    return LookupRequest(
        chain=units,
        total_hashes=message.total_hashes,
        # Tokens past the chain cannot be found, and a hostile number must not become a large array.
        max_length=min(message.max_length, message.total_hashes * hash_block),
        extras=extras_of(message.extras),
        deadline=deadline,
        context=context,
    )


def load_job(message: pb.LoadRequest, wire: WirePlan, *, deadline: float, context: Context | None) -> LoadJob:
    """A load of a plan that `plan_from_wire` has checked; `deadline` is event loop time."""
    if message.start > wire.plan.hit_length:
        raise invalid(f"load.start {message.start} is past the plan's hit of {wire.plan.hit_length} tokens")
    return LoadJob(
        request_id=request_id(message.request_id),
        plan=wire.plan,
        chain=wire.chain,
        total_hashes=wire.total_hashes,
        extras=wire.extras,
        start=message.start,
        blocks=block_ids(message.blocks, len(wire.plan.groups)),
        deadline=deadline,
        ordering=message.ordering,
        attempt=message.attempt,
        context=context,
    )


def save_job(
    message: pb.SaveRequest, *, groups: int, hash_block: int, deadline: float, context: Context | None
) -> SaveJob:
    """A save; `deadline` is event loop time."""
    units = chain(message.hashes, message.hash_size, "save")
    if not message.start <= message.end:
        raise invalid(f"save.start {message.start} is past save.end {message.end}")
    # A chain longer than the tokens is clipped; one that is shorter names no key for the last chunks.
    if message.end // hash_block > len(units):
        raise invalid(
            f"save.end {message.end} needs {message.end // hash_block} hash units, {len(units)} were sent"
        )
    longest = limits.MAX_HASH_UNITS * hash_block
    if message.HasField("num_prompt_tokens") and message.num_prompt_tokens > longest:
        raise invalid(f"save.num_prompt_tokens {message.num_prompt_tokens} is above {longest}")
    return SaveJob(
        request_id=request_id(message.request_id),
        chain=units,
        extras=extras_of(message.extras),
        start=message.start,
        end=message.end,
        num_prompt_tokens=message.num_prompt_tokens if message.HasField("num_prompt_tokens") else None,
        blocks=block_ids(message.blocks, groups),
        deadline=deadline,
        attempt=message.attempt,
        ordering=message.ordering,
        context=context,
    )


def transfer_done(result: TransferResult) -> pb.ServerEvent:
    """The event that reports a transfer."""
    done = pb.TransferDone(
        transfer=result.transfer,
        kind=cast("pb.TransferKind.ValueType", int(result.kind)),
        request_id=result.request_id,
        good=result.good,
        already_stored=result.already_stored,
        bytes=result.bytes,
        resume_length=result.resume_length,
    )
    for failure in result.failed:
        reason = cast("pb.FailureReason.ValueType", int(failure.reason))
        done.failed.add(group=failure.group, chunk=failure.chunk, reason=reason)
    return pb.ServerEvent(transfer_done=done)
