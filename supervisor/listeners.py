"""Listening sockets, bound once by the supervisor and inherited by front ends.

Never SO_REUSEPORT: closing one of two listeners resets connections that wait in its queue.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path

from bridge.supervisor.control import Listener
from bridge.supervisor.errors import UsageError
from bridge.wire.link import MAX_IPC_PATH

ADMIN = "admin"
"""Kind of the gRPC listener that serves the methods for administrators."""

BACKLOG = 1024
"""Connections that may wait for `accept`; the kernel caps it at net.core.somaxconn."""


class BoundListener:
    """A listening socket. `kind` is what it serves (`grpc`); `address` is for people, e.g. `127.0.0.1:50051`."""

    def __init__(
        self, bound: socket.socket, kind: str, address: str, *, loopback: bool, path: Path | None = None
    ) -> None:
        self.socket = bound
        self.kind = kind
        self.address = address
        self.loopback = loopback
        """Only this machine can reach it."""
        self._path = path
        self._inode = path.lstat().st_ino if path is not None else 0

    @property
    def port(self) -> int | None:
        """The TCP port, the real one where 0 was asked for; None for a unix socket."""
        return int(self.socket.getsockname()[1]) if self._path is None else None

    def describe(self) -> Listener:
        """What a front end that inherits the descriptor is told."""
        return Listener(fd=self.socket.fileno(), kind=self.kind, address=self.address)

    def close(self) -> None:
        """Close it, and remove its unix socket file unless somebody has put another there."""
        self.socket.close()
        if self._path is not None:
            try:
                if self._path.lstat().st_ino == self._inode:
                    self._path.unlink()
            except FileNotFoundError:
                pass


def bind_tcp(
    host: str, port: int, kind: str = "grpc", *, flags: tuple[str, str] = ("--host", "--port")
) -> BoundListener:
    """Listen on one TCP address; `port` 0 takes a free one. A name uses its first address, IPv4 before IPv6.

    Raises `UsageError`: what cannot be bound, why, and which of `flags` changes it.
    """
    host_flag, port_flag = flags
    if not 0 <= port <= 65535:
        raise UsageError(f"{port_flag} {port} is not a TCP port; give 0 to 65535")
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise UsageError(f"{host_flag} {host} is no address of this machine: {error.strerror}") from None
    family, _, protocol, _, address = min(found, key=lambda info: info[0] != socket.AF_INET)
    bound = socket.socket(family, socket.SOCK_STREAM, protocol)
    try:
        if os.name == "posix":
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if host in ("::", "") else 1)
        bound.bind(address)
        bound.listen(BACKLOG)
        bound.setblocking(False)
    except OSError as error:
        bound.close()
        raise UsageError(_why_not(error, host, port, host_flag, port_flag)) from None
    name = bound.getsockname()
    shown = f"[{name[0]}]:{name[1]}" if family == socket.AF_INET6 else f"{name[0]}:{name[1]}"
    return BoundListener(bound, kind, shown, loopback=_is_loopback(name[0]))


def bind_metrics(host: str, port: int) -> BoundListener:
    """The listener of metrics and probes; raises `UsageError`."""
    return bind_tcp(host, port, "metrics", flags=("--metrics-host", "--metrics-port"))


def bind_admin(where: str) -> BoundListener:
    """The gRPC listener for administrators at HOST:PORT or unix:PATH; raises `UsageError`."""
    scheme, _, path = where.partition(":")
    if scheme == "unix":
        return bind_unix(Path(path), ADMIN, flag="--admin-bind")
    host, _, port = where.rpartition(":")
    if not port.isdecimal():
        raise UsageError(f"--admin-bind {where} is neither HOST:PORT nor unix:PATH")
    return bind_tcp(host.strip("[]"), int(port), ADMIN, flags=("--admin-bind", "--admin-bind"))


def bind_unix(path: Path, kind: str = "grpc", *, flag: str = "--uds") -> BoundListener:
    """Listen on a unix socket, for this user only (mode 0600). A socket file nobody answers on is taken over.

    Raises `UsageError`.
    """
    length = len(os.fsencode(path))
    if length > MAX_IPC_PATH:
        raise UsageError(f"{flag} {path} has {length} bytes, over the limit of {MAX_IPC_PATH} for a unix socket")
    _clear_stale(path, flag)
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        bound.bind(str(path))
    except OSError as error:
        bound.close()
        raise UsageError(f"{flag} {path} cannot be bound: {error.strerror}") from None
    finally:
        os.umask(before)
    bound.listen(BACKLOG)
    bound.setblocking(False)
    return BoundListener(bound, kind, f"unix:{path}", loopback=True, path=path)


def _clear_stale(path: Path, flag: str) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"{flag} {path} cannot be used: {error.strerror}") from None
    if not stat.S_ISSOCK(mode):
        raise UsageError(f"{flag} {path} exists and is not a socket; remove it or name another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except OSError as error:
            raise UsageError(f"{flag} {path} is in use: {error.strerror or error}") from None
    raise UsageError(f"{flag} {path} is already served by another process; stop it or name another path")


def _why_not(error: OSError, host: str, port: int, host_flag: str, port_flag: str) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} on {host} is already in use: stop what listens there, "
            f"or choose another with {port_flag} (0 takes a free one)"
        )
    if error.errno == errno.EACCES:
        return f"port {port} needs privileges this user lacks: choose one above 1023 with {port_flag}"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host_flag} {host} is no address of this machine"
    return f"cannot listen on {host}:{port}: {error.strerror}"


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
