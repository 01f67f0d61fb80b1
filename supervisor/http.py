"""A small HTTP/1.1 responder for probes and scrapes: GET and HEAD, one request a connection, no bodies taken."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

MAX_HEAD_BYTES = 8192
REQUEST_S = 5.0
"""For a request to arrive and for its answer to be taken."""
MAX_CONNECTIONS = 64
"""Connections at once; one more is closed. Kubelet and Prometheus use one each."""

REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Answer:
    """What a path answers: a status of `REASONS`, and text."""

    status: int
    text: str
    content_type: str = "text/plain; charset=utf-8"


Route = Callable[[], Answer | Awaitable[Answer]]


class HttpResponder:
    """Answers `routes`, by path without its query, on one listening socket."""

    def __init__(self, routes: Mapping[str, Route]) -> None:
        self._routes = dict(routes)
        self._server: asyncio.Server | None = None
        self._open = 0

    async def serve(self, sock: socket.socket) -> None:
        """Accept on `sock`, which is bound and listening; the responder closes this descriptor at its end."""
        self._server = await asyncio.start_server(self._connected, sock=sock, limit=MAX_HEAD_BYTES)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            if self._open <= MAX_CONNECTIONS:
                async with asyncio.timeout(REQUEST_S):
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(await self._answer(head))
                    await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            log.debug("a connection to the metrics listener was ended: %s", type(error).__name__)
        finally:
            self._open -= 1
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _answer(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b"\r\n")[0].decode("latin-1").partition(" ")
        target, _, version = rest.partition(" ")
        if not version.startswith("HTTP/1."):
            return _encoded(Answer(400, "not HTTP/1.1\n"))
        if method not in ("GET", "HEAD"):
            return _encoded(Answer(405, "GET or HEAD\n"))
        route = self._routes.get(target.partition("?")[0])
        if route is None:
            return _encoded(Answer(404, "try " + " ".join(self._routes) + "\n"), body=method == "GET")
        answer = route()
        return _encoded(answer if isinstance(answer, Answer) else await answer, body=method == "GET")


def _encoded(answer: Answer, *, body: bool = True) -> bytes:
    text = answer.text.encode()
    allow = "Allow: GET, HEAD\r\n" if answer.status == 405 else ""
    head = (
        f"HTTP/1.1 {answer.status} {REASONS[answer.status]}\r\nContent-Type: {answer.content_type}\r\n"
        f"Content-Length: {len(text)}\r\nCache-Control: no-store\r\n{allow}Connection: close\r\n\r\n"
    ).encode()
    return head + text if body else head
