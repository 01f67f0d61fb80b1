"""A bound ROUTER socket on a unix socket, without a thread of libzmq's (see `zmtp`)."""

from __future__ import annotations

import selectors
import socket
from collections import deque

from bridge.wire.bound import BoundSocket
from bridge.wire.codec import Frames
from bridge.wire.zmtp import Peer, encode

KEPT = 4096
"""Messages, and ends, that wait to be taken; an engine sends one message when it connects."""
MOST_PIECES = 1024
"""Buffers of one sendmsg (IOV_MAX, Linux and macOS)."""


class RouterSocket(BoundSocket):
    """Sends to every DEALER that connects, by the identity it gives itself; the latest with an identity has it.

    `messages` are (identity, frames) that came, `gone` the identities whose connection ended; both grow in `service`.
    """

    name = "input"

    def __init__(self, path: str) -> None:
        """Bind and listen; raises OSError."""
        self.messages: deque[tuple[bytes, list[bytes]]] = deque(maxlen=KEPT)
        self.gone: deque[bytes] = deque(maxlen=KEPT)
        self._routes: dict[bytes, socket.socket] = {}
        self._unsent: dict[socket.socket, bytearray] = {}
        super().__init__(path)

    def send(self, identity: bytes, frames: Frames) -> bool:
        """Write a message, or queue it behind what the peer has no room for; False when no peer has that identity."""
        connection = self._routes.get(identity)
        if connection is None:
            return False
        pieces = encode(frames)
        if len(pieces) > MOST_PIECES:
            pieces = [b"".join(pieces)]
        unsent = self._unsent.get(connection)
        if unsent is not None:
            for piece in pieces:
                unsent += piece
            return True
        try:
            sent = connection.sendmsg(pieces)
        except BlockingIOError:
            sent = 0
        except OSError:
            return False  # its end is read next
        if sent < sum(map(len, pieces)):
            self._unsent[connection] = bytearray(memoryview(b"".join(pieces))[sent:])
            self._selector.modify(connection, selectors.EVENT_READ | selectors.EVENT_WRITE)
        return True

    def service(self) -> None:
        """Accept, read, and write what peers have room for; to be called whenever `fd` is readable."""
        for key, _ in self._selector.select(0):
            if key.fileobj is self._listener:
                self._accept()
        for connection, peer in list(self._peers.items()):
            while self._read(connection, peer):
                pass
        for connection in list(self._unsent):
            self._write(connection)

    def close(self) -> None:
        """Close everything; the socket's file stays."""
        self._routes.clear()
        self._unsent.clear()
        super().close()

    def _new_peer(self) -> Peer:
        return Peer(deque(), b"ROUTER", b"DEALER")

    def _read(self, connection: socket.socket, peer: Peer) -> bool:
        """Read once; whether there may be more."""
        was_ready = peer.ready
        if not self._receive(connection, peer, peer.room()):
            return False
        if peer.ready and not was_ready:
            self._routes[peer.identity] = connection
        while peer.messages:
            self.messages.append((peer.identity, peer.messages.popleft()))
        return True

    def _write(self, connection: socket.socket) -> None:
        unsent = self._unsent[connection]
        try:
            sent = connection.send(unsent)
        except BlockingIOError:
            return
        except OSError:
            self._drop(connection)
            return
        del unsent[:sent]
        if not unsent:
            del self._unsent[connection]
            self._selector.modify(connection, selectors.EVENT_READ)

    def _drop(self, connection: socket.socket) -> None:
        identity = self._peers[connection].identity
        self._unsent.pop(connection, None)
        super()._drop(connection)
        if self._routes.get(identity) is connection:
            del self._routes[identity]
            self.gone.append(identity)
