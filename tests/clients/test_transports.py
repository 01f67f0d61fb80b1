"""IPv6, a unix socket, TLS and mutual TLS, with each client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.abuse.target import Target
from tests.clients.asking import CallError, Certificates, Connect, How
from tests.clients.certificates import Authority
from tests.clients.conftest import FAST, Opener
from tests.clients.talk import healthy, must_generate


def credentials(shown: Certificates) -> grpc.ChannelCredentials:
    own = (shown.key.read_bytes(), shown.certificate.read_bytes()) if shown.key and shown.certificate else (None, None)
    return grpc.ssl_channel_credentials(shown.authority.read_bytes(), *own)


@pytest.fixture(scope="module")
def ipv6(place: Path) -> Iterator[Target]:
    folder = place / "ipv6"
    folder.mkdir()
    with Target(folder, *FAST, host="::1") as running:
        yield running.wait_until_serving()


@pytest.fixture(scope="module")
def uds(place: Path) -> Iterator[Target]:
    folder = place / "uds"
    folder.mkdir()
    with Target(folder, *FAST, uds=folder / "grpc") as running:
        yield running.wait_until_serving()


@pytest.fixture(scope="module")
def tls(place: Path, authority: Authority) -> Iterator[Target]:
    folder = place / "tls"
    folder.mkdir()
    with Target(folder, *FAST, *authority.server_flags, tls=credentials(authority.shown_by())) as running:
        yield running.wait_until_serving()


@pytest.fixture(scope="module")
def mutual(place: Path, authority: Authority) -> Iterator[Target]:
    folder = place / "mutual"
    folder.mkdir()
    flags = (*FAST, *authority.server_flags, *authority.client_ca_flags)
    with Target(folder, *flags, tls=credentials(authority.shown_by("client"))) as running:
        yield running.wait_until_serving()


def test_ipv6(name: str, connected: Opener, ipv6: Target) -> None:
    client = connected(name, Connect(ipv6.address))
    assert healthy(client)
    must_generate(client, size=100_000)


def test_unix_socket(name: str, connected: Opener, uds: Target) -> None:
    client = connected(name, Connect(uds.address))
    assert healthy(client)
    must_generate(client, size=100_000)


def test_tls(name: str, connected: Opener, tls: Target, authority: Authority) -> None:
    client = connected(name, Connect(tls.address, authority.shown_by()))
    assert healthy(client)
    must_generate(client, size=100_000)


def test_mutual_tls(name: str, connected: Opener, mutual: Target, authority: Authority) -> None:
    client = connected(name, Connect(mutual.address, authority.shown_by("client")))
    assert healthy(client)
    must_generate(client, size=100_000)


@pytest.mark.parametrize("who", [None, "stranger"])
def test_mutual_tls_without_a_certificate_of_the_authority(
    name: str, connected: Opener, mutual: Target, authority: Authority, who: str | None
) -> None:
    with pytest.raises((CallError, OSError, AssertionError)):
        healthy(connected(name, Connect(mutual.address, authority.shown_by(who))), How(timeout_s=5.0))
    mutual.must_answer()


def test_plain_text_to_a_tls_port(name: str, connected: Opener, tls: Target) -> None:
    with pytest.raises((CallError, OSError, AssertionError)):
        healthy(connected(name, Connect(tls.address)), How(timeout_s=5.0))
    tls.must_answer()


def test_the_log_says_how_it_can_be_reached(tls: Target, ipv6: Target, uds: Target) -> None:
    assert "reachable from this machine only, with TLS" in tls.output()
    assert f"gRPC listens on [::1]:{ipv6.port}, reachable from this machine only, without TLS" in ipv6.output()
    assert "gRPC listens on unix:" in uds.output()
