"""Bound ZMQ sockets on unix sockets, without libzmq: PULL for what an engine sends, ROUTER for what it is sent.

libzmq reads and writes in a thread of its own, which wakes ours through an eventfd: fourteen system calls and two
threads for a step of one token. On the loop's thread it is three calls, and one thread is woken once. The engine's end is
libzmq as ever.

Nothing blocks. Each socket has one descriptor (epoll, kqueue) that is readable while it has something to do.
"""

from __future__ import annotations

import logging
import selectors
import socket
from collections import deque

from bridge.wire.zmtp import Peer, ZmtpError, encode

log = logging.getLogger(__name__)

BACKLOG = 64
KEPT_MESSAGES = 4096
"""Messages from peers that a ROUTER keeps unread; engines send one each, when they connect."""


class BoundSocket:
    """Accepts peers at `path` and reads them. A subclass says what becomes of messages."""

    own = b""
    others: tuple[bytes, ...] = ()

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
        """Readable while there is something to do."""
        return int(self._selector.fileno())

    def close(self) -> None:
        """Close everything; the socket's file stays."""
        for connection in self._peers:
            connection.close()
        self._peers.clear()
        self._listener.close()
        self._selector.close()

    def _on_message(self, peer: Peer, frames: list[bytes]) -> None:
        raise NotImplementedError

    def _read(self, connection: socket.socket, peer: Peer) -> bool:
        """Read once; whether all there was came."""
        room = peer.room()
        try:
            count = connection.recv_into(room)
            if not count:
                self._drop(connection)
                return False
            peer.took(count)
            if peer.replies:
                connection.send(peer.replies)
                peer.replies.clear()
        except BlockingIOError:
            return True
        except ZmtpError as error:
            log.warning("a connection to a slot's socket was ended: %s", error)
            self._drop(connection)
            return False
        except OSError:
            self._drop(connection)
            return False
        return count < len(room)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            connection.setblocking(False)
            peer = Peer(self.own, self.others, self._on_message)
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

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._peers[connection]
        connection.close()


class PullSocket(BoundSocket):
    """Takes messages from every PUSH that connects, each peer's in their order."""

    own = b"PULL"
    others = (b"PUSH",)

    def __init__(self, path: str) -> None:
        self._messages: deque[list[bytes]] = deque()
        self._dry = False
        super().__init__(path)

    def receive(self) -> list[bytes] | None:
        """The frames of the next message; None when none waits, and the descriptor will say when one does."""
        if not self._messages and not self._fill():
            return None
        return self._messages.popleft()

    def _on_message(self, peer: Peer, frames: list[bytes]) -> None:
        self._messages.append(frames)

    def _fill(self) -> bool:
        """Read what the peers have sent; whether that was a message."""
        if self._dry:
            # The read before took all there was: asking again at once would cost a system call to learn that.
            self._dry = False
            return False
        dry = False
        for connection, peer in list(self._peers.items()):
            dry = self._read(connection, peer)
        if not self._messages:
            self._accept()
        self._dry = dry and len(self._peers) == 1
        return bool(self._messages)


class RouterSocket(BoundSocket):
    """Sends to every DEALER that connects, by the identity it gives itself; the latest with an identity has it.

    `messages` are (identity, frames) that peers sent. `gone` are identities whose connection ended.
    """

    own = b"ROUTER"
    others = (b"DEALER",)

    def __init__(self, path: str) -> None:
        self.messages: deque[tuple[bytes, list[bytes]]] = deque(maxlen=KEPT_MESSAGES)
        self.gone: deque[bytes] = deque(maxlen=KEPT_MESSAGES)
        self._routes: dict[bytes, socket.socket] = {}
        self._unsent: dict[socket.socket, bytearray] = {}
        super().__init__(path)

    def service(self) -> None:
        """Do what waits: accept, read, write what the peers have room for. Call it whenever `fd` is readable."""
        self._accept()
        for connection, peer in list(self._peers.items()):
            while not self._read(connection, peer) and connection in self._peers:
                continue
        for connection in list(self._unsent):
            self._write(connection)

    def send(self, identity: bytes, frames: list[bytes]) -> bool:
        """Queue a message; False when no peer has that identity."""
        connection = self._routes.get(identity)
        if connection is None:
            return False
        pieces = encode(frames)
        unsent = self._unsent.get(connection)
        if unsent is not None:
            unsent += b"".join(pieces)
            return True
        try:
            sent = connection.sendmsg(pieces)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._drop(connection)
            return False
        if sent < sum(map(len, pieces)):
            self._unsent[connection] = bytearray(b"".join(pieces)[sent:])
            self._selector.modify(connection, selectors.EVENT_READ | selectors.EVENT_WRITE)
        return True

    def _on_message(self, peer: Peer, frames: list[bytes]) -> None:
        self.messages.append((peer.identity, frames))

    def _read(self, connection: socket.socket, peer: Peer) -> bool:
        was_ready = peer.ready
        done = super()._read(connection, peer)
        if peer.ready and not was_ready and connection in self._peers:
            self._routes[peer.identity] = connection
        return done

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
        super()._drop(connection)
        self._unsent.pop(connection, None)
        if self._routes.get(identity) is connection:
            del self._routes[identity]
            self.gone.append(identity)
