"""Plans to the wire and back.

MASK_COVERS_HIT: a plan from the wire is compared with what the coordinator recomputes from its hit length, before any
of it is used: the guard against a load that leaves blocks unfilled. Pure; nothing is allocated beyond the limits of the
wire. Refuses: to trust a plan because it is well formed, and plans of another identity or version.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvpool_agent.coordinator import GroupPlan, KVCoordinator, Plan, PlanError, check_plan
from kvpool_agent.errors import CallRefused, Refusal
from kvpool_agent.server import codec
from kvpool_agent.transfer.lookup import LookupRequest
from kvpool_wire import agent_pb2 as pb
from kvpool_wire import limits

PLAN_VERSION: Final = 1
"""Version of the plan's meaning; an agent refuses one that it does not know."""


def plan_to_wire(
    plan: Plan, request: LookupRequest, *, identity: bytes, strides: Sequence[int], until: int
) -> pb.Plan:
    """The message of a plan.

    Args:
        plan: from the coordinator.
        request: what was asked; its chain covers every unit that the plan names.
        identity: 16 bytes of the identity's digest.
        strides: hash units per block, one per group.
        until: unix time in milliseconds; the plan's lease.
    """
    highest = max((int(group.key_units.max(initial=-1)) for group in plan.groups), default=-1)
    message = pb.Plan(
        version=PLAN_VERSION,
        identity=identity,
        extras=request.extras,
        hit_length=plan.hit_length,
        hit_length_without_eagle=plan.hit_length_without_eagle,
        total_hashes=request.total_hashes,
        hash_size=request.chain.size,
        hashes=request.chain.head(highest + 1).packed,
        good_until_unix_ms=until,
    )
    for index, group in enumerate(plan.groups):
        message.groups.add(blocks=group.mask.size, mask=np.packbits(group.mask, bitorder="little").tobytes())
        closing = _closing_units(group.mask.size, strides[index])
        for chunk in np.flatnonzero(group.mask & (group.key_units != closing)):
            message.tail_keys.add(group=index, chunk=int(chunk), unit=int(group.key_units[chunk]))
    return message


def plan_from_wire(message: pb.Plan, *, identity: bytes, coordinator: KVCoordinator) -> codec.WirePlan:
    """A plan from the wire, checked.

    Raises:
        CallRefused: INVALID if it is malformed or says something else than the coordinator does (MASK_COVERS_HIT);
            FOREIGN if it is of another version or identity.
    """
    if message.version != PLAN_VERSION:
        raise CallRefused(Refusal.FOREIGN, f"plan.version {message.version}; this agent knows {PLAN_VERSION}")
    if message.identity != identity:
        raise CallRefused(
            Refusal.FOREIGN,
            f"plan of identity {message.identity.hex()[:32]}, the session's own is {identity.hex()}: "
            "the engines differ in model, layout, hashes or pool",
        )
    if not message.total_hashes <= limits.MAX_HASH_UNITS:
        raise codec.invalid(f"plan.total_hashes {message.total_hashes} is above {limits.MAX_HASH_UNITS}")
    units = codec.chain(message.hashes, message.hash_size, "plan")
    groups = _groups_from_wire(message, coordinator)
    plan = Plan(message.hit_length, message.hit_length_without_eagle, groups)
    try:
        check_plan(coordinator, range(message.total_hashes), plan)
    except PlanError as error:
        raise codec.invalid(f"MASK_COVERS_HIT: {error}; a load would leave blocks unfilled") from error
    highest = max(int(group.key_units.max(initial=-1)) for group in groups)
    if highest >= len(units):
        raise codec.invalid(
            f"plan.hashes ends at unit {len(units)}, a loaded chunk is keyed by unit {highest}"
        )
    return codec.WirePlan(plan, units, message.total_hashes, codec.extras_of(message.extras))


def _groups_from_wire(message: pb.Plan, coordinator: KVCoordinator) -> tuple[GroupPlan, ...]:
    if len(message.groups) != len(coordinator.groups):
        raise codec.invalid(
            f"plan.groups has {len(message.groups)} entries, the identity has {len(coordinator.groups)} groups"
        )
    groups: list[GroupPlan] = []
    for index, group in enumerate(message.groups):
        if group.blocks > limits.MAX_HASH_UNITS or len(group.mask) != -(-group.blocks // 8):
            raise codec.invalid(
                f"plan.groups[{index}]: a mask of {len(group.mask)} bytes cannot hold {group.blocks} blocks"
            )
        bits = np.unpackbits(np.frombuffer(group.mask, dtype=np.uint8), bitorder="little").astype(np.bool_)
        if bits[group.blocks :].any():
            raise codec.invalid(f"plan.groups[{index}].mask has bits set past its {group.blocks} blocks")
        mask = bits[: group.blocks]
        stride = coordinator.groups[index].block_size // coordinator.sizes.hash_block
        groups.append(GroupPlan(mask, np.where(mask, _closing_units(mask.size, stride), -1)))
    if len(message.tail_keys) > len(groups):
        raise codec.invalid(
            f"plan.tail_keys has {len(message.tail_keys)} entries; a group has one tail at most"
        )
    for tail in message.tail_keys:
        if tail.group >= len(groups) or tail.chunk >= groups[tail.group].mask.size:
            raise codec.invalid(
                f"plan.tail_keys names chunk {tail.chunk} of group {tail.group}, which the hit does not cover"
            )
        groups[tail.group].key_units[tail.chunk] = tail.unit
    return tuple(groups)


def _closing_units(blocks: int, stride: int) -> NDArray[np.int64]:
    return np.arange(1, blocks + 1, dtype=np.int64) * stride - 1


def resume_length(
    coordinator: KVCoordinator, plan: Plan, *, start: int, failed: Sequence[pb.ChunkFailure]
) -> int:
    """LOADED_OR_REPORTED: where an engine with `start` tokens goes on when these chunks of a load failed on some rank.

    A failure of a chunk below `start` says that what was believed local is not; nothing is taken for local then.

    Raises:
        CallRefused: a failure names a chunk that the hit does not cover.
    """
    there = [group.mask.copy() for group in plan.groups]
    for failure in failed:
        if failure.group >= len(there) or failure.chunk >= there[failure.group].size:
            raise codec.invalid(
                f"failed names chunk {failure.chunk} of group {failure.group}, which the hit does not cover"
            )
        there[failure.group][failure.chunk] = False
    below = any((one.chunk + 1) * coordinator.groups[one.group].block_size <= start for one in failed)
    return coordinator.resume_length(plan, there, start=0 if below else start)
