"""A way past the front end: ask a simulated engine what it holds, or make it fail, over a socket of its own.

`--control-address` serves it. One JSON array `[method, arguments…]` a request, one JSON object back: `{"value": …}` or
`{"error": text}`. Methods: `state`, `fault`. It answers in a wedged engine too, and while the engine loads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import zmq

from bridge.plugins.sim.sockets import Context, DialError


class ControlError(Exception):
    """What the simulated engine refused, or that it does not answer."""


class SimControl:
    """A client for tests. `address` is the engine's `--control-address`; calls wait at most `timeout_s`."""

    def __init__(self, address: str, timeout_s: float = 5.0) -> None:
        self._context: Context = zmq.Context()
        self._address = address
        self._timeout_ms = int(timeout_s * 1000)

    def state(self) -> dict[str, Any]:
        """The same as the utility `sim_state`: counts (running, waiting, finished, aborted, …) and ids."""
        value = self._call("state")
        assert isinstance(value, dict)
        return value

    def fault(self, kind: str, value: float | str | None = None) -> None:
        """Make a fault happen now; kinds and values as `bridge.plugins.sim.faults` lists them."""
        self._call("fault", kind, value)

    def close(self) -> None:
        self._context.destroy(0)

    def __enter__(self) -> SimControl:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _call(self, method: str, *args: Any) -> Any:
        with self._context.socket(zmq.REQ) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(self._address)
            socket.send(json.dumps([method, *args]).encode())
            if not socket.poll(self._timeout_ms):
                raise ControlError(f"no answer from {self._address} in {self._timeout_ms / 1000:g} s")
            answer = json.loads(socket.recv())
        if "error" in answer:
            raise ControlError(answer["error"])
        return answer["value"]


class ControlServer:
    """The engine's end. `serve` answers whatever waits; it never blocks."""

    def __init__(self, context: Context, address: str, methods: Mapping[str, Callable[..., Any]]) -> None:
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self._methods = methods
        try:
            self.socket.bind(address)
        except zmq.ZMQError as error:
            self.socket.close(0)
            raise DialError(f"cannot bind the control address {address}: {error}") from None

    def serve(self) -> None:
        while True:
            try:
                request = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.socket.send(json.dumps(self._answer(request)).encode())

    def _answer(self, request: bytes) -> dict[str, Any]:
        try:
            method, *args = json.loads(request)
            return {"value": self._methods[method](*args)}
        except KeyError:
            return {"error": f"there is no method {method!r}; there are: {', '.join(self._methods)}"}
        except (TypeError, ValueError) as error:
            return {"error": str(error)}

    def close(self) -> None:
        self.socket.close(0)
