"""Listeners are bound once, and what cannot be bound is one line that says what to do."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from bridge.supervisor.errors import UsageError
from bridge.supervisor.listeners import BoundListener, bind_tcp, bind_unix


def connects(listener: BoundListener) -> bool:
    with socket.socket(listener.socket.family) as client:
        client.settimeout(2)
        return client.connect_ex(listener.socket.getsockname()) == 0


@pytest.mark.parametrize(
    ("host", "shown", "loopback"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("localhost", "127.0.0.1", True),
        ("::1", "[::1]", True),
        ("0.0.0.0", "0.0.0.0", False),
        ("::", "[::]", False),
    ],
)
def test_a_free_port_is_taken_and_named(host: str, shown: str, loopback: bool) -> None:
    listener = bind_tcp(host, 0)
    assert listener.address == f"{shown}:{listener.port}" and listener.loopback is loopback
    assert listener.describe().address == listener.address and listener.describe().fd == listener.socket.fileno()
    assert connects(listener)
    listener.close()


def test_any_address_in_ipv6_is_reachable_over_ipv4() -> None:
    listener = bind_tcp("::", 0)
    with socket.create_connection(("127.0.0.1", listener.port or 0), timeout=2) as client:
        accepted, (host, port, *_) = listener.socket.accept()
        assert (host, port) == ("::ffff:127.0.0.1", client.getsockname()[1])
        accepted.close()
    listener.close()


def test_a_port_in_use_says_which_and_what_to_do() -> None:
    first = bind_tcp("127.0.0.1", 0)
    port = first.port
    assert port is not None
    with pytest.raises(UsageError) as error:
        bind_tcp("127.0.0.1", port)
    assert f"port {port} on 127.0.0.1 is already in use" in str(error.value) and "--port" in str(error.value)
    first.close()
    bind_tcp("127.0.0.1", port).close()


def test_no_listener_shares_its_port() -> None:
    first = bind_tcp("127.0.0.1", 0)
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        with pytest.raises(OSError, match="in use"):
            other.bind(first.socket.getsockname())
    first.close()


@pytest.mark.parametrize(
    ("host", "port", "words"),
    [
        ("127.0.0.1", 65536, "--port 65536 is not a TCP port"),
        ("203.0.113.7", 0, "--host 203.0.113.7 is no address of this machine"),
        ("no.such.host.invalid", 0, "--host no.such.host.invalid"),
    ],
)
def test_what_cannot_be_bound_names_the_flag(host: str, port: int, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        bind_tcp(host, port)


def test_a_unix_socket_is_private_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    listener = bind_unix(path)
    assert listener.address == f"unix:{path}" and listener.port is None
    assert stat.S_IMODE(path.lstat().st_mode) == 0o600
    assert connects(listener)
    listener.close()
    assert not path.exists()


def test_a_stale_unix_socket_is_taken_over_and_a_served_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    first = bind_unix(path)
    with pytest.raises(UsageError, match="already served"):
        bind_unix(path)
    first.close()


def test_a_file_that_is_no_socket_stays(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("mine")
    with pytest.raises(UsageError, match="not a socket"):
        bind_unix(path)
    assert path.read_text() == "mine"


def test_a_socket_put_there_by_somebody_else_stays(tmp_path: Path) -> None:
    path = tmp_path / "s"
    listener = bind_unix(path)
    os.rename(path, tmp_path / "moved")
    path.write_text("other")
    listener.close()
    assert path.read_text() == "other"


def test_a_path_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="107"):
        bind_unix(tmp_path / ("x" * 108))
