"""Takes WINDOW_UPDATE frames out of received bytes: the windows of what is sent are ours (`outflow`), the rest is nghttp2's.

nghttp2 would count what a client grants and never what is sent past it, until a window overflows. Every other frame
passes as it came, and so do WINDOW_UPDATEs that are errors, which nghttp2 answers: of another size than four bytes, of
nothing, or in the middle of a header block.
"""

from __future__ import annotations

import struct

PREFACE_BYTES = 24
HEADER_BYTES = 9
WINDOW_UPDATE = 8
UPDATE_BYTES = 4
# HEADERS, PUSH_PROMISE, CONTINUATION
BLOCK_KINDS = frozenset((1, 5, 9))
END_HEADERS = 4
MAX_WINDOW = (1 << 31) - 1

Update = tuple[int, int]
"""The stream, 0 for the connection, and by how many bytes its window grows."""

_update = struct.Struct(">II")


class Sieve:
    """Follows the frames of one connection, however they are cut into reads."""

    __slots__ = ("_in_block", "_rest", "_skip")

    def __init__(self) -> None:
        self._skip = PREFACE_BYTES
        self._rest = b""
        self._in_block = False

    def take(self, data: bytes | memoryview) -> tuple[list[bytes | memoryview], list[Update]]:
        """What nghttp2 gets of ``data``, in order, and the updates in between.

        The start of a frame that may be an update is kept for the next read.
        """
        if self._rest:
            data, self._rest = self._rest + bytes(data), b""
        size, at = len(data), self._skip
        if at >= size:
            self._skip = at - size
            return [data], []
        self._skip = start = 0
        passed: list[bytes | memoryview] = []
        updates: list[Update] = []
        while size - at >= HEADER_BYTES:
            payload, kind = data[at] << 16 | data[at + 1] << 8 | data[at + 2], data[at + 3]
            end = at + HEADER_BYTES + payload
            if kind == WINDOW_UPDATE and payload == UPDATE_BYTES and not self._in_block:
                if end > size:
                    break
                stream_id, increment = _update.unpack_from(data, at + 5)
                if increment & MAX_WINDOW:
                    if start < at:
                        passed.append(data[start:at])
                    updates.append((stream_id & MAX_WINDOW, increment & MAX_WINDOW))
                    start = at = end
                    continue
            elif kind in BLOCK_KINDS:
                self._in_block = not data[at + 4] & END_HEADERS
            if end > size:
                self._skip = end - size
                passed.append(data[start:])
                return passed, updates
            at = end
        if start < at:
            passed.append(data[start:at])
        if at < size:
            self._rest = bytes(data[at:])
        return passed, updates
