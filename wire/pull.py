"""A bound PULL socket on a unix socket, read without a thread of libzmq's (see `zmtp`)."""

from __future__ import annotations

import socket
from collections import deque

from bridge.wire.bound import BoundSocket
from bridge.wire.zmtp import Peer


class PullSocket(BoundSocket):
    """Takes messages from every PUSH that connects, each peer's in their order."""

    name = "output"

    def __init__(self, path: str) -> None:
        """Bind and listen; raises OSError."""
        self._messages: deque[list[bytes]] = deque()
        self._dry = False
        super().__init__(path)

    def receive(self) -> list[bytes] | None:
        """The frames of the next message; None when none waits, and the descriptor will say when one does."""
        if not self._messages and not self._fill():
            return None
        return self._messages.popleft()

    def _fill(self) -> bool:
        """Read what the peers have sent; whether that was a message."""
        if self._dry:
            # The read before took all there was: asking again at once would cost a system call to learn that.
            self._dry = False
            return False
        for connection, peer in list(self._peers.items()):
            self._read(connection, peer)
        if not self._messages:
            for connection in self._accept():
                self._read(connection, self._peers[connection])
        return bool(self._messages)

    def _read(self, connection: socket.socket, peer: Peer) -> None:
        room = peer.room()
        count = self._receive(connection, peer, room)
        if count:
            self._dry = count < len(room) and len(self._peers) == 1

    def _new_peer(self) -> Peer:
        return Peer(self._messages, b"PULL", b"PUSH")
