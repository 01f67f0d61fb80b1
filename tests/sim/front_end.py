"""The front end's side of vLLM's wire as a plain ZMQ script, with `msgpack` as the decoder: no code of ours between."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgpack
import zmq

from tests.running import Running

ROOT = Path(__file__).resolve().parent.parent.parent
DEAD = b"ENGINE_CORE_DEAD"

REQUEST_ID, TOKENS, FINISH, STOP_REASON, EVENTS, TRACE, PREFILL = 0, 1, 5, 6, 7, 10, 11
"""Positions in an EngineCoreOutput (0.27 to 0.33)."""

ENGINE_INDEX, OUTPUTS, STATS, TIMESTAMP, UTILITY, FINISHED = 0, 1, 2, 3, 4, 5
"""Positions in an EngineCoreOutputs (0.27 to 0.33)."""

STOP, LENGTH, ABORT, ERROR = 0, 1, 2, 3


def add_request(request_id: str, prompt: Any, sampling: Any = None, *, client: int = 0, **fields: Any) -> list[Any]:
    """An EngineCoreRequest of 0.32; `fields` are other positions by name."""
    names = ("mm_features", "pooling_params", "lora_request", "cache_salt", "trace_headers", "abort_immediately")
    assert set(fields) <= set(names), fields
    sampling = {} if sampling is None else sampling
    head = [request_id, prompt, fields.get("mm_features"), sampling, fields.get("pooling_params"), time.time()]
    middle = [fields.get("lora_request"), fields.get("cache_salt"), None, None, None, client, 0, 0]
    tail = [fields.get("trace_headers"), False, None, None, None, fields.get("abort_immediately", False), None, None]
    return head + middle + tail


class FrontEnd:
    """Binds the sockets for one engine (identity `index`), starts the sim and shakes hands with it."""

    def __init__(self, folder: Path, *flags: str, pairs: int = 1, index: int = 0) -> None:
        self.folder = folder
        self.identity = index.to_bytes(2, "little")
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.handshake = self._socket(zmq.ROUTER)
        port = self.handshake.bind_to_random_port("tcp://127.0.0.1")
        self.inputs = [self.bound(zmq.ROUTER, f"i{number}") for number in range(pairs)]
        self.outputs = [self.bound(zmq.PULL, f"o{number}") for number in range(pairs)]
        self.control = f"ipc://{folder}/c"
        command = [sys.executable, "-m", "bridge.plugins.sim", "--zmq-handshake-address", f"tcp://127.0.0.1:{port}"]
        command += ["--zmq-engine-index", str(index), "--control-address", self.control, *flags]
        self.engine = Running(command, folder / "sim.log", {"PYTHONPATH": str(ROOT)})
        self.messages: list[list[Any]] = []
        self._calls = 0

    def __enter__(self) -> FrontEnd:
        return self

    def __exit__(self, *exc: object) -> None:
        self.engine.stop(5)
        self.context.destroy(0)

    def shake(self) -> None:
        self.hello = self.receive_handshake()
        self.send_init()
        self.ready = [self._receive_map(socket, 20.0) for socket in self.inputs]
        self.said_ready = self.receive_handshake()

    def receive_handshake(self, timeout: float = 20.0) -> dict[str, Any]:
        return self._receive_map(self.handshake, timeout)

    def send_init(self, **changes: Any) -> None:
        addresses = {
            "inputs": [socket.getsockopt_string(zmq.LAST_ENDPOINT) for socket in self.inputs],
            "outputs": [socket.getsockopt_string(zmq.LAST_ENDPOINT) for socket in self.outputs],
            "coordinator_input": None,
            "coordinator_output": None,
            "frontend_stats_publish_address": None,
            **changes,
        }
        init = {"addresses": addresses, "parallel_config": {}}
        self.handshake.send_multipart([self.identity, msgpack.packb(init)])

    def send(self, kind: int, *frames: bytes, slot: int = 0) -> None:
        self.inputs[slot].send_multipart([self.identity, bytes((kind,)), *frames])

    def add(self, request_id: str, prompt: Any, sampling: Any = None, **fields: Any) -> None:
        client = fields.get("client", 0)
        slot = client if 0 <= client < len(self.inputs) else 0
        self.send(0, msgpack.packb(add_request(request_id, prompt, sampling, **fields)), slot=slot)

    def abort(self, *request_ids: str) -> None:
        self.send(1, msgpack.packb(list(request_ids)))

    def call(self, method: Any, *args: Any, timeout: float = 5.0) -> Any:
        """The utility reply [call id, failure text, [None, value]]; other messages that arrive are kept."""
        self._calls += 1
        self.send(3, msgpack.packb([0, self._calls, method, list(args)]))
        reply = self.until(lambda message: message[UTILITY] is not None, timeout)[UTILITY]
        assert reply[0] == self._calls
        return reply

    def value(self, method: str, *args: Any) -> Any:
        _, failure, result = self.call(method, *args)
        assert failure is None, failure
        assert result[0] is None
        return result[1]

    def receive(self, timeout: float = 5.0, client: int = 0) -> list[Any]:
        """The next EngineCoreOutputs for a client; fails when none comes."""
        payload = self.receive_raw(timeout, client)
        assert payload is not None, f"no message within {timeout} s\n{self.engine.output()}"
        message = msgpack.unpackb(payload, strict_map_key=False)
        assert isinstance(message, list)
        self.messages.append(message)
        return message

    def receive_raw(self, timeout: float, client: int = 0) -> bytes | None:
        """One message's bytes, or None when none comes in time."""
        if not self.outputs[client].poll(int(timeout * 1000)):
            return None
        (payload,) = self.outputs[client].recv_multipart()
        return payload

    def until(self, wanted: Callable[[list[Any]], bool], timeout: float = 5.0) -> list[Any]:
        """The first message that is `wanted`; all until then are in `messages`."""
        end = time.monotonic() + timeout
        while True:
            message = self.receive(max(0.0, end - time.monotonic()))
            if wanted(message):
                return message

    def collect(self, *request_ids: str, timeout: float = 20.0, client: int = 0) -> dict[str, Answer]:
        """Outputs of these requests to their terminals."""
        answers = {request_id: Answer() for request_id in request_ids}
        end = time.monotonic() + timeout
        while not all(answer.finish is not None for answer in answers.values()):
            for output in self.receive(max(0.0, end - time.monotonic()), client)[OUTPUTS]:
                answers[output[REQUEST_ID]].take(output)
        return answers

    def generate(self, prompt: Sequence[int], sampling: dict[str, Any], request_id: str = "r") -> Answer:
        self.add(request_id, list(prompt), sampling)
        return self.collect(request_id)[request_id]

    def arrivals(self, seconds: float = 0.3) -> list[Any]:
        """Every message that arrives in that time."""
        end = time.monotonic() + seconds
        payloads = iter(lambda: self.receive_raw(max(0.0, end - time.monotonic())), None)
        return [msgpack.unpackb(payload, strict_map_key=False) for payload in payloads]

    def dies(self, timeout: float = 5.0) -> int:
        """ENGINE_CORE_DEAD arrives on every output socket; the exit code of the process."""
        for socket in self.outputs:
            while True:
                assert socket.poll(int(timeout * 1000)), f"no death frame\n{self.engine.output()}"
                if socket.recv_multipart() == [DEAD]:
                    break
        return self.engine.process.wait(timeout)

    def _receive_map(self, socket: zmq.Socket[bytes], timeout: float) -> dict[str, Any]:
        end = time.monotonic() + timeout
        while not socket.poll(100):
            self.engine.must_run("shaking hands")
            assert time.monotonic() < end, self.engine.output()
        identity, payload = socket.recv_multipart()
        assert identity == self.identity
        message = msgpack.unpackb(payload)
        assert isinstance(message, dict)
        return message

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self.context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        if kind == zmq.ROUTER:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        return socket

    def bound(self, kind: int, name: str) -> zmq.Socket[bytes]:
        socket = self._socket(kind)
        socket.bind(f"ipc://{self.folder}/{name}")
        return socket


class Answer:
    """What one request received."""

    def __init__(self) -> None:
        self.outputs: list[list[Any]] = []
        self.tokens: list[int] = []
        self.finish: int | None = None
        self.stop_reason: Any = None

    def take(self, output: list[Any]) -> None:
        assert self.finish is None, "an output after the terminal"
        self.outputs.append(output)
        self.tokens += output[TOKENS]
        self.finish, self.stop_reason = output[FINISH], output[STOP_REASON]
