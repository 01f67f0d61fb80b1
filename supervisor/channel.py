"""Both ends of the control channel: the asyncio transport over the socketpair.

A message is a length (`bridge.wire.framing`) and a msgpack map tagged `type`; the messages are in `control.py`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from typing import Any, Generic, TypeVar, cast

import msgspec

from bridge.supervisor.control import ToFrontEnd, ToSupervisor
from bridge.wire.framing import Framing, FramingError, framed

MAX_MESSAGE = 16 << 20
"""Bytes of one message. The largest real one, `EngineUp` with every layout, is under 64 KiB."""

_log = logging.getLogger(__name__)

Incoming = TypeVar("Incoming")


class ChannelError(Exception):
    """Bytes on the control channel that are no message of this protocol."""


def compatible(supervisor: int, front_end: int) -> bool:
    """Whether a supervisor of one control version can run a front end of another: the same one, or the next."""
    return 0 <= front_end - supervisor <= 1


class ControlChannel(Generic[Incoming], asyncio.Protocol):
    """One end of the channel. `send` never blocks; `receive` gives None for ever once the other end is gone.

    A message whose tag this end does not know (a peer one version ahead) is logged and dropped.
    """

    def __init__(self, incoming: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(incoming)
        self._framing = Framing(MAX_MESSAGE)
        self._waiting: deque[Incoming] = deque()
        self._arrived = asyncio.Event()
        self._transport: asyncio.Transport | None = None
        self._gone = False

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message; dropped when the other end is already gone, which `receive` tells."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(framed(message))

    async def receive(self) -> Incoming | None:
        while not self._waiting:
            if self._gone:
                return None
            self._arrived.clear()
            await self._arrived.wait()
        return self._waiting.popleft()

    def close(self) -> None:
        """Close after what was queued is written."""
        if self._transport is not None:
            self._transport.close()
        self._end()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            bodies = self._framing.feed(data)
            for body in bodies:
                self._take(body)
        except (ChannelError, FramingError) as error:
            _log.error("control channel: %s; closing it", error)
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()

    def _take(self, body: bytes) -> None:
        try:
            message = self._decoder.decode(body)
        except msgspec.MsgspecError as error:
            tag = _tag(body)
            if tag is None:
                raise ChannelError(f"a message that is no tagged map: {error}") from None
            _log.warning("control channel: dropped a message of type %r: %s", tag, error)
            return
        self._waiting.append(message)
        self._arrived.set()

    def _end(self) -> None:
        self._gone = True
        self._arrived.set()


def _tag(body: bytes) -> str | None:
    try:
        return str(msgspec.msgpack.decode(body, type=dict[str, Any])["type"])
    except (msgspec.MsgspecError, KeyError):
        return None


async def supervisor_end(end: socket.socket) -> ControlChannel[ToSupervisor]:
    """The supervisor's end of a socketpair; takes the socket over."""
    return await _open(end, ControlChannel[ToSupervisor](ToSupervisor))


async def front_end_end(end: socket.socket) -> ControlChannel[ToFrontEnd]:
    """The front end's end, `socket.socket(fileno=N)` of `--control-fd N`; takes the socket over."""
    return await _open(end, ControlChannel[ToFrontEnd](ToFrontEnd))


async def _open(end: socket.socket, channel: ControlChannel[Incoming]) -> ControlChannel[Incoming]:
    end.setblocking(False)
    await asyncio.get_running_loop().create_unix_connection(lambda: channel, sock=end)
    return channel
