"""A real agent process, for tests: started by its command line, ready when it says so, killed by its own pid.

Promises: `start` returns after the agent's own "ready" line; its log is kept and shown when it fails; nothing that it
started outlives `kill`. Refuses to sleep for readiness.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from support.processes import children, ended


class AgentProcess:
    """One `python -m kvpool_agent`."""

    def __init__(
        self,
        directory: Path,
        master: str,
        *,
        node: str = "node-a",
        environment: dict[str, str] | None = None,
        **sections: Any,
    ) -> None:
        self.directory = directory
        self.config = directory / f"{node}.json"
        self.environment = environment or {}
        settings: dict[str, Any] = {
            "pool": {"namespace": "default", "name": "pool"},
            "node": {"name": node, "ip": "127.0.0.1"},
            "socket": {"directory": str(directory)},
            "store": {"masterAddress": master},
            "segment": {"size": "64Mi", "ringSize": "8Mi"},
            "cache": {"lookupTimeout": "5s"},
            "telemetry": {"port": 0},
            "drain": {"timeout": "5s"},
        }
        for section, fields in sections.items():
            settings.setdefault(section, {}).update(fields)
        self.config.write_text(json.dumps(settings))
        self.process: subprocess.Popen[str] | None = None
        self.lines: list[str] = []
        self.http = ""
        self._seen: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._reader: threading.Thread | None = None

    @property
    def pid(self) -> int:
        """Of the running agent."""
        assert self.process is not None
        return self.process.pid

    def launch(self) -> AgentProcess:
        """Start without waiting for anything."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvpool_agent", "--config", str(self.config)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **self.environment},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def start(self, seconds: float = 30.0) -> AgentProcess:
        """Start and wait for its own word that it is ready."""
        self.launch()
        self.http = self.wait_for("ready", seconds)["http"]
        return self

    def wait_for(self, message: str, seconds: float = 15.0) -> dict[str, Any]:
        """The next log line with this message."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                record = self._seen.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(
                    f"the agent did not log {message!r} in {seconds} s:\n{self.log()}"
                ) from None
            if record is None:
                raise AssertionError(f"the agent ended before {message!r}:\n{self.log()}")
            if record["message"] == message:
                return record

    def get(self, path: str) -> tuple[int, str]:
        """Status and body of a page."""
        try:
            with urllib.request.urlopen(f"http://{self.http}{path}", timeout=10) as answer:
                return int(answer.status), str(answer.read().decode())
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def metric(self, name: str, **labels: str) -> float:
        """One sample of /metrics."""
        return self._sample(self.get("/metrics")[1], name, **labels)

    @staticmethod
    def _sample(page: str, name: str, **labels: str) -> float:
        wanted = set(labels.items())
        for line in page.splitlines():
            if line.startswith((f"{name} ", f"{name}{{")):
                inside = line.partition("{")[2].partition("}")[0]
                found = {tuple(pair.split("=", 1)) for pair in inside.split(",") if pair}
                if wanted <= {(key, value.strip('"')) for key, value in found}:
                    return float(line.rpartition(" ")[2])
        raise AssertionError(f"no sample {name} with {labels}")

    def wait_for_store(self, seconds: float = 30.0) -> AgentProcess:
        """Wait until the master has answered and the segment is mounted; "ready" alone promises neither."""
        deadline = time.monotonic() + seconds
        while True:
            page = self.get("/metrics")[1]
            sizes = {
                state: self._sample(page, "kvpool_segment_bytes", state=state)
                for state in ("configured", "mounted")
            }
            if "kvpool_store_success_age_seconds " in page and sizes["mounted"] == sizes["configured"]:
                return self
            assert time.monotonic() < deadline, f"no store in {seconds} s: {sizes}\n{self.log()}"
            time.sleep(0.1)  # noqa: TID251 - a figure of another process has no event

    def stop(self, seconds: float = 20.0) -> int:
        """SIGTERM; returns its exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.wait(seconds)

    def wait(self, seconds: float = 20.0) -> int:
        """Its exit code."""
        assert self.process is not None
        code = self.process.wait(seconds)
        self._close()
        return code

    def workers(self) -> list[int]:
        """Pids of its children."""
        return [int(pid) for pid in children(self.pid)]

    def kill(self) -> None:
        """SIGKILL, reap, and wait until its children are gone too. Idempotent."""
        if self.process is None:
            return
        workers = self.workers() if self.process.poll() is None else []
        self.process.kill()
        self.process.wait()
        pause = threading.Event()
        deadline = time.monotonic() + 10
        while any(not ended(pid) for pid in workers):
            assert time.monotonic() < deadline, f"children of the agent outlive it: {workers}"
            pause.wait(0.02)
        self._close()
        self.process = None

    def log(self) -> str:
        """The end of what it wrote."""
        return "\n".join(self.lines[-60:])

    def _read(self) -> None:
        assert self.process is not None
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))
            if line.startswith('{"time"'):
                self._seen.put(json.loads(line))
        self._seen.put(None)

    def _close(self) -> None:
        if self._reader is not None:
            self._reader.join(10)
        if self.process is not None and self.process.stderr is not None:
            self.process.stderr.close()
