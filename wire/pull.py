"""A bound PULL socket on a unix socket, read without a thread of libzmq's (see `zmtp`)."""

from __future__ import annotations

import logging
import selectors
import socket
from collections import deque

from bridge.wire.zmtp import Peer, ZmtpError

log = logging.getLogger(__name__)

BACKLOG = 64


class PullSocket:
    """Takes messages from every PUSH that connects, each peer's in their order. Nothing blocks."""

    def __init__(self, path: str) -> None:
        """Bind and listen; raises OSError."""
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._peers: dict[socket.socket, Peer] = {}
        self._messages: deque[list[bytes]] = deque()
        self._dry = False
        try:
            self._listener.setblocking(False)
            self._listener.bind(path)
            self._listener.listen(BACKLOG)
            self._selector.register(self._listener, selectors.EVENT_READ)
        except BaseException:
            self.close()
            raise

    @property
    def fd(self) -> int:
        """Readable while there is something to receive (an epoll or kqueue descriptor)."""
        return int(self._selector.fileno())

    def receive(self) -> list[bytes] | None:
        """The frames of the next message; None when none waits, and the descriptor will say when one does."""
        if not self._messages and not self._fill():
            return None
        return self._messages.popleft()

    def close(self) -> None:
        """Close everything; the socket's file stays."""
        for peer in self._peers:
            peer.close()
        self._peers.clear()
        self._listener.close()
        self._selector.close()

    def _fill(self) -> bool:
        """Read what the peers have sent; whether that was a message."""
        if self._dry:
            # The read before took all there was: asking again at once would cost a system call to learn that.
            self._dry = False
            return False
        for connection, peer in list(self._peers.items()):
            self._read(connection, peer)
        if not self._messages:
            self._accept()
        return bool(self._messages)

    def _read(self, connection: socket.socket, peer: Peer) -> None:
        room = peer.room()
        try:
            count = connection.recv_into(room)
            if not count:
                self._drop(connection, None)
                return
            peer.took(count)
            if peer.replies:
                connection.send(peer.replies)
                peer.replies.clear()
        except BlockingIOError:
            return
        except (OSError, ZmtpError) as error:
            self._drop(connection, error)
            return
        self._dry = count < len(room) and len(self._peers) == 1

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            connection.setblocking(False)
            peer = Peer(self._messages, b"PULL", b"PUSH")
            try:
                connection.send(peer.replies)
            except OSError as error:
                log.debug("a peer left at once: %s", error)
                connection.close()
                continue
            peer.replies.clear()
            self._peers[connection] = peer
            self._selector.register(connection, selectors.EVENT_READ)
            self._read(connection, peer)

    def _drop(self, connection: socket.socket, error: Exception | None) -> None:
        if isinstance(error, ZmtpError):
            log.warning("a connection to an output socket was ended: %s", error)
        self._selector.unregister(connection)
        del self._peers[connection]
        connection.close()
