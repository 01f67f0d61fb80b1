"""@grpc/grpc-js, in a Node process: `js/probe.js`, with its packages in `.envs/grpc-js`."""

from __future__ import annotations

import base64
import itertools
import json
import os
import queue
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.clients.asking import CODES, PLAIN, CallError, Connect, How

HERE = Path(__file__).resolve().parent
MODULES = HERE.parent.parent / ".envs" / "grpc-js" / "node_modules"
GZIP = 2
"""grpc-js's number for it."""


class JsStream:
    """A call's messages."""

    def __init__(self, client: GrpcJsClient, number: int) -> None:
        self._client = client
        self._number = number
        self.events: queue.Queue[dict[str, Any]] = queue.Queue()

    def __iter__(self) -> Iterator[bytes]:
        while (event := self.events.get(timeout=60))["event"] == "message":
            yield base64.b64decode(event["data"])
        if event["code"]:
            raise CallError(CODES[event["code"]], event["message"])

    def cancel(self) -> None:
        self._client.order(order="cancel", id=self._number)


class GrpcJsClient:
    """The client."""

    def __init__(self, where: Connect) -> None:
        options: dict[str, Any] = {}
        if where.ping_every_s is not None:
            options["grpc.keepalive_time_ms"] = int(where.ping_every_s * 1000)
            options["grpc.keepalive_permit_without_calls"] = 1
        if where.gzip:
            options["grpc.default_compression_algorithm"] = GZIP
        tls = where.tls and {
            "authority": str(where.tls.authority),
            "certificate": where.tls.certificate and str(where.tls.certificate),
            "key": where.tls.key and str(where.tls.key),
        }
        self._process = subprocess.Popen(
            ["node", HERE / "js" / "probe.js", json.dumps({"address": where.address, "options": options, "tls": tls})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "NODE_PATH": str(MODULES)},
        )
        self._numbers = itertools.count()
        self._streams: dict[int, JsStream] = {}
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = json.loads(line)
            self._streams[event["id"]].events.put(event)

    def order(self, **fields: Any) -> None:
        """Tell the process something."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(fields) + "\n")
        self._process.stdin.flush()

    def _start(self, kind: str, path: str, request: bytes, how: How) -> JsStream:
        number = next(self._numbers)
        self._streams[number] = stream = JsStream(self, number)
        metadata = [
            (name, value, False) if isinstance(value, str) else (name, base64.b64encode(value).decode(), True)
            for name, value in how.metadata
        ]
        self.order(
            order="start",
            id=number,
            kind=kind,
            path=path,
            request=base64.b64encode(request).decode(),
            metadata=metadata,
            timeout=None if how.timeout_s is None else int(how.timeout_s * 1000),
            wait=how.wait_for_ready,
        )
        return stream

    def unary(self, path: str, request: bytes, how: How = PLAIN) -> bytes:
        (reply,) = self._start("unary", path, request, how)
        return reply

    def stream(self, path: str, request: bytes, how: How = PLAIN) -> JsStream:
        return self._start("stream", path, request, how)

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(10)
        self._reader.join()
        self._process.stdout.close()
