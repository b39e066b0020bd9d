"""Raw Mooncake in a child process, to show what our layer rules out and to own segments that tests kill or freeze.

Promises: every command is bounded; the process is killed and reaped by its own pid.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.mooncake import Master, free_ports

_SCRIPT = Path(__file__).with_name("raw_process.py")

_CONNECT = """
from mooncake.store import MooncakeDistributedStore, ReplicateConfig
store = MooncakeDistributedStore()
code = store.setup({name!r}, "P2PHANDSHAKE", {segment}, 0, "tcp", "", {master!r})
memory = bytearray({buffer})
base = ctypes.addressof((ctypes.c_char * len(memory)).from_buffer(memory))
store.register_buffer(base, len(memory))
def put(key, data, segment=None):
    memory[: len(data)] = data
    config = ReplicateConfig()
    if segment:
        config.preferred_segment = segment
    return store.batch_put_from([key], [base], [len(data)], config)[0]
def content(key, size):
    return (key.encode() * (size // len(key) + 1))[:size]
result = code
"""


class Raw:
    """One child process."""

    def __init__(self, log: Path, **environment: str) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("MC_")}
        self.name = f"127.0.0.1:{free_ports(1)[0]}"
        with log.open("ab") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_SCRIPT)],  # -P: `support/mooncake.py` must not shadow Mooncake
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=kept | {"MC_FORCE_TCP": "1", "MC_LOG_LEVEL": "WARNING"} | environment,
            )

    @property
    def pid(self) -> int:
        """Pid of the child."""
        return self._process.pid

    def run(self, code: str, timeout: float = 20.0) -> Any:
        """Execute code there; returns its `result`."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps({"code": textwrap.dedent(code)}).encode() + b"\n")
        stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            if not selector.select(timeout):
                raise TimeoutError(f"raw Mooncake did not answer in {timeout} s: {code}")
        line = stdout.readline()
        if not line:
            raise EOFError(f"raw Mooncake ended with {self._process.wait()}: {code}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["result"]

    def connect(self, master: Master, *, segment: int = 0, buffer: int = 1 << 20) -> int:
        """Set up a client with a segment of that size under this child's name; returns Mooncake's code."""
        code = _CONNECT.format(name=self.name, segment=segment, master=master.address, buffer=buffer)
        return int(self.run(code))

    def put(self, key: str, data: bytes, *, segment: str | None = None) -> int:
        """Put bytes (at most the buffer), preferably on a segment."""
        return int(self.run(f"result = put({key!r}, bytes.fromhex({data.hex()!r}), {segment!r})"))

    def fill(self, count: int, size: int, *, prefix: str) -> dict[bytes, bytes]:
        """Put `count` objects on the own segment; their bytes repeat their keys. Returns key to bytes."""
        keys = [f"{prefix}{index:05d}" for index in range(count)]
        codes = self.run(f"result = [put(key, content(key, {size}), {self.name!r}) for key in {keys!r}]")
        assert codes == [0] * count
        return {key.encode(): (key.encode() * (size // len(key) + 1))[:size] for key in keys}

    def freeze(self) -> None:
        """SIGSTOP."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL and reap; works on a frozen process too. Idempotent."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def wait(self, timeout: float) -> int:
        """Exit status of a child that is expected to end."""
        return self._process.wait(timeout)


@contextlib.contextmanager
def raw_client(log: Path, **environment: str) -> Iterator[Raw]:
    """A child for the length of the block."""
    raw = Raw(log, **environment)
    try:
        yield raw
    finally:
        raw.kill()
