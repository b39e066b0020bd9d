"""Plans and jobs over the wire: what goes out comes back, and nothing else comes in."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool_agent.coordinator import KVCoordinator, Plan
from kvpool_agent.errors import CallRefused, Refusal, SessionRefused
from kvpool_agent.server import codec, plans
from kvpool_agent.transfer.lookup import LookupRequest
from kvpool_agent.transfer.types import ChunkFailure, FailReason, HashChain, TransferKind, TransferResult
from kvpool_wire import agent_pb2 as pb
from kvpool_wire import limits
from support import hybrid_engine as model

DIGEST = bytes(range(16))
SIZE = 32


def identity(*, partial: bool = False, eagle: bool = True) -> pb.Identity:
    """Full attention in blocks of two hash units, a window in blocks of one."""
    one = model.identity()
    one.use_eagle = eagle
    one.partial_hits = partial
    one.scheduler_block_size = 2 * model.BLOCK
    one.groups[0].block_size = 2 * model.BLOCK
    one.groups[0].eagle = eagle
    return one


def planned(
    units: int, *, partial: bool = False, present: int | None = None
) -> tuple[KVCoordinator, LookupRequest, Plan]:
    coordinator = codec.coordinator_of(identity(partial=partial))
    chain = HashChain(b"".join(model.hashes("x", units)), SIZE)
    request = LookupRequest(chain, units, units * model.BLOCK, pb.Extras(cache_salt="s"), 0.0)
    there = np.zeros(units, np.bool_)
    there[:present] = True
    return coordinator, request, coordinator.plan(range(units), units * model.BLOCK, [there, there])


def to_wire(request: LookupRequest, plan: Plan, *, partial: bool = False) -> pb.Plan:
    del partial
    return plans.plan_to_wire(plan, request, identity=DIGEST, strides=[2, 1], until=99)


@given(st.integers(1, 40), st.integers(0, 40), st.booleans())
def test_a_plan_comes_back_as_it_went(units: int, present: int, partial: bool) -> None:
    coordinator, request, plan = planned(units, partial=partial, present=min(present, units))
    message = pb.Plan.FromString(to_wire(request, plan).SerializeToString())
    found = plans.plan_from_wire(message, identity=DIGEST, coordinator=coordinator)
    assert found.plan == plan
    assert found.extras == request.extras
    assert found.total_hashes == units
    assert request.chain.packed.startswith(found.chain.packed)


def test_a_hit_inside_a_block_names_the_key_that_was_seen() -> None:
    _, request, plan = planned(8, partial=True)
    message = to_wire(request, plan)
    assert plan.hit_length % (2 * model.BLOCK) == model.BLOCK, "8 units are there, one is pruned"
    assert [(tail.group, tail.chunk) for tail in message.tail_keys] == [(0, plan.groups[0].mask.size - 1)]


def test_a_miss_is_a_plan_without_hashes() -> None:
    coordinator, request, plan = planned(8, present=0)
    message = to_wire(request, plan)
    assert (message.hit_length, message.hashes) == (0, b"")
    found = plans.plan_from_wire(message, identity=DIGEST, coordinator=coordinator)
    assert [group.mask.size for group in found.plan.groups] == [0, 0]


def _set(field: str, value: object) -> Callable[[pb.Plan], None]:
    return lambda plan: setattr(plan, field, value)


def _mask(group: int, mask: bytes, blocks: int | None = None) -> Callable[[pb.Plan], None]:
    def change(plan: pb.Plan) -> None:
        plan.groups[group].mask = mask
        if blocks is not None:
            plan.groups[group].blocks = blocks

    return change


def _drop_group(plan: pb.Plan) -> None:
    del plan.groups[1]


def _tail(group: int, chunk: int, unit: int) -> Callable[[pb.Plan], None]:
    def change(plan: pb.Plan) -> None:
        plan.tail_keys.add(group=group, chunk=chunk, unit=unit)

    return change


def _twice(plan: pb.Plan) -> None:
    for _ in range(3):
        plan.tail_keys.add(group=0, chunk=0, unit=1)


BAD_PLANS: list[tuple[Refusal, str, Callable[[pb.Plan], None]]] = [
    (Refusal.FOREIGN, "version", _set("version", 2)),
    (Refusal.FOREIGN, "identity", _set("identity", b"x" * 16)),
    (Refusal.FOREIGN, "identity", _set("identity", b"")),
    (Refusal.INVALID, "total_hashes", _set("total_hashes", limits.MAX_HASH_UNITS + 1)),
    (Refusal.INVALID, "hash_size", _set("hash_size", 0)),
    (Refusal.INVALID, "hash_size", _set("hash_size", 65)),
    (Refusal.INVALID, "hashes", _set("hashes", b"x" * 33)),
    (Refusal.INVALID, "hashes", _set("hashes", b"")),
    (Refusal.INVALID, "MASK_COVERS_HIT", _set("hit_length", 32)),
    (Refusal.INVALID, "MASK_COVERS_HIT", _set("hit_length", (1 << 64) - 1)),
    (Refusal.INVALID, "MASK_COVERS_HIT", _set("hit_length_without_eagle", 0)),
    (Refusal.INVALID, "MASK_COVERS_HIT", _set("total_hashes", 3)),
    (Refusal.INVALID, "MASK_COVERS_HIT", _mask(0, b"\x03")),
    (Refusal.INVALID, "MASK_COVERS_HIT", _mask(0, b"\x03", 2)),
    (Refusal.INVALID, "MASK_COVERS_HIT", _mask(0, b"\x0f", 4)),
    (Refusal.INVALID, "past its", _mask(0, b"\xff")),
    (Refusal.INVALID, "cannot hold", _mask(0, b"\x07", 9)),
    (Refusal.INVALID, "cannot hold", _mask(0, b"\x07", 0xFFFFFFFF)),
    (Refusal.INVALID, "cannot hold", _mask(0, b"")),
    (Refusal.INVALID, "entries", _drop_group),
    (Refusal.INVALID, "MASK_COVERS_HIT", _tail(0, 0, 0)),
    (Refusal.INVALID, "MASK_COVERS_HIT", _tail(0, 2, 0xFFFFFFFF)),
    (Refusal.INVALID, "does not cover", _tail(0, 3, 1)),
    (Refusal.INVALID, "does not cover", _tail(2, 0, 1)),
    (Refusal.INVALID, "one tail", _twice),
    (Refusal.INVALID, "revision", lambda plan: setattr(plan.extras, "lora_revision", "r")),
]


@pytest.mark.parametrize(("kind", "text", "change"), BAD_PLANS)
def test_any_other_plan_is_refused_mask_covers_hit(
    kind: Refusal, text: str, change: Callable[[pb.Plan], None]
) -> None:
    coordinator, request, plan = planned(8)
    message = to_wire(request, plan)
    assert plan.groups[0].mask.size == 3, "four blocks are there, one is pruned"
    plans.plan_from_wire(message, identity=DIGEST, coordinator=coordinator)
    change(message)
    with pytest.raises(CallRefused, match=text) as caught:
        plans.plan_from_wire(message, identity=DIGEST, coordinator=coordinator)
    assert caught.value.kind is kind


def test_a_resume_counts_what_did_not_fail_and_what_is_local() -> None:
    coordinator, _, plan = planned(8)
    sizes = [group.block_size for group in coordinator.groups]
    assert (sizes, plan.hit_length) == ([32, 16], 96)

    def resume(start: int, *failed: tuple[int, int]) -> int:
        failures = [pb.ChunkFailure(group=group, chunk=chunk) for group, chunk in failed]
        return plans.resume_length(coordinator, plan, start=start, failed=failures)

    assert resume(0) == 96
    # At 64 the engine has all that a hit of 64 needs; 80 cuts a block, and a window that ends at 64 begins too early.
    assert resume(64, (0, 2)) == 64
    assert resume(80, (0, 2)) == 0
    # A failure outranks what start says, also of a chunk that the plan never loaded.
    assert not plan.groups[1].mask[0]
    assert resume(64, (0, 2), (1, 0)) == 0
    for stray in ((0, 3), (2, 0)):
        with pytest.raises(CallRefused, match="does not cover"):
            resume(0, stray)


@pytest.mark.parametrize(
    ("asked", "longest", "granted"),
    [(0, 5.0, 5.0), (100, 5.0, 0.1), (60_000, 5.0, 5.0), (limits.MAX_DEADLINE_MS, 1.0, 1.0)],
)
def test_a_deadline_is_what_is_asked_for_at_most_what_is_allowed(
    asked: int, longest: float, granted: float
) -> None:
    assert codec.seconds(asked, longest=longest) == granted


def test_a_deadline_beyond_all_is_refused_bounded() -> None:
    with pytest.raises(CallRefused, match="deadline_ms"):
        codec.seconds(limits.MAX_DEADLINE_MS + 1, longest=1.0)


def test_a_lookup_is_clipped_to_its_chain() -> None:
    message = pb.LookupRequest(
        request_id="r", total_hashes=4, hash_size=SIZE, hashes=b"x" * 64, max_length=1 << 63
    )
    job = codec.lookup_request(message, hash_block=16, deadline=1.0, context=None)
    assert (job.max_length, len(job.chain), job.total_hashes) == (64, 2, 4)


def test_a_load_past_its_hit_is_refused() -> None:
    coordinator, request, plan = planned(8)
    wire = plans.plan_from_wire(to_wire(request, plan), identity=DIGEST, coordinator=coordinator)
    message = pb.LoadRequest(request_id="r", start=plan.hit_length + 1, blocks=[pb.BlockIds()] * 2)
    with pytest.raises(CallRefused, match=r"load\.start"):
        codec.load_job(message, wire, deadline=1.0, context=None)
    message.start = 0
    message.blocks[0].ids = np.array([5, 6, 7], "<i4").tobytes()
    job = codec.load_job(message, wire, deadline=1.0, context=None)
    assert [ids.tolist() for ids in job.blocks] == [[5, 6, 7], []]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"start": 33}, "start"),
        ({"end": 80}, "needs 5 hash units"),
        ({"num_prompt_tokens": 1 << 40}, "num_prompt_tokens"),
        ({"request_id": ""}, "request_id"),
        ({"blocks": [pb.BlockIds()]}, "blocks has 1"),
        ({"blocks": [pb.BlockIds(ids=b"abc"), pb.BlockIds()]}, r"blocks\[0\]"),
        ({"hash_size": 7}, "hash_size"),
    ],
)
def test_a_save_that_cannot_be_is_refused(fields: dict[str, object], text: str) -> None:
    whole: dict[str, object] = {
        "request_id": "r", "hash_size": SIZE, "hashes": b"x" * 128, "end": 32, "blocks": [pb.BlockIds()] * 2
    }  # fmt: skip
    codec.save_job(pb.SaveRequest(**whole), groups=2, hash_block=16, deadline=1.0, context=None)  # type: ignore[arg-type]
    message = pb.SaveRequest(**{**whole, **fields})  # type: ignore[arg-type]
    with pytest.raises(CallRefused, match=text):
        codec.save_job(message, groups=2, hash_block=16, deadline=1.0, context=None)


def test_a_report_names_every_failed_chunk() -> None:
    result = TransferResult(
        7,
        TransferKind.LOAD,
        "r",
        3,
        0,
        99,
        (ChunkFailure(1, 2, FailReason.CORRUPT), ChunkFailure(0, 5, FailReason.EVICTED)),
        48,
    )
    done = codec.transfer_done(result).transfer_done
    assert (done.transfer, done.kind, done.good, done.bytes, done.resume_length) == (7, pb.LOAD, 3, 99, 48)
    assert [(one.group, one.chunk, one.reason) for one in done.failed] == [
        (1, 2, pb.CORRUPT),
        (0, 5, pb.EVICTED),
    ]


def test_groups_that_cannot_be_searched_are_refused_at_attach() -> None:
    bad = identity()
    bad.groups[0].block_size = 24
    with pytest.raises(SessionRefused, match="block_size") as caught:
        codec.coordinator_of(bad)
    assert caught.value.reason == "UnservableGroups"
