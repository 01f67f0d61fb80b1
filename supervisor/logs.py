"""Logging of every bridge process: to stderr, one line a record, as text or JSON."""

from __future__ import annotations

import json
import logging
import sys
import time

RELAYED = "bridge.relayed"
"""The logger of lines that another process wrote; they carry their own time and level."""


class TextFormatter(logging.Formatter):
    """`12:03:41.512 INFO  bridge.frontend: message`, local time; a relayed line as it was written, after its prefix."""

    def format(self, record: logging.LogRecord) -> str:
        if record.name == RELAYED:
            return record.getMessage()
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        line = f"{clock}.{int(record.msecs):03d} {record.levelname:<7} {record.name}: {record.getMessage()}"
        return line if record.exc_info is None else f"{line}\n{self.formatException(record.exc_info)}"


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (seconds since the epoch), level, logger, message, pid, exception, and what the record
    carries as `extra={"fields": {…}}` (request_id, method, code, peer)."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "pid": record.process,
        }
        entry.update(getattr(record, "fields", {}))
        if record.exc_info is not None:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def configure(level: str = "info", log_format: str = "text") -> None:
    """Set up the root logger; `level` is debug, info, warning or error, `log_format` text or json."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
