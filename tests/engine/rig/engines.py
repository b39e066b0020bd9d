"""Starts engines and nodes for the tests: a master, agents, vLLM processes. Everything dies with its fixture.

Agents run in this test's environment, engines in the engine's (`KVPOOL_ENGINE_PYTHON`, default `.venv-engine`).
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from engine.rig import checkpoint
from support.mooncake import Master

ROOT: Final = Path(__file__).resolve().parents[3]
BLOCK: Final = 32
READY_SECONDS: Final = 240.0
CALL_SECONDS: Final = 300.0

ENVIRONMENT: Final = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
}


def engine_python() -> str:
    """The interpreter that has vLLM."""
    return os.environ.get("KVPOOL_ENGINE_PYTHON", str(ROOT / ".venv-engine" / "bin" / "python"))


def options(folder: Path, *, eagle: bool, socket_dir: Path | None, **extra: Any) -> dict[str, Any]:
    """What `LLM` is made with; `socket_dir` None is an engine without any cache."""
    made: dict[str, Any] = {
        "model": str(checkpoint.write_target(folder / "target")),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": BLOCK,
        "max_model_len": checkpoint.MAX_LENGTH,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 256,
        "num_gpu_blocks_override": 800,
        "seed": 0,
        "enable_prefix_caching": socket_dir is not None,
    }
    if eagle:
        draft = checkpoint.write_draft(folder / "draft")
        made["speculative_config"] = {"method": "eagle", "model": str(draft), "num_speculative_tokens": 2}
    if socket_dir is not None:
        made["kv_transfer_config"] = transfer_config(socket_dir)
    return made | extra


def transfer_config(socket_dir: Path, **changes: Any) -> dict[str, Any]:
    """What `--kv-transfer-config` would be."""
    return {
        "kv_connector": "KVPoolConnector",
        "kv_connector_module_path": "kvpool_engine.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "socket_dir": str(socket_dir),
            "lookup_timeout": 5,
            "load_timeout": 10,
            "save_timeout": 30,
        },
    } | changes


class EngineError(Exception):
    """An engine's call failed, or the engine is gone; with the end of its log."""


class Engine:
    """One vLLM process."""

    def __init__(
        self,
        name: str,
        made: dict[str, Any],
        folder: Path,
        *,
        driver: str = "engine.rig.driver",
        **environment: str,
    ) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self._stream = self.log.open("w")
        path = os.pathsep.join(str(ROOT / part) for part in ("agent", "tests"))
        self.process = subprocess.Popen(
            [engine_python(), "-m", driver, json.dumps(made)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stream,
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": path, **environment},
            cwd=folder,
            text=True,
        )

    def ready(self) -> "Engine":
        """Wait until it takes calls."""
        self.receive(READY_SECONDS)
        return self

    def send(self, call: str, **arguments: Any) -> None:
        """Begin a call."""
        self.line(json.dumps({"call": call, **arguments}))

    def line(self, text: str) -> None:
        """Write one line."""
        stream = self.process.stdin
        if stream is None:
            raise EngineError(f"{self.name} has no standard input")
        stream.write(text + "\n")
        stream.flush()

    def hear(self, seconds: float) -> dict[str, Any]:
        """The next line that it sends; killed if none comes in time, so that no test hangs."""
        stream = self.process.stdout
        if stream is None:
            raise EngineError(f"{self.name} has no standard output")
        timer = threading.Timer(seconds, self.process.kill)
        timer.start()
        try:
            line = stream.readline()
        finally:
            timer.cancel()
        if not line:
            raise EngineError(f"{self.name} ended or hung; its log ends:\n{self.tail()}")
        message: dict[str, Any] = json.loads(line)
        return message

    def receive(self, seconds: float = CALL_SECONDS) -> Any:
        """The answer to the call that was sent."""
        message = self.hear(seconds)
        if "answer" not in message:
            raise EngineError(f"{self.name}: {message}; its log ends:\n{self.tail()}")
        return message["answer"]

    def call(self, call: str, *, seconds: float = CALL_SECONDS, **arguments: Any) -> Any:
        """One call and its answer."""
        self.send(call, **arguments)
        return self.receive(seconds)

    def tail(self) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-25:])

    def close(self) -> None:
        """End it."""
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._stream.close()


@dataclass
class Agent:
    """One node's agent; may be killed and started again on the same folder."""

    name: str
    socket_dir: Path
    folder: Path
    master: str
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def log(self) -> Path:
        """Where it writes."""
        return self.folder / f"{self.name}.log"

    def start(self, seconds: float = 30.0) -> "Agent":
        """Start and wait until its socket is there."""
        config = {
            "pool": {"namespace": "test", "name": "pool"},
            "node": {"name": self.name, "ip": "127.0.0.1"},
            "socket": {"directory": str(self.socket_dir)},
            "store": {"masterAddress": self.master},
            "segment": {"size": "256Mi", "ringSize": "16Mi"},
            "cache": {"leaseTTL": "10s"},
            "telemetry": {"port": 0},
            "log": {"format": "text"},
            "drain": {"timeout": "2s"},
        }
        path = self.folder / f"{self.name}.json"
        path.write_text(json.dumps(config))
        socket = self.socket_dir / "agent.sock"
        socket.unlink(missing_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kvpool_agent", "--config", str(path)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": str(ROOT / "agent")},
            )
        pause = threading.Event()
        for _ in range(int(seconds / 0.05)):
            if socket.exists():
                return self
            if self.process.poll() is not None:
                break
            pause.wait(0.05)
        raise EngineError(
            f"agent {self.name} is not ready; its log ends:\n{self.log.read_text(errors='replace')[-3000:]}"
        )

    def kill(self, signum: int = signal.SIGKILL) -> None:
        """Send a signal and reap."""
        if self.process is not None:
            self.process.send_signal(signum)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self.process = None

    @property
    def pid(self) -> int:
        """Its process."""
        if self.process is None:
            raise EngineError(f"agent {self.name} does not run")
        return self.process.pid


class Cluster:
    """A master and two nodes' agents."""

    def __init__(self, folder: Path, sockets: Path) -> None:
        self.folder = folder
        self.master = Master(folder, "--default_kv_lease_ttl=10s")
        self.agents: dict[str, Agent] = {}
        self._sockets = sockets

    def start(self) -> "Cluster":
        """Bring everything up."""
        self.master.start()
        for name in ("a", "b"):
            directory = self._sockets / name
            directory.mkdir(mode=0o750)
            self.agents[name] = Agent(name, directory, self.folder, self.master.address).start()
        return self

    def close(self) -> None:
        """Bring everything down, the master last."""
        for agent in self.agents.values():
            agent.kill(signal.SIGTERM)
        self.master.kill()
