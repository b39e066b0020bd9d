"""The descriptor socket and its folder, without an agent around them."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvpool_agent.errors import SessionRefused, StartFault
from kvpool_agent.server.descriptors import Channel, DescriptorServer
from kvpool_agent.server.sockets import LOCK_FILE, SocketFolder
from kvpool_wire import rpc


class Peer:
    """A client of the descriptor socket."""

    def __init__(self, folder: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self.sock.connect(str(folder / rpc.DESCRIPTOR_SOCKET))
        self.token = b""

    async def hello(self) -> bool:
        """Take the greeting; False if the server closed instead."""
        loop = asyncio.get_running_loop()
        readable: asyncio.Future[None] = loop.create_future()
        loop.add_reader(self.sock, lambda: None if readable.done() else readable.set_result(None))
        try:
            await asyncio.wait_for(readable, 5)
        finally:
            loop.remove_reader(self.sock)
        raw, fds, _, _ = socket.recv_fds(self.sock, 64, 4)
        for fd in fds:
            assert Path(f"/proc/self/fd/{fd}").readlink().name == "anon_inode:[pidfd]"
            os.close(fd)
        self.token = raw[1 : 1 + rpc.TOKEN_BYTES]
        return len(fds) == 1

    def send(self, first: int, fds: list[int]) -> None:
        socket.send_fds(self.sock, [struct.pack("<1sII", rpc.STORAGES, first, len(fds))], fds)


def make_server(
    folder: Path, *, limit: int = 4, seconds: float = 30.0, uids: tuple[int, ...] = ()
) -> DescriptorServer:
    return DescriptorServer(
        folder / rpc.DESCRIPTOR_SOCKET,
        epoch=7,
        allowed_uids=uids,
        token_timeout=seconds,
        max_connections=limit,
    )


@pytest.fixture
async def server(socket_dir: Path) -> AsyncIterator[DescriptorServer]:
    one = make_server(socket_dir)
    one.start()
    yield one
    one.close()


async def settle(condition: object, seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # type: ignore[operator]  # noqa: ASYNC110 - the kernel tells nobody
            await asyncio.sleep(0.005)


async def test_a_token_is_claimed_once(server: DescriptorServer, socket_dir: Path) -> None:
    peer = Peer(socket_dir)
    assert await peer.hello()
    assert server.waits(peer.token)
    channel = server.claim(peer.token)
    assert channel is not None
    assert channel.peer.uid == os.getuid()
    assert server.claim(peer.token) is None
    assert not server.waits(peer.token)
    channel.close()
    channel.close()
    assert server.connections == 0
    peer.sock.close()


async def test_an_unclaimed_token_expires(socket_dir: Path) -> None:
    server = make_server(socket_dir, seconds=0.05)
    server.start()
    peer = Peer(socket_dir)
    assert await peer.hello()
    await settle(lambda: server.connections == 0)
    assert server.claim(peer.token) is None
    assert peer.sock.recv(1) == b""
    peer.sock.close()
    server.close()


async def test_a_client_that_goes_away_frees_its_place_at_once(
    server: DescriptorServer, socket_dir: Path
) -> None:
    peer = Peer(socket_dir)
    assert await peer.hello()
    peer.sock.close()
    await settle(lambda: server.connections == 0)
    assert not server.waits(peer.token)


async def test_connections_are_bounded(server: DescriptorServer, socket_dir: Path) -> None:
    peers = [Peer(socket_dir) for _ in range(5)]
    answers = [await peer.hello() for peer in peers]
    assert answers == [True, True, True, True, False]
    for peer in peers:
        peer.sock.close()


async def test_a_foreign_uid_is_turned_away(socket_dir: Path) -> None:
    server = make_server(socket_dir, uids=(os.getuid() + 1,))
    server.start()
    peer = Peer(socket_dir)
    assert not await peer.hello()
    peer.sock.close()
    server.close()


async def claimed(server: DescriptorServer, folder: Path) -> tuple[Peer, Channel]:
    peer = Peer(folder)
    assert await peer.hello()
    channel = server.claim(peer.token)
    assert channel is not None
    return peer, channel


async def test_storages_arrive_in_order_over_several_messages(
    server: DescriptorServer, socket_dir: Path
) -> None:
    peer, channel = await claimed(server, socket_dir)
    sent = [os.memfd_create(f"s{index}") for index in range(5)]
    peer.send(0, sent[:3])
    asking = asyncio.ensure_future(channel.storages(5, seconds=5))
    await asyncio.sleep(0)
    peer.send(3, sent[3:])
    got = await asking
    assert [os.fstat(fd).st_ino for fd in got] == [os.fstat(fd).st_ino for fd in sent]
    assert not any(os.get_inheritable(fd) for fd in got)
    for fd in (*got, *sent):
        os.close(fd)
    channel.close()
    peer.sock.close()


async def test_storages_sent_before_they_are_wanted_are_kept(
    server: DescriptorServer, socket_dir: Path
) -> None:
    peer = Peer(socket_dir)
    assert await peer.hello()
    fd = os.memfd_create("early")
    peer.send(0, [fd])
    await asyncio.sleep(0.02)
    channel = server.claim(peer.token)
    assert channel is not None
    (got,) = await channel.storages(1, seconds=5)
    assert os.fstat(got).st_ino == os.fstat(fd).st_ino
    os.close(got)
    os.close(fd)
    channel.close()
    peer.sock.close()


def open_files() -> set[str]:
    return set(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names alone are wanted


@pytest.mark.parametrize("fault", ["order", "count", "kind", "late", "gone", "many", "long"])
async def test_what_is_not_storages_is_refused_and_nothing_stays_open_crash_only(
    server: DescriptorServer, socket_dir: Path, fault: str
) -> None:
    peer, channel = await claimed(server, socket_dir)
    fd = os.memfd_create("s")
    before = open_files()
    peer.send(0, [fd])
    match fault:
        case "order":
            peer.send(5, [fd])
        case "count":
            socket.send_fds(peer.sock, [struct.pack("<1sII", rpc.STORAGES, 1, 3)], [fd])
        case "kind":
            socket.send_fds(peer.sock, [struct.pack("<1sII", b"X", 1, 1)], [fd])
        case "long":
            socket.send_fds(peer.sock, [struct.pack("<1sII", rpc.STORAGES, 1, 1) + b"more"], [fd])
        case "gone":
            peer.sock.close()
        case "many":
            peer.send(1, [fd, fd, fd])
    reasons = {"late": "DescriptorsMissing", "gone": "DescriptorSocketBroken"}
    with pytest.raises(SessionRefused) as caught:
        await channel.storages(3 if fault == "many" else 2, seconds=0.1)
    assert caught.value.reason == reasons.get(fault, "DescriptorsMalformed")
    peer.sock.close()
    channel.close()
    assert open_files() <= before
    os.close(fd)


async def test_the_ring_cannot_be_sent_to_a_client_that_is_gone(
    server: DescriptorServer, socket_dir: Path
) -> None:
    peer, channel = await claimed(server, socket_dir)
    peer.sock.close()
    with pytest.raises(SessionRefused, match="ring"):
        channel.send_ring(0, 1)
    channel.close()


async def test_closing_the_server_removes_its_socket_and_waiting_clients(socket_dir: Path) -> None:
    server = make_server(socket_dir)
    server.start()
    peer = Peer(socket_dir)
    assert await peer.hello()
    server.close()
    server.close()
    assert not (socket_dir / rpc.DESCRIPTOR_SOCKET).exists()
    assert server.connections == 0
    assert peer.sock.recv(1) == b""
    peer.sock.close()


# ------------------------------------------------------------------------------------------------------- the folder


def stale(path: Path, kind: int = socket.SOCK_STREAM) -> None:
    with socket.socket(socket.AF_UNIX, kind) as sock:
        sock.bind(str(path))


def test_what_a_killed_agent_left_is_removed_crash_only(socket_dir: Path) -> None:
    stale(socket_dir / rpc.RPC_SOCKET)
    stale(socket_dir / rpc.DESCRIPTOR_SOCKET, socket.SOCK_SEQPACKET)
    (socket_dir / LOCK_FILE).write_text("")
    folder = SocketFolder(socket_dir)
    assert not folder.rpc.exists()
    assert not folder.descriptors.exists()
    folder.close()
    folder.close()


def test_one_folder_serves_one_agent(socket_dir: Path) -> None:
    first = SocketFolder(socket_dir)
    with pytest.raises(StartFault, match="another agent serves"):
        SocketFolder(socket_dir)
    first.close()
    SocketFolder(socket_dir).close()


@pytest.mark.parametrize("backlog", [0, 1])
def test_a_socket_that_somebody_listens_on_is_left_alone(socket_dir: Path, backlog: int) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(socket_dir / rpc.RPC_SOCKET))
        sock.listen(backlog)
        with pytest.raises(StartFault, match="somebody listens"):
            SocketFolder(socket_dir)
    assert (socket_dir / rpc.RPC_SOCKET).exists()


def test_a_file_in_the_place_of_a_socket_is_left_alone(socket_dir: Path) -> None:
    path = socket_dir / rpc.RPC_SOCKET
    path.write_text("mine")
    with pytest.raises(StartFault, match="not a socket"):
        SocketFolder(socket_dir)
    assert path.read_text() == "mine"


def test_a_path_that_no_socket_can_have_is_named(socket_dir: Path) -> None:
    long = socket_dir / ("x" * 100)
    long.mkdir()
    with pytest.raises(StartFault, match="at most 107"):
        SocketFolder(long)


def test_a_folder_that_is_not_there_is_named(socket_dir: Path) -> None:
    with pytest.raises(StartFault, match="is no folder"):
        SocketFolder(socket_dir / "absent")


def test_the_lock_is_no_way_to_write_elsewhere(socket_dir: Path) -> None:
    target = socket_dir / "target"
    target.write_text("mine")
    (socket_dir / LOCK_FILE).symlink_to(target)
    with pytest.raises(StartFault, match=LOCK_FILE):
        SocketFolder(socket_dir)
