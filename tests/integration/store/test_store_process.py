"""One worker process by itself: starts that fail, requests in flight at its death, and the fence that may not lie."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvpool_agent.store.config import StoreConfig, setup_arguments, worker_environment
from kvpool_agent.store.errors import FenceUnconfirmed, StoreError, StoreUnavailable, WorkerDied
from kvpool_agent.store.frames import Op
from kvpool_agent.store.process import WorkerProcess, WorkerSpec
from support.mooncake import Master, free_ports
from support.processes import gone
from support.raw import Raw


def _spec(address: str, role: str, log_dir: Path) -> WorkerSpec:
    config = StoreConfig(address, "127.0.0.1")
    return WorkerSpec(
        name=f"one-{role}",
        role=role,
        settings={"setup": setup_arguments(config, local_port=0), "local_host": "127.0.0.1", "threads": 2},
        environment=worker_environment(config, os.environ),
        memory_fd=None,
        log_dir=str(log_dir),
        max_outstanding=8,
    )


@pytest.fixture
async def prober(master: Master, owner: Raw, tmp_path: Path) -> AsyncIterator[WorkerProcess]:
    process = WorkerProcess.start(_spec(master.address, "prober", tmp_path))
    await process.ready
    yield process
    process.kill()
    await process.wait_gone(5)


async def test_a_fence_that_is_not_confirmed_says_so_and_names_the_pid_fenced(prober: WorkerProcess) -> None:
    with pytest.raises(FenceUnconfirmed, match="must not be used again") as caught:
        await prober.wait_gone(0.05)  # nobody has killed it
    assert caught.value.pid == prober.pid
    assert not gone(prober.pid)


async def test_requests_in_flight_fail_only_when_the_process_is_reaped_fenced(prober: WorkerProcess) -> None:
    waiting = [prober.send(Op.PING, b"") for _ in range(3)]
    prober.kill()
    answers = await asyncio.gather(*waiting, return_exceptions=True)
    assert gone(prober.pid)
    assert all(isinstance(answer, bytes | WorkerDied) for answer in answers)
    with pytest.raises(WorkerDied, match="is gone"):
        prober.send(Op.PING, b"")


async def test_a_request_that_nobody_waits_for_stays_counted_until_it_is_answered(
    prober: WorkerProcess,
) -> None:
    forgotten, waited = prober.send(Op.PING, b""), prober.send(Op.PING, b"")
    forgotten.cancel()
    assert prober.outstanding == 2
    assert prober.oldest is not None
    await waited
    await prober.wait_idle(asyncio.get_running_loop().time() + 5)
    assert prober.outstanding == 0


async def test_an_operation_of_another_role_is_an_error_and_no_crash(prober: WorkerProcess) -> None:
    with pytest.raises(StoreError, match="prober does not serve GET"):
        await prober.send(Op.GET, b"")
    with pytest.raises(StoreError, match="a count is missing"):
        await prober.send(Op.EXISTS_KEYS, b"x")
    assert len(await prober.send(Op.PING, b"")) == 8


async def test_a_clean_stop_ends_the_process_with_success(prober: WorkerProcess) -> None:
    await prober.stop(10)
    assert prober.gone.is_set()
    assert prober._popen.returncode == 0


async def test_a_start_that_fails_says_why(tmp_path: Path) -> None:
    process = WorkerProcess.start(_spec(f"127.0.0.1:{free_ports(1)[0]}", "prober", tmp_path))
    with pytest.raises(StoreUnavailable, match="is the master up"):
        await process.ready
    await process.wait_gone(5)


async def test_a_start_that_is_killed_is_a_death(tmp_path: Path) -> None:
    process = WorkerProcess.start(_spec("127.0.0.1:1", "prober", tmp_path))
    process.kill()
    with pytest.raises(WorkerDied, match="exit status -9"):
        await process.ready
    assert gone(process.pid)
