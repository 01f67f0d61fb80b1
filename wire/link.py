"""The link's sockets: slots (an input ROUTER and an output PULL over ipc) in a private folder.

The engine dials; the bridge binds. Send and receive never block, and are done without libzmq (`router`, `pull`).
Outputs must always be drained: back-pressure is per gRPC stream, never on the engine's socket.
"""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

from bridge.wire.codec import Frames
from bridge.wire.pull import PullSocket
from bridge.wire.router import RouterSocket

MAX_IPC_PATH = 107
"""Bytes of an ipc path that fit `sockaddr_un` (Linux), so libzmq's limit too."""


class LinkError(Exception):
    """A slot that cannot be bound or a peer that cannot be reached; one line for people."""


def private_folder(path: Path) -> Path:
    """Make `path` (mode 0700), or accept it when it is ours and private; raises `LinkError` otherwise."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
        raise LinkError(f"{path} is not a folder of this user; name another with --state-dir")
    if info.st_mode & 0o077:
        raise LinkError(f"{path} can be read by other users (mode {info.st_mode & 0o777:o}); make it 0700")
    return path


def slot_addresses(folder: Path, index: int) -> tuple[str, str]:
    """The (input, output) ipc addresses of a slot. Names are short: the whole path must fit 107 bytes."""
    pair = (f"ipc://{folder}/i{index}", f"ipc://{folder}/o{index}")
    for address in pair:
        length = len(os.fsencode(address.removeprefix("ipc://")))
        if length > MAX_IPC_PATH:
            raise LinkError(
                f"the socket path {address} has {length} bytes; the limit is {MAX_IPC_PATH}: use a shorter --state-dir"
            )
    return pair


class Slot:
    """One input/output socket pair of a link, bound and locked.

    A lock file beside each pair is held for the slot's life, because a second bind would take a live path over.
    """

    def __init__(self, index: int, input_address: str, output_address: str) -> None:
        """Bind both sockets; raises `LinkError` when another process holds the slot."""
        self.index = index
        self.input_address = input_address
        self.output_address = output_address
        self._lock = _lock(input_address)
        self._input: RouterSocket | None = None
        self._output: PullSocket | None = None
        try:
            _unlink_stale(input_address)
            self._input = RouterSocket(_path(input_address))
            _unlink_stale(output_address)
            self._output = PullSocket(_path(output_address))
        except OSError as error:
            self.close()
            raise LinkError(f"slot {index} cannot bind {input_address}: {error}") from None
        except BaseException:
            self.close()
            raise
        self._send = self._input.send
        self._arrived, self._gone = self._input.messages, self._input.gone
        self.service = self._input.service
        """Do what waits on the input socket; to be called whenever `input_fd` is readable."""
        self.receive = self._output.receive
        """The frames of the next output message, or None when none waits."""
        self.output_fd = self._output.fd
        self.input_fd = self._input.fd

    def send(self, identity: bytes, frames: Frames) -> None:
        """Queue one message to a rank; raises `LinkError` when that rank has no connection to this slot."""
        if not self._send(identity, frames):
            raise LinkError(f"rank {identity.hex()} is not connected to slot {self.index}")

    def receive_ready(self) -> tuple[bytes, bytes] | None:
        """The next (identity, ready map) from the input socket, or None. Other shapes are dropped."""
        self.service()
        while self._arrived:
            identity, frames = self._arrived.popleft()
            if len(frames) == 1:
                return identity, frames[0]
        return None

    def take_gone(self) -> list[bytes]:
        """The ranks whose connection to the input socket was seen to end since the last call.

        Nothing is read here: a ready map that came meanwhile would wait for the descriptor's next event.
        """
        gone = list(self._gone)
        self._gone.clear()
        return gone

    def close(self) -> None:
        """Close both sockets and release the lock. The socket files stay for the next holder to take over."""
        if self._input is not None:
            self._input.close()
            self._input = None
        if self._output is not None:
            self._output.close()
            self._output = None
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _path(address: str) -> str:
    if not address.startswith("ipc://"):
        raise LinkError(f"a slot's address must be ipc://, not {address}")
    return address.removeprefix("ipc://")


def _lock(address: str) -> int:
    path = _path(address) + ".lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise LinkError(f"another process serves the slot at {address} (it holds {path})") from None
    return descriptor


def _unlink_stale(address: str) -> None:
    """Remove a socket that an earlier holder left; anything that is not a socket is somebody's and stays."""
    path = _path(address)
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise LinkError(f"{path} exists and is not a socket; remove it or use another --state-dir")
    os.unlink(path)
