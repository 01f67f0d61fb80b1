"""The responder of probes and scrapes, asked by raw sockets and by the standard library's client."""

from __future__ import annotations

import asyncio
import http.client
import socket
from collections.abc import AsyncIterator

import pytest

from bridge.supervisor import http as responder
from bridge.supervisor.http import Answer, HttpResponder


@pytest.fixture
async def port() -> AsyncIterator[int]:
    sock = socket.create_server(("127.0.0.1", 0))
    found = int(sock.getsockname()[1])
    serving = HttpResponder({"/livez": lambda: Answer(200, "alive\n"), "/readyz": lambda: Answer(503, "loading\n")})
    await serving.serve(sock)
    yield found
    serving.close()


async def ask(port: int, method: str, path: str) -> tuple[int, str, dict[str, str]]:
    def once() -> tuple[int, str, dict[str, str]]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request(method, path, headers={"Host": "x"})
        answer = connection.getresponse()
        found = answer.status, answer.read().decode(), dict(answer.getheaders())
        connection.close()
        return found

    return await asyncio.to_thread(once)


async def raw(port: int, sent: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    try:
        async with asyncio.timeout(10):
            return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


async def test_paths_answer_and_a_query_changes_nothing(port: int) -> None:
    assert (await ask(port, "GET", "/livez"))[:2] == (200, "alive\n")
    assert (await ask(port, "GET", "/livez?verbose"))[:2] == (200, "alive\n")
    assert (await ask(port, "GET", "/readyz"))[:2] == (503, "loading\n")
    assert (await ask(port, "GET", "/"))[:2] == (404, "try /livez /readyz\n")


async def test_head_has_the_length_and_no_body(port: int) -> None:
    status, body, headers = await ask(port, "HEAD", "/livez")
    assert (status, body, headers["Content-Length"]) == (200, "", "6")


async def test_other_methods_are_refused(port: int) -> None:
    status, _, headers = await ask(port, "POST", "/livez")
    assert (status, headers["Allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize("sent", [b"nonsense\r\n\r\n", b"GET /livez\r\n\r\n", b"\x16\x03\x01\r\n\r\n"])
async def test_what_is_no_request_is_answered_400(port: int, sent: bytes) -> None:
    assert (await raw(port, sent)).startswith(b"HTTP/1.1 400 ")


async def test_a_head_without_end_is_cut_off(port: int) -> None:
    assert await raw(port, b"GET /livez HTTP/1.1\r\nx: " + b"a" * responder.MAX_HEAD_BYTES * 2) == b""


async def test_a_client_that_says_nothing_is_let_go(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responder, "REQUEST_S", 0.1)
    assert await raw(port, b"GET /livez HTTP/1.1\r\n") == b""


async def test_idle_connections_do_not_keep_a_probe_out_for_long(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responder, "REQUEST_S", 0.5)
    idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(responder.MAX_CONNECTIONS)]
    assert await raw(port, b"GET /livez HTTP/1.1\r\n\r\n") == b"", "one more than the limit is closed"
    await asyncio.sleep(0.7)
    assert b"alive" in await raw(port, b"GET /livez HTTP/1.1\r\n\r\n")
    for _, writer in idle:
        writer.close()
