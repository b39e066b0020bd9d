"""The descriptor socket: only the messages of this protocol pass, and no descriptor is leaked by a wrong one."""

import asyncio
import os
import socket
import struct
from pathlib import Path

import pytest

from kvpool_engine.descriptors import DescriptorSocket
from kvpool_engine.errors import AgentUnavailableError
from kvpool_engine.proof import WriterWatch
from kvpool_wire import rpc


def pair() -> tuple[DescriptorSocket, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    theirs.setblocking(False)
    return DescriptorSocket(ours), theirs


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names are what is compared


@pytest.mark.parametrize(
    ("message", "fds", "wrong"),
    [
        (struct.pack("<1s16sQ", b"X", b"t" * 16, 1), 1, "expected HELLO"),
        (struct.pack("<1s16sQ", rpc.HELLO, b"t" * 16, 1), 0, "0 descriptors"),
        (struct.pack("<1s16sQ", rpc.HELLO, b"t" * 16, 1), 2, "2 descriptors"),
        (struct.pack("<1s16sQ", rpc.HELLO, b"t" * 16, 1)[:-1], 1, "24 bytes"),
        (struct.pack("<1s16sQ", rpc.HELLO, b"t" * 16, 1) + b"x", 1, "26 bytes"),
    ],
)
async def test_a_wrong_greeting_is_refused_and_its_descriptors_are_closed(
    message: bytes, fds: int, wrong: str
) -> None:
    client, agent = pair()
    other = os.memfd_create("x")
    before = descriptors()
    socket.send_fds(agent, [message], [other] * fds)
    with pytest.raises(AgentUnavailableError, match=wrong):
        await client.hello()
    assert descriptors() == before
    os.close(other)
    client.close()
    agent.close()


async def test_an_agent_that_hangs_up_is_unavailable() -> None:
    client, agent = pair()
    agent.close()
    with pytest.raises(AgentUnavailableError, match="closed the connection"):
        await client.ring()
    client.close()


async def test_many_storages_travel_in_order_in_messages_that_linux_takes() -> None:
    client, agent = pair()
    fd = os.memfd_create("x")
    await client.send_storages([fd] * 300)
    seen = []
    for _ in range(3):
        raw, fds, _, _ = socket.recv_fds(agent, 64, rpc.DESCRIPTORS_PER_MESSAGE)
        seen.append((*struct.unpack("<1sII", raw), len(fds)))
        for got in fds:
            os.close(got)
    assert seen == [(rpc.STORAGES, 0, 128, 128), (rpc.STORAGES, 128, 128, 128), (rpc.STORAGES, 256, 44, 44)]
    os.close(fd)
    client.close()
    agent.close()


async def test_a_path_too_long_for_a_socket_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(AgentUnavailableError, match="longer than the 107 bytes"):
        await DescriptorSocket.connect(tmp_path / ("x" * 120))


async def test_fenced_a_writer_is_proven_gone_by_its_pidfd_or_by_its_hang_up_and_by_nothing_else() -> None:
    for how in ("dies", "hangs up"):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        process = await asyncio.create_subprocess_exec("cat", stdin=asyncio.subprocess.PIPE)
        watch = WriterWatch(os.pidfd_open(process.pid), ours)
        watch.watch_socket()
        waiting = asyncio.ensure_future(watch.wait())
        theirs.send(b"a message is not the end")
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # by now the loop has polled the sockets and heard the message
        assert not waiting.done()
        heard = [watch.proven]
        if how == "dies":
            process.kill()
            await process.wait()
            heard.append(watch.proven)  # the kernel knows before the loop has turned
        else:
            theirs.close()
        async with asyncio.timeout(5):
            await waiting
        heard.append(watch.proven)
        assert heard == ([False, True, True] if how == "dies" else [False, True])
        watch.close()
        theirs.close()
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_closed_watch_proves_nothing_and_leaks_nothing() -> None:
    before = descriptors()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    watch = WriterWatch(os.pidfd_open(os.getpid()), ours)
    watch.watch_socket()
    watch.close()
    watch.close()
    assert not watch.proven
    theirs.close()
    assert descriptors() == before
