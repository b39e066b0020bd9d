"""The connector's parts that need no vLLM: settings, fingerprints, pins, what is cached, how a lookup is asked for."""

import json
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.rig import checkpoint
from kvpool_engine.plan import Plan
from kvpool_engine.types import MissReason, Mode
from kvpool_engine.vllm.fingerprint import FingerprintError, check_pinned, model_fingerprint, weights_digest
from kvpool_engine.vllm.pins import Pins
from kvpool_engine.vllm.requests import Tracked, uncacheable, wire_key
from kvpool_engine.vllm.settings import Settings, SettingsError
from kvpool_wire import agent_pb2 as pb
from kvpool_wire import limits

# ------------------------------------------------------------------------------------------------------------- settings


def test_settings_have_defaults_and_take_what_is_given() -> None:
    settings = Settings.of({"socket_dir": "/run/kvpool/x", "mode": "copy", "load_timeout": 3})
    assert settings.socket_dir == Path("/run/kvpool/x")
    assert settings.mode is Mode.COPY
    assert settings.load_timeout == 3.0
    assert settings.lookup_timeout == 1.0


def test_settings_take_the_folder_from_the_environment() -> None:
    assert Settings.of({}, {"KVPOOL_SOCKET_DIR": "/run/kvpool/y"}).socket_dir == Path("/run/kvpool/y")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, "socket_dir"),
        ({"socket_dir": "/x", "load_timout": 1}, "load_timout"),
        ({"socket_dir": "/x", "load_timeout": 0}, "load_timeout"),
        ({"socket_dir": "/x", "load_timeout": True}, "load_timeout"),
        ({"socket_dir": "/x", "lookup_timeout": "1s"}, "lookup_timeout"),
        ({"socket_dir": "/x", "mode": "direct"}, "mode"),
    ],
)
def test_settings_that_cannot_be_used_are_named(given: dict[str, Any], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        Settings.of(given, {})


# --------------------------------------------------------------------------------------------------------- fingerprints


def model(folder: Path | str, **changes: Any) -> SimpleNamespace:
    config = {"hidden_size": 64, "_name_or_path": str(folder), "transformers_version": "5"}
    config |= changes.pop("config", {})
    values = {
        "model": str(folder),
        "revision": None,
        "dtype": "float32",
        "quantization": None,
        "max_model_len": 1024,
        "hf_config": SimpleNamespace(to_dict=lambda: config, _commit_hash=None),
    }
    return SimpleNamespace(**(values | changes))


def test_same_identity_two_copies_of_one_model_are_one(tmp_path: Path) -> None:
    first = checkpoint.write_target(tmp_path / "a")
    second = checkpoint.write_target(tmp_path / "b")
    assert model_fingerprint(model(first), given="") == model_fingerprint(model(second), given="")


def test_same_identity_other_weights_or_types_are_others(tmp_path: Path) -> None:
    folder = checkpoint.write_target(tmp_path / "a")
    other = checkpoint.write_target(tmp_path / "b", seed=8)
    variants = [
        model(folder),
        model(other),
        model(folder, dtype="bfloat16"),
        model(folder, quantization="fp8"),
        model(folder, config={"rope_theta": 5.0}),
        model(folder, config={"rope_scaling": {"type": "dynamic"}}),
        model(folder, config={"rope_scaling": {"type": "dynamic"}}, max_model_len=2048),
    ]
    assert len({model_fingerprint(one, given="") for one in variants}) == len(variants)
    assert model_fingerprint(model(folder), given="v2") != model_fingerprint(model(folder), given="")


def test_same_identity_files_of_equal_name_and_size_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(8 << 20))
    before = weights_digest(tmp_path)
    content = bytearray(path.read_bytes())
    content[: len(content)] = bytes([1]) * len(content)
    path.write_bytes(content)
    assert weights_digest(tmp_path) != before


def test_same_identity_one_edited_tensor_in_a_large_file_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    sizes = {f"layer{index}": 64 << 10 for index in range(96)}
    table, place = {}, 0
    for name, size in sizes.items():
        table[name] = {"dtype": "U8", "shape": [size], "data_offsets": [place, place + size]}
        place += size
    head = json.dumps(table).encode()
    content = bytearray(len(head).to_bytes(8, "little") + head + bytes(place))
    seen = set()
    for index in (None, 0, 1, 47, 94, 95):
        edited = bytearray(content)
        if index is not None:
            begin = 8 + len(head) + index * (64 << 10)
            edited[begin : begin + (64 << 10)] = b"\1" * (64 << 10)
        path.write_bytes(edited)
        seen.add(weights_digest(tmp_path))
    assert len(seen) == 6


def test_same_identity_a_given_name_stands_for_weights_that_are_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(FingerprintError, match="no weights in"):
        model_fingerprint(model(tmp_path), given="")
    named = {model_fingerprint(model(tmp_path), given=name) for name in ("v1", "v2")}
    assert len(named) == 2


def test_same_identity_weights_that_nothing_pins_are_refused() -> None:
    with pytest.raises(FingerprintError, match="revision"):
        check_pinned(model("org/name"), given="")
    check_pinned(model("org/name"), given="our build 7")
    check_pinned(model("org/name", revision="0" * 40), given="")


# ----------------------------------------------------------------------------------------------------------------- pins


