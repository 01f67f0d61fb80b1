"""Takes WINDOW_UPDATE frames out of received bytes: the windows of what is sent are ours (`outflow`), the rest is nghttp2's.

nghttp2 would count what a client grants and never what is sent past it, until a window overflows. In SETTINGS the
streams' initial window goes by another name that nghttp2 ignores: it holds trailers back from a stream without a window.
Every other frame passes as it came, and so do those that are errors, which nghttp2 answers: WINDOW_UPDATEs of another
size than four bytes, of nothing or in the middle of a header block, SETTINGS with a window that is too large.
"""

from __future__ import annotations

import struct

PREFACE_BYTES = 24
HEADER_BYTES = 9
HEADERS = 1
SETTINGS = 4
WINDOW_UPDATE = 8
UPDATE_BYTES = 4
# HEADERS, PUSH_PROMISE, CONTINUATION
BLOCK_KINDS = frozenset((1, 5, 9))
END_HEADERS = 4
SETTING_BYTES = 6
# nghttp2 takes no more settings than 32 in a frame.
SETTINGS_BYTES = 32 * SETTING_BYTES
INITIAL_WINDOW_SIZE = 4
# A setting that means nothing.
UNKNOWN_SETTING = b"\xff\xff"
DEFAULT_WINDOW = 65535
MAX_WINDOW = (1 << 31) - 1

Update = tuple[int, int]
"""The stream, 0 for the connection, and by how many bytes its window grows."""

_update = struct.Struct(">II")
_setting = struct.Struct(">HI")


class Sieve:
    """Follows the frames of one connection, however they are cut into reads."""

    __slots__ = ("_in_block", "_rest", "initial_window", "last_stream", "skip")

    def __init__(self) -> None:
        # What the client lets us send on a new stream.
        self.initial_window = DEFAULT_WINDOW
        # The highest stream that the client has opened.
        self.last_stream = 0
        # Bytes that are left of a frame that passes, whose start did already.
        self.skip = PREFACE_BYTES
        self._rest = b""
        self._in_block = False

    def take(self, data: bytes | memoryview) -> tuple[list[bytes | memoryview], list[Update]]:
        """What nghttp2 gets of ``data``, in order, and the updates in between.

        The start of a frame that may be an update, or settings, is kept for the next read.
        """
        if self._rest:
            data, self._rest = self._rest + bytes(data), b""
        size, at = len(data), self.skip
        if at >= size:
            self.skip = at - size
            return [data], []
        self.skip = start = 0
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
            elif kind == SETTINGS and payload <= SETTINGS_BYTES and not self._in_block:
                if end > size:
                    break
                renamed = self._settings(data[at:end])
                if renamed is not None:
                    if start < at:
                        passed.append(data[start:at])
                    passed.append(renamed)
                    start = at = end
                    continue
            elif kind in BLOCK_KINDS:
                self._in_block = not data[at + 4] & END_HEADERS
                if kind == HEADERS:
                    stream_id = int.from_bytes(data[at + 5 : at + HEADER_BYTES], "big") & MAX_WINDOW
                    self.last_stream = max(self.last_stream, stream_id)
            if end > size:
                self.skip = end - size
                passed.append(data[start:])
                return passed, updates
            at = end
        if start < at:
            passed.append(data[start:at])
        if at < size:
            self._rest = bytes(data[at:])
        return passed, updates

    def _settings(self, frame: bytes | memoryview) -> bytes | None:
        """A SETTINGS frame without the initial window, which is noted; None if it passes as it came."""
        renamed, window = bytearray(frame), None
        stream_id = int.from_bytes(frame[5:HEADER_BYTES], "big") & MAX_WINDOW
        if stream_id or (len(frame) - HEADER_BYTES) % SETTING_BYTES:
            return None
        for at in range(HEADER_BYTES, len(frame), SETTING_BYTES):
            name, value = _setting.unpack_from(frame, at)
            if name == INITIAL_WINDOW_SIZE:
                if value > MAX_WINDOW:
                    return None
                window = value
                renamed[at : at + 2] = UNKNOWN_SETTING
        if window is None:
            return None
        self.initial_window = window
        return bytes(renamed)
