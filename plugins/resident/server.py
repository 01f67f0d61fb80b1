"""The companion's socket: front ends send checks, and get each verdict when it is there."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from pathlib import Path
from typing import cast

import msgspec

from bridge.plugins.resident.pool import Pool
from bridge.wire.companion import MAX_MESSAGE, Check, Hello
from bridge.wire.framing import Framing, FramingError, framed

_log = logging.getLogger(__name__)


def listen(path: Path) -> socket.socket:
    """Take over `path`, which an earlier companion may have left. Who may connect is the folder's business."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(os.fspath(path))
    listener.listen()
    return listener


async def serve(listener: socket.socket, hello: Hello, pool: Pool) -> None:
    """Answer checks for ever."""
    server = await asyncio.get_running_loop().create_unix_server(lambda: _Connection(hello, pool), sock=listener)
    await server.serve_forever()


class _Connection(asyncio.Protocol):
    """One front end."""

    def __init__(self, hello: Hello, pool: Pool) -> None:
        self._hello = hello
        self._pool = pool
        self._framing = Framing(MAX_MESSAGE)
        self._decoder = msgspec.msgpack.Decoder(Check)
        self._transport: asyncio.Transport | None = None
        self._running: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(framed(self._hello))

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        try:
            checks = [self._decoder.decode(body) for body in self._framing.feed(data)]
        except (FramingError, msgspec.MsgspecError) as error:
            _log.error("a front end sent what is no check: %s", error)
            self._transport.abort()
            return
        for check in checks:
            task = asyncio.ensure_future(self._answer(check))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody waits for what is running; its processes finish by themselves."""
        self._transport = None

    async def _answer(self, check: Check) -> None:
        verdict = await self._pool.judge(check)
        if self._transport is not None:
            self._transport.write(framed(verdict))
