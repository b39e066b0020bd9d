"""What every call has: a token and perhaps a trace in its metadata, bytes to parse, errors that become statuses."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc.aio
from google.protobuf.message import DecodeError, Message
from opentelemetry.context import Context
from opentelemetry.propagate import extract

from kvpool_agent.errors import CallRefused, Refusal
from kvpool_agent.server import codec
from kvpool_agent.server.refusals import status_of
from kvpool_wire import agent_pb2 as pb
from kvpool_wire import rpc

Call = grpc.aio.ServicerContext[Any, Any]


def answering(
    handler: Callable[..., Awaitable[Message]], request: type[Message]
) -> Callable[..., Awaitable[Message]]:
    """The handler with its request parsed and its errors turned into statuses."""

    async def answer(raw: bytes, context: Call) -> Message:
        try:
            return await handler(parse(request, raw), context)
        except Exception as error:  # noqa: BLE001 - the border of the process: every error becomes a status
            code, message = status_of(error)
            await context.abort(code, message)

    return answer


def parse(kind: type[Message], raw: bytes) -> Message:
    """A message from the wire.

    Raises:
        CallRefused: the bytes are none.
    """
    try:
        return kind.FromString(raw)
    except DecodeError as error:
        raise codec.invalid(f"{len(raw)} bytes that are no {kind.DESCRIPTOR.name}") from error


def parse_event(raw: object) -> pb.ClientEvent | None:
    """An event of the client; None at the end of its stream, and for bytes that are none."""
    try:
        return pb.ClientEvent.FromString(raw) if isinstance(raw, bytes) else None
    except DecodeError:
        return None


def unknown_token() -> CallRefused:
    """The refusal of a token that opens nothing."""
    return CallRefused(
        Refusal.UNKNOWN_TOKEN,
        f"no session has this {rpc.TOKEN_METADATA}: the session is over, or was never attached; attach again",
    )


def token_of(context: Call) -> bytes | None:
    """The token that a call carries, None without a well-formed one."""
    for key, value in context.invocation_metadata() or ():
        if key == rpc.TOKEN_METADATA and isinstance(value, str) and len(value) == 2 * rpc.TOKEN_BYTES:
            try:
                return bytes.fromhex(value)
            except ValueError:
                return None
    return None


def trace_context(context: Call) -> Context | None:
    """The caller's trace context; None without one, so that nothing of the SDK runs then."""
    carrier = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
    return extract(carrier) if "traceparent" in carrier else None


def serialize(message: Message) -> bytes:
    """A message for the wire."""
    return message.SerializeToString()


def now() -> float:
    """Event loop time."""
    return asyncio.get_running_loop().time()
