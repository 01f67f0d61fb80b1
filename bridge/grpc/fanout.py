"""One message on each of many calls at once: the shortest way from an engine's step to its connections.

A step of an engine has one token for each of hundreds of streams. Sending each through its `Call` touches some twenty
objects a token, most of them no longer in the cache since the step before; here a step is a few columns.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from bridge.grpc.connection import Connection


class Outlet(NamedTuple):
    """Where the framed messages of a call go while it is open and not blocked."""

    send: Callable[[int, bytes], None]
    stream_id: int
    connection: Connection


def send_one(send: Callable[[int, bytes], None], stream_id: int, framed: bytes, connection: Connection) -> None:
    """As `send_each`, for one call."""
    try:
        send(stream_id, framed)
    except connection.errors:
        return
    connection.mark_dirty()


def send_each(
    sends: Iterable[Callable[[int, bytes], None]],
    stream_ids: Iterable[int],
    framed: Iterable[bytes],
    connections: Sequence[Connection],
) -> None:
    """Queue one framed message on each call, by the columns of their outlets (one or more), for the next flush.

    A call whose stream is closed in nghttp2, and that has not been told yet, is passed over.
    """
    to_flush = set(connections)
    errors = next(iter(to_flush)).errors
    sending = map(operator.call, sends, stream_ids, framed)
    while True:
        try:
            deque(sending, maxlen=0)
            break
        except errors:
            continue
    for connection in to_flush:
        connection.mark_dirty()
