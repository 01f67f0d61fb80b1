"""Connections that end after so many bytes, in each way a connection can end."""

from __future__ import annotations

import contextlib
import enum
import socket
import ssl
import struct

from tests.abuse.hostile import Hand
from tests.abuse.target import generate
from tests.grpc import raw

PATIENCE_S = 10.0
"""For the server to take or send the bytes that a cut waits for."""
SILENCE_S = 0.5
"""After this an answer is complete: the server keeps its connection open."""


class Ending(enum.Enum):
    """What the client does in the end."""

    CLOSE = "close"
    """FIN, and RST to whatever still comes."""
    RESET = "reset"
    """RST at once."""
    HALF_CLOSE = "half-close"
    """FIN, and the client reads on to the server's own FIN."""


def conversation(tokens: int) -> bytes:
    """All that a client says for one streamed request."""
    _, request = Hand().request(generate([5, 6, 7], tokens).SerializeToString())
    return raw.PREFACE + raw.settings(window=1 << 20) + raw.window_update(0, 1 << 20) + request


def end(sock: socket.socket, ending: Ending) -> None:
    """End the connection; closes the socket."""
    with sock:
        if ending is Ending.RESET:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif ending is Ending.HALF_CLOSE:
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(1 << 16):
                pass


def cut_request(port: int, data: bytes, size: int, ending: Ending) -> None:
    """Send `size` bytes of `data` and end the connection."""
    sock = socket.create_connection(("127.0.0.1", port), PATIENCE_S)
    sock.sendall(data[:size])
    end(sock, ending)


def cut_response(port: int, data: bytes, size: int, ending: Ending) -> bytes:
    """Send `data`, end the connection once `size` bytes of the answer are read, or no more come; what was read."""
    sock = socket.create_connection(("127.0.0.1", port), PATIENCE_S)
    sock.sendall(data)
    sock.settimeout(SILENCE_S)
    got = b""
    with contextlib.suppress(TimeoutError):
        while len(got) < size and (part := sock.recv(size - len(got))):
            got += part
    sock.settimeout(PATIENCE_S)
    end(sock, ending)
    return got


def cut_tls(port: int, context: ssl.SSLContext, data: bytes, size: int, ending: Ending) -> int:
    """A TLS client that is cut after `size` bytes on the wire; how many it has sent."""
    sock = socket.create_connection(("127.0.0.1", port), PATIENCE_S)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing, server_hostname="localhost")
    sent, said = 0, False
    while sent < size:
        try:
            if said:
                break
            tls.do_handshake()
            tls.write(data)
            said = True
        except ssl.SSLWantReadError:
            pass
        out = outgoing.read()[: size - sent]
        sock.sendall(out)
        sent += len(out)
        if sent < size and not said:
            incoming.write(sock.recv(1 << 16))
    end(sock, ending)
    return sent
