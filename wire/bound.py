"""A bound unix socket and the ZMQ peers that dialed it, without a thread of libzmq's: what `pull` and `router` share."""

from __future__ import annotations

import abc
import logging
import selectors
import socket

from bridge.wire.zmtp import Peer, ZmtpError

log = logging.getLogger(__name__)

BACKLOG = 64


class BoundSocket(abc.ABC):
    """Listens, accepts, reads and drops. Nothing blocks. `name` is what log lines call it."""

    name: str

    def __init__(self, path: str) -> None:
        """Bind and listen; raises OSError."""
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._peers: dict[socket.socket, Peer] = {}
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
        """Readable while there is something to do (an epoll or kqueue descriptor)."""
        return int(self._selector.fileno())

    def close(self) -> None:
        """Close everything; the socket's file stays."""
        for connection in self._peers:
            connection.close()
        self._peers.clear()
        self._listener.close()
        self._selector.close()

    @abc.abstractmethod
    def _new_peer(self) -> Peer:
        """The state of a connection that was just accepted."""

    def _accept(self) -> list[socket.socket]:
        """Take every connection that waits; what they have sent is still to be read."""
        accepted: list[socket.socket] = []
        while True:
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return accepted
            connection.setblocking(False)
            peer = self._new_peer()
            try:
                connection.send(peer.replies)
            except OSError as error:
                log.debug("a peer left at once: %s", error)
                connection.close()
                continue
            peer.replies.clear()
            self._peers[connection] = peer
            self._selector.register(connection, selectors.EVENT_READ)
            accepted.append(connection)

    def _receive(self, connection: socket.socket, peer: Peer, room: memoryview) -> int:
        """Read into `peer.room()` once; 0 when nothing is at hand, or the peer is gone, which is dropped then."""
        try:
            count = connection.recv_into(room)
            if count:
                peer.took(count)
                if peer.replies:
                    connection.send(peer.replies)
                    peer.replies.clear()
                return count
        except BlockingIOError:
            return 0
        except ZmtpError as error:
            log.warning("a connection to an %s socket was ended: %s", self.name, error)
        except OSError as error:
            log.debug("a peer of an %s socket is gone: %s", self.name, error)
        self._drop(connection)
        return 0

    def _drop(self, connection: socket.socket) -> None:
        del self._peers[connection]
        self._selector.unregister(connection)
        connection.close()
