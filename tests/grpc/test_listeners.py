"""TLS and mutual TLS, IPv6, unix sockets, several listeners."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from bridge.grpc.limits import Limits
from bridge.grpc.tls import server_context
from tests.grpc.conftest import Starter
from tests.grpc.serving import PACKAGE, Running, start_on, until


@dataclass
class Certificates:
    """Files of a small authority, a server and a client it signed, and a client it did not."""

    folder: Path

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def read(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    for authority in ("ca", "other"):
        openssl(
            "req", "-x509", *key, "-subj", f"/CN={authority}", "-keyout", f"{authority}.key", "-out", f"{authority}.pem"
        )
    (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1,IP:::1\n")
    for name, authority in (("server", "ca"), ("client", "ca"), ("stranger", "other")):
        openssl("req", *key, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        signing = ["-CA", f"{authority}.pem", "-CAkey", f"{authority}.key", "-CAcreateserial", "-days", "2"]
        openssl("x509", "-req", "-in", f"{name}.csr", *signing, "-extfile", "names", "-out", f"{name}.pem")
    return Certificates(folder)


async def echoes(channel: grpc.aio.Channel) -> bool:
    reply = await channel.unary_unary(PACKAGE + "Echo")(b"x" * 100_000, timeout=5)
    return bool(reply == b"x" * 100_000)


async def test_tls(serve: Starter, certificates: Certificates) -> None:
    server = await serve(tls=server_context(certificates.path("server.pem"), certificates.path("server.key")))
    credentials = grpc.ssl_channel_credentials(certificates.read("ca.pem"))
    async with grpc.aio.secure_channel(f"localhost:{server.port}", credentials) as channel:
        assert await echoes(channel)
        count = channel.unary_stream(PACKAGE + "Count")(b"200 5000", timeout=5)
        assert len([reply async for reply in count]) == 200
    async with grpc.aio.insecure_channel(server.target) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(PACKAGE + "Echo")(b"", timeout=5)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_mutual_tls(serve: Starter, certificates: Certificates) -> None:
    context = server_context(
        certificates.path("server.pem"), certificates.path("server.key"), certificates.path("ca.pem")
    )
    server = await serve(tls=context)
    for name, welcome in (("client", True), ("stranger", False), (None, False)):
        pair = (certificates.read(f"{name}.key"), certificates.read(f"{name}.pem")) if name else (None, None)
        credentials = grpc.ssl_channel_credentials(certificates.read("ca.pem"), *pair)
        async with grpc.aio.secure_channel(f"localhost:{server.port}", credentials) as channel:
            if welcome:
                assert await echoes(channel)
            else:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await channel.unary_unary(PACKAGE + "Echo")(b"", timeout=5)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert server.server.stats.calls_total == 1


@pytest.mark.parametrize("alpn", [["h2"], ["h2", "http/1.1"], ["http/1.1"], []])
async def test_only_h2_is_spoken_over_tls(serve: Starter, certificates: Certificates, alpn: list[str]) -> None:
    server = await serve(tls=server_context(certificates.path("server.pem"), certificates.path("server.key")))
    context = ssl.create_default_context(cafile=certificates.path("ca.pem"))
    if alpn:
        context.set_alpn_protocols(alpn)
    if "h2" not in alpn:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            reader, writer = await asyncio.open_connection("localhost", server.port, ssl=context)
            if not await asyncio.wait_for(reader.read(1), 5):
                raise ConnectionResetError
        await until(lambda: server.server.stats.connections == 0)
        return
    reader, writer = await asyncio.open_connection("localhost", server.port, ssl=context)
    tls = writer.get_extra_info("ssl_object")
    assert tls.selected_alpn_protocol() == "h2"
    assert (await reader.readexactly(9))[3] == 4
    writer.close()


async def test_a_tls_handshake_that_never_comes_is_ended(serve: Starter, certificates: Certificates) -> None:
    context = server_context(certificates.path("server.pem"), certificates.path("server.key"))
    server = await serve(Limits(preface_s=0.3), tls=context)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()


def test_a_missing_or_wrong_key_is_an_error(certificates: Certificates) -> None:
    with pytest.raises(FileNotFoundError):
        server_context(certificates.path("nothing.pem"), certificates.path("server.key"))
    with pytest.raises(ssl.SSLError):
        server_context(certificates.path("server.pem"), certificates.path("client.key"))


async def test_ipv6(serve: Starter) -> None:
    server = await serve(host="::1")
    async with grpc.aio.insecure_channel(f"[::1]:{server.port}") as channel:
        assert await echoes(channel)
        stream = channel.unary_stream(PACKAGE + "Raw")(b"")
        (call,) = await server.calls(1)
        assert call.peer.startswith("ipv6:[::1]:")
        stream.cancel()


async def test_a_unix_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "grpc.sock")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(path)
    sock.listen()
    server = await start_on(sock)
    async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
        assert await echoes(channel)
        stream = channel.unary_stream(PACKAGE + "Raw")(b"")
        (call,) = await server.calls(1)
        assert call.peer == "unix:"
        stream.cancel()
    await server.server.close()


async def test_several_listeners_of_one_server(server: Running, tmp_path: Path) -> None:
    second = socket.create_server(("127.0.0.1", 0))
    target = f"127.0.0.1:{second.getsockname()[1]}"
    await server.server.serve(second)
    for address in (server.target, target):
        async with grpc.aio.insecure_channel(address) as channel:
            assert await echoes(channel)
    assert server.server.stats.connections_total == 2
