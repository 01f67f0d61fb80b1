"""A line that is rewritten in place at the bottom of a terminal; log records print above it."""

from __future__ import annotations

import logging
import os
import sys
from typing import TextIO

_CLEAR = "\r\x1b[K"


class StatusLine(logging.Filter):
    """Shows one line on a terminal. As a filter of the root's handlers, it clears itself before each record."""

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__()
        self._stream = stream if stream is not None else sys.stderr
        self._shown = False
        self.enabled = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        if self.enabled:
            for handler in logging.getLogger().handlers:
                handler.addFilter(self)

    def show(self, text: str) -> None:
        try:
            columns = os.get_terminal_size(self._stream.fileno()).columns
        except OSError:
            columns = 80
        self._write(_CLEAR + text[: max(columns - 1, 1)])
        self._shown = True

    def clear(self) -> None:
        if self._shown:
            self._write(_CLEAR)
            self._shown = False

    def close(self) -> None:
        self.clear()
        for handler in logging.getLogger().handlers:
            handler.removeFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        self.clear()
        return True

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
