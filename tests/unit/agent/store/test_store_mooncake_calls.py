"""Exactly the safe variants of Mooncake's calls are used, and the roles build what they are asked for.

Mooncake itself is replaced by a recorder here; the integration tests run the real one.
"""

from __future__ import annotations

import os
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvpool_agent.store import frames, mooncake
from kvpool_agent.store.errors import StoreError, StoreMisuse
from kvpool_agent.store.frames import Op
from kvpool_agent.store.mooncake import MooncakeClient, SetupFailedError
from kvpool_agent.store.roles import PIECE, LoaderRole, ProberRole, Settings
from kvpool_agent.store.segment import sealed_memory

SETUP: dict[str, str | int] = {"local_hostname": "h:1", "master_server_addr": "m:1", "protocol": "tcp"}


class Recorder:
    """Answers every call of Mooncake's with something plausible and remembers it."""

    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]]
    answers: dict[str, Any]

    def __init__(self) -> None:
        type(self).calls = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, args, kwargs))
            answer = self.answers.get(name, 0)
            return answer(*args) if callable(answer) else answer

        return call


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> type[Recorder]:
    Recorder.answers = {
        "batch_get_into": lambda keys, _, sizes: list(sizes),
        "batch_put_from": lambda keys, *_: [0] * len(keys),
        "batch_remove": lambda keys: [0] * len(keys),
        "batch_is_exist": lambda keys: [int(key.endswith("0")) for key in keys],
        "batch_get_replica_desc": {},
    }
    module = types.ModuleType("mooncake.store")
    module.MooncakeDistributedStore = Recorder  # type: ignore[attr-defined]
    module.ReplicateConfig = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mooncake", types.ModuleType("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.store", module)
    return Recorder


def _client() -> MooncakeClient:
    client = MooncakeClient(SETUP)
    client.register(1 << 20, 1 << 16)
    return client


def test_a_get_passes_keys_addresses_and_sizes_and_no_option(recorder: type[Recorder]) -> None:
    """`prefer_alloc_in_same_node` and its kin are never passed."""
    assert _client().get(["a", "b"], [1 << 20, (1 << 20) + 8], [8, 8]) == [8, 8]
    assert recorder.calls[-1] == ("batch_get_into", (["a", "b"], [1 << 20, (1 << 20) + 8], [8, 8]), {})


def test_a_removal_is_never_forced(recorder: type[Recorder]) -> None:
    assert _client().remove(["a"]) == [0]
    assert recorder.calls[-1] == ("batch_remove", (["a"],), {})


@pytest.mark.parametrize("address", [0, 1, (1 << 20) - 1, (1 << 20) + (1 << 16) - 7, 1 << 40])
def test_an_address_outside_the_registration_reaches_neither_get_nor_put(
    recorder: type[Recorder], address: int
) -> None:
    client = _client()
    before = len(recorder.calls)
    for move in (client.get, client.put):
        with pytest.raises(StoreMisuse, match="outside"):
            move(["k"], [address], [8])
    with pytest.raises(StoreMisuse, match="outside"):
        client.get(["k"], [1 << 20], [0])
    assert len(recorder.calls) == before


def test_a_key_twice_in_one_call_is_refused(recorder: type[Recorder]) -> None:
    with pytest.raises(StoreMisuse, match="twice"):
        _client().get(["k", "k"], [1 << 20, (1 << 20) + 8], [8, 8])


def test_an_answer_that_leaves_keys_out_is_an_error(recorder: type[Recorder]) -> None:
    recorder.answers["batch_get_into"] = [8]
    with pytest.raises(StoreError, match="answered 1 of 2 keys"):
        _client().get(["a", "b"], [1 << 20, (1 << 20) + 8], [8, 8])


def test_a_closed_client_is_not_called_and_close_waits_for_who_is_inside(recorder: type[Recorder]) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def slow(keys: list[str]) -> list[int]:
        inside.set()
        assert go_on.wait(10)
        return [1]

    recorder.answers["batch_is_exist"] = slow
    client = _client()
    asking = threading.Thread(target=client.exist, args=(["k"],))
    asking.start()
    assert inside.wait(10)
    closing = threading.Thread(target=client.close)
    closing.start()
    closing.join(0.05)
    assert "close" not in [name for name, _, _ in recorder.calls]
    go_on.set()
    asking.join(10)
    closing.join(10)
    assert [name for name, _, _ in recorder.calls][-1] == "close"
    with pytest.raises(StoreMisuse, match="closed"):
        client.exist(["k"])
    client.close()
    assert [name for name, _, _ in recorder.calls].count("close") == 1