@dataclass
class FakePool:
    """References by block."""

    blocks: list[int] = field(default_factory=lambda: list(range(40)))
    references: list[int] = field(default_factory=lambda: [0] * 40)

    def touch(self, blocks: Any) -> None:
        for block in blocks:
            self.references[block] += 1

    def free_blocks(self, ordered_blocks: Any) -> None:
        for block in ordered_blocks:
            self.references[block] -= 1


def test_fenced_a_save_keeps_its_blocks_until_every_rank_is_done() -> None:
    pool = FakePool()
    pins = Pins(pool, ranks=2)
    assert pins.pin_save(1, (3, 4))
    pins.save_over(1, 1)
    assert pool.references[3] == 1
    assert [pins.saving, pins.blocks] == [True, 2]
    pins.save_over(1, 1)
    assert pool.references == [0] * 40
    assert [pins.saving, pins.blocks] == [False, 0]
    pins.save_over(1, 1)  # late, and once more: nothing changes
    assert pool.references == [0] * 40


def test_bounded_saves_pin_a_share_of_the_pool_only() -> None:
    pins = Pins(FakePool(), ranks=1)
    assert pins.pin_save(1, tuple(range(10)))
    assert not pins.pin_save(2, (20,))
    pins.save_over(1, 1)
    assert pins.pin_save(2, (20,))


def test_fenced_held_blocks_come_back_once() -> None:
    pool = FakePool()
    pins = Pins(pool, ranks=2)
    pins.hold("0/7", (5,))
    pins.hold("0/7", (5,))
    pins.hold("1/7", (5,))
    assert pool.references[5] == 2
    assert not pins.saving, "an idle engine need not go on stepping for blocks that are merely withheld"
    for name in ("0/7", "0/7", "1/7"):
        pins.lift(name)
    assert pool.references[5] == 0


# ------------------------------------------------------------------------------------------------------------- requests


def request(**changes: Any) -> SimpleNamespace:
    values: dict[str, Any] = {
        "request_id": "r",
        "lora_request": None,
        "mm_features": [],
        "prompt_embeds": None,
        "prompt_is_token_ids": None,
        "pooling_params": None,
        "resumable": False,
        "cache_salt": None,
    }
    return SimpleNamespace(**(values | changes))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ""),
        ({"cache_salt": "tenant"}, ""),
        ({"cache_salt": "x" * 2000}, "cache_salt"),
        ({"lora_request": object()}, "lora"),
        ({"mm_features": [object()]}, "multimodal"),
        ({"prompt_embeds": object()}, "prompt_embeds"),
        ({"pooling_params": object()}, "pooling"),
        ({"resumable": True}, "streaming"),
    ],
)
def test_same_identity_requests_whose_kv_is_not_in_the_key_are_not_cached(
    changes: dict[str, Any], why: str
) -> None:
    assert uncacheable(request(**changes)) == why


def test_every_attempt_of_a_request_has_a_name_of_its_own() -> None:
    long = "x" * 1000
    names = {wire_key("r", 1), wire_key("r", 2), wire_key(long, 1), wire_key(long + "y", 1)}
    assert len(names) == 4
    assert all(len(name.encode()) <= limits.MAX_REQUEST_ID_BYTES for name in names)


def tracked() -> Tracked:
    return Tracked(request=request(), key="r#1", reason="", preemptions=0)


def plan(hit: int, good_until: float) -> Plan:
    return Plan(pb.Plan(version=1, hit_length=hit, good_until_unix_ms=int(good_until * 1000)))


def test_bounded_a_lookup_is_asked_once_and_never_waited_for() -> None:
    one, asked = tracked(), []
    future: Future[Plan] = Future()

    def ask() -> "Future[Plan]":
        asked.append(future)
        return future

    assert one.answer(ask, patience=60.0) is None
    assert one.answer(ask, patience=60.0) is None
    future.set_result(Plan.miss(MissReason.NONE))
    found = one.answer(ask, patience=60.0)
    assert found is not None
    assert found.hit_length == 0
    assert one.answer(ask, patience=60.0) is found
    assert len(asked) == 1


def test_bounded_a_lookup_that_never_ends_is_a_miss() -> None:
    one, stuck, now = tracked(), Future[Plan](), [100.0]

    def look() -> Plan | None:
        return one.answer(lambda: stuck, patience=3.0, stopwatch=lambda: now[0])

    assert look() is None
    now[0] = 103.0
    assert look() is None
    now[0] = 103.1
    found = look()
    assert found is not None
    assert (found.hit_length, found.miss_reason) == (0, MissReason.DEADLINE)
    assert stuck.cancelled()


def test_load_subset_of_verified_a_plan_past_its_lease_is_asked_for_again() -> None:
    one = tracked()
    asked: list[Future[Plan]] = []

    def ask() -> "Future[Plan]":
        asked.append(Future())
        asked[-1].set_result(plan(64, good_until=100.0))
        return asked[-1]

    assert one.answer(ask, patience=1.0, clock=lambda: 99.0) is not None
    one.answer(ask, patience=1.0, clock=lambda: 101.0)
    assert len(asked) == 2


def test_a_preempted_request_starts_over_under_another_name() -> None:
    one = tracked()
    one.saved, one.prefill_end = 96, 100
    assert one.begin_again("r#2", 1) == "r#1"
    assert (one.key, one.saved, one.prefill_end, one.load) == ("r#2", 0, 0, None)
