"""The agent's own call over its own sockets: ready means that this has worked, not that something was started."""

import asyncio
import os
import socket
from typing import Final

import grpc
import grpc.aio

from kvpool_agent.errors import StartFault
from kvpool_agent.server.sockets import SocketFolder
from kvpool_wire import agent_pb2 as pb
from kvpool_wire import rpc

SECONDS: Final = 5.0


async def dial(folder: SocketFolder, seconds: float = SECONDS) -> pb.StatusResponse:
    """Get a token from the descriptor socket and ask for the status with it.

    Raises:
        StartFault: one of the sockets does not answer.
    """
    try:
        async with asyncio.timeout(seconds):
            return await _dial(folder)
    except (TimeoutError, OSError, grpc.aio.AioRpcError) as error:
        raise StartFault(
            f"the agent's own sockets in {folder.rpc.parent} do not answer: {error!r}"
        ) from error


async def _dial(folder: SocketFolder) -> pb.StatusResponse:
    loop = asyncio.get_running_loop()
    with socket.socket(
        socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
    ) as sock:
        await loop.sock_connect(sock, str(folder.descriptors))
        ready = asyncio.Event()
        loop.add_reader(sock, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(sock)
        hello, fds, _, _ = socket.recv_fds(sock, 64, 4)
        for fd in fds:
            os.close(fd)
        token = hello[1 : 1 + rpc.TOKEN_BYTES].hex()
        async with grpc.aio.insecure_channel(
            f"unix:{folder.rpc}", (("grpc.enable_http_proxy", 0),)
        ) as channel:
            call = channel.unary_unary(
                rpc.path("Status"),
                request_serializer=pb.StatusRequest.SerializeToString,
                response_deserializer=pb.StatusResponse.FromString,
            )
            answer: pb.StatusResponse = await call(
                pb.StatusRequest(), metadata=((rpc.TOKEN_METADATA, token),)
            )
            return answer