def test_a_setup_that_mooncake_refuses_names_master_and_protocol(recorder: type[Recorder]) -> None:
    recorder.answers["setup"] = -600
    with pytest.raises(SetupFailedError, match=r"m:1 over tcp failed \(-600\)"):
        MooncakeClient(SETUP)
    with pytest.raises(SetupFailedError, match="no master address"):
        MooncakeClient({**SETUP, "master_server_addr": ""})


def test_without_mooncake_the_error_names_the_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake", None)
    with pytest.raises(SetupFailedError, match="agent-cpu"):
        MooncakeClient(SETUP)


def test_only_one_module_imports_mooncake() -> None:
    folder = Path(mooncake.__file__).parent
    importing = [
        path.name
        for path in folder.glob("*.py")
        if any(s in path.read_text() for s in ("from mooncake", "import mooncake"))
    ]
    assert importing == ["mooncake.py"]


class Answers:
    """Collects what a role answers, as the control socket would."""

    def __init__(self) -> None:
        self.payloads: dict[int, bytes | Exception] = {}
        self.arrived = threading.Event()

    def __call__(self, request: int, work: Callable[[], bytes]) -> None:
        try:
            self.payloads[request] = work()
        except StoreError as error:
            self.payloads[request] = error
        self.arrived.set()

    def wait(self, request: int) -> bytes | Exception:
        assert self.arrived.wait(10)
        self.arrived.clear()
        return self.payloads[request]


def test_the_prober_asks_for_prefix_and_hex_in_order_over_pieces(recorder: type[Recorder]) -> None:
    answers = Answers()
    role = ProberRole(Settings(SETUP, "127.0.0.1", 4, -1), answers)
    hashes = b"".join(index.to_bytes(4, "big") for index in range(PIECE + 3))
    role.handle(Op.EXISTS, 5, frames.pack_hashes([b"p/", b"q/"], hashes, 4))
    answer = answers.wait(5)
    assert isinstance(answer, bytes)
    count = 2 * (PIECE + 3)
    codes = frames.unpack_codes(answer, count=count)
    keys = [f"{prefix}{index:08x}" for prefix in ("p/", "q/") for index in range(PIECE + 3)]
    assert codes.tolist() == [int(key.endswith("0")) for key in keys]
    asked = [args[0] for name, args, _ in recorder.calls if name == "batch_is_exist"]
    assert sorted(key for piece in asked for key in piece) == sorted(keys)
    assert max(map(len, asked)) <= PIECE
    role.stop()


def test_a_piece_that_fails_fails_the_whole_question(recorder: type[Recorder]) -> None:
    answers = Answers()
    role = ProberRole(Settings(SETUP, "127.0.0.1", 4, -1), answers)
    recorder.answers["batch_is_exist"] = lambda keys: [1] * (len(keys) - (len(keys) != PIECE))
    role.handle(Op.EXISTS_KEYS, 6, frames.pack_keys([f"{index}".encode() for index in range(PIECE + 10)]))
    assert isinstance(answers.wait(6), StoreError)
    role.stop()


def test_roles_refuse_each_others_requests(recorder: type[Recorder]) -> None:
    answers = Answers()
    role = ProberRole(Settings(SETUP, "127.0.0.1", 1, -1), answers)
    role.handle(Op.GET, 7, b"")
    assert "prober does not serve GET" in str(answers.wait(7))
    role.stop()


def test_the_loader_adds_the_rings_address_and_keeps_sizes(recorder: type[Recorder]) -> None:
    answers = Answers()
    fd = sealed_memory("unit-ring", 8192)
    role = LoaderRole(Settings(SETUP, "127.0.0.1", 1, fd), answers)
    registered = next(args for name, args, _ in recorder.calls if name == "register_buffer")
    assert registered[1] == 8192
    numbers = b"".join(value.to_bytes(8, "little") for value in (16, 4096, 32, 64))
    role.handle(Op.GET, 8, frames.pack_keys([b"a", b"b"]) + numbers)
    answer = answers.wait(8)
    assert isinstance(answer, bytes)
    assert frames.unpack_codes(answer, count=2).tolist() == [32, 64]
    assert recorder.calls[-1][1] == (["a", "b"], [registered[0] + 16, registered[0] + 4096], [32, 64])
    role.handle(Op.EXISTS, 9, b"")
    assert "loader does not serve EXISTS" in str(answers.wait(9))
    role.stop()
    os.close(fd)
