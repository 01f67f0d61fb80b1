"""One rank's lane: requests in and outputs out, on the scheduler's own loop, where nothing may raise or block.

The scheduler holds a lane where it would hold its senders to the tokenizer manager and the detokenizer (`send_output`),
and pulls from it where it would read the tokenizer manager's socket (`pull`). A lane has one pair of sockets a slot; what
a request's slot asked for goes back to that slot.

The scheduler aborts by prefix: `1.5.1` would end `1.5.12` too. So it knows each request by its length and its id
(`5:1.5.1`), of which none begins another; nor does one ever look like the health checks it answers itself.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq

from bridge.plugins.sglang import guarded, intake, slim
from bridge.plugins.sglang.dial import Socket, Sockets
from bridge.plugins.sglang.slim import Tail

LOAD_INTERVAL_S = 0.05
"""Between two looks at the scheduler's queues: a look walks all that wait."""
CONTROL_MARK = "headless-bridge-control:"
NOT_DONE = "the engine did not do it and does not say why; it flushes only while nothing runs or waits"
BAD_REQUEST = 400
INTERNAL = 500

_log = logging.getLogger(__name__)


class Route:
    """Where one request's outputs go. `hidden` counts the elements of its hidden states that were sent."""

    __slots__ = ("hidden", "rid", "slot", "trace")

    def __init__(self, rid: str, slot: int, trace: Any) -> None:
        self.rid = rid
        self.slot = slot
        self.trace = trace
        self.hidden = 0


def scheduler_id(rid: str) -> str:
    """The id a request has inside the scheduler."""
    return f"{len(rid)}:{rid}"


class Lane:
    """A rank's lane. It exists before the model is loaded, and carries once `open` was called."""

    socket: Socket | None = None
    """SGLang's sender has one by this name."""

    def __init__(self) -> None:
        self.inputs: Sequence[Socket] = ()
        self._outputs: Sequence[Socket] = ()
        self._routes: dict[str, Route] = {}
        self._doomed: deque[str] = deque()
        self._tail = Tail()
        self._tail_at = 0.0
        self._failures: set[tuple[str, str]] = set()

    def open(
        self,
        sockets: Sockets,
        *,
        engine_index: int,
        limits: guarded.Limits,
        tokenizer: Any,
        load: Callable[[], Any],
        trace: Callable[[Any, dict[str, str] | None], Any],
    ) -> None:
        """Start to carry. `load` is the scheduler's own load snapshot; `trace` starts the trace of a request."""
        self.inputs, self._outputs = sockets.inputs, sockets.outputs
        self._tail = Tail(engine_index)
        self._limits = limits
        self._tokenizer = tokenizer
        self._load = load
        self._trace = trace
        self._reader = intake.RequestReader()

    # -- in ----------------------------------------------------------------------------------------------------------

    def pull(self, limit: int) -> list[Any]:
        """The requests that wait, at most `limit` (negative: all), and aborts for what can no longer be told."""
        requests: list[Any] = []
        try:
            while self._doomed and (limit < 0 or len(requests) < limit):
                requests.append(self._abort(self._doomed.popleft()))
            for slot, socket in enumerate(self.inputs):
                while _readable(socket) and (limit < 0 or len(requests) < limit):
                    frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
                    self._take(slot, [frame.buffer for frame in frames], requests)
        except Exception:
            _log.exception("the front end's messages cannot be read")
        return requests

    def _take(self, slot: int, frames: list[memoryview], requests: list[Any]) -> None:
        """One message; whatever is wrong with it is answered, as far as it says whose it is."""
        kind = bytes(frames[0])
        try:
            if len(frames) < 2:
                raise ValueError(f"a message of {len(frames)} frame")
            if kind == intake.ADD:
                self._add(slot, frames, requests)
            elif kind == intake.ABORT:
                known = map(scheduler_id, intake.abort_ids(frames[1]))
                requests += [self._abort(one) for one in known if one in self._routes]
            elif kind == intake.CONTROL:
                requests.append(intake.control_request(frames[1], f"{CONTROL_MARK}{slot}:"))
            else:
                raise ValueError(f"message type {kind.hex()}")
        except intake.ControlRefused as error:
            self._send(slot, slim.reply(error.call_id, False, str(error), self._tail.engine_index))
        except Exception as error:
            _log.warning("a message on slot %d cannot be used: %s", slot, error)
            rid = intake.id_of(frames[1]) if kind == intake.ADD and len(frames) > 1 else None
            if rid is not None:
                self._refuse(slot, rid, f"the request cannot be decoded: {error}")

    def _add(self, slot: int, frames: list[memoryview], requests: list[Any]) -> None:
        try:
            request = self._reader.decode(frames[1])
        except msgspec.MsgspecError as error:
            raise ValueError(str(error)) from None
        rid = request.rid or ""
        request.rid = name = scheduler_id(rid)
        kind = type(request).__name__
        if kind == "EncoderDispatchErrorReq":
            requests.append(request)
            return
        if not rid:
            self._refuse(slot, rid, "rid is empty")
            return
        if name in self._routes:
            self._refuse(slot, rid, f"rid {rid} is the id of a request that still runs; both end")
            requests.append(self._abort(name))
            self._forget(name)
            return
        check = guarded.check_generate if kind == "TokenizedGenerateReqInput" else guarded.check_embed
        try:
            check(request, self._limits, self._tokenizer)
        except guarded.Refused as error:
            self._refuse(slot, rid, str(error))
            return
        request.http_worker_ipc = None
        request.time_stats = self._trace(request, intake.trace_headers(frames))
        self._routes[name] = Route(rid, slot, request.time_stats)
        requests.append(request)

    def _refuse(self, slot: int, rid: str, reason: str) -> None:
        _log.info("request %s is refused: %s", rid, reason)
        self._send(slot, slim.terminal(rid, reason, BAD_REQUEST, None, self._tail))

    @staticmethod
    def _abort(name: str) -> Any:
        from sglang.srt.managers.io_struct import AbortReq

        return AbortReq(rid=name)

    # -- out ---------------------------------------------------------------------------------------------------------

    def send_output(self, output: Any, recv_obj: Any = None) -> None:
        """Take one output struct of the scheduler. What cannot be told ends its requests, here and in the scheduler."""
        try:
            self._relay(output, recv_obj)
        except Exception as error:
            self._failed(output, error)

    def _relay(self, output: Any, asked_by: Any) -> None:
        kind = type(output).__name__
        if kind == "BatchTokenIDOutput":
            self._batch(output, self._token_batch)
        elif kind == "BatchEmbeddingOutput":
            self._batch(output, self._embedding_batch)
        elif kind == "AbortReq":
            self._end(output.rid, output.finished_reason or {}, output.abort_message)
        elif kind in ("FlushCacheReqOutput", "ProfileReqOutput"):
            self._reply(output, asked_by)
        # Everything else answers a request that this lane cannot make.

    def _batch(self, output: Any, encode: Callable[[Any, list[Route], list[int] | None], bytes]) -> None:
        names = output.rids or ()
        routes = [self._routes.get(name) for name in names]
        if None in routes or (len(self._outputs) > 1 and len({route.slot for route in routes if route}) > 1):
            for slot in range(len(self._outputs)):
                rows = [row for row, route in enumerate(routes) if route is not None and route.slot == slot]
                if rows:
                    self._send(slot, encode(output, [route for row in rows if (route := routes[row])], rows))
        elif routes:
            known: list[Route] = routes  # type: ignore[assignment]
            self._send(known[0].slot, encode(output, known, None))
        for name, finished in zip(names, output.finished_reasons, strict=False):
            if finished:
                self._forget(name)

    def _token_batch(self, output: Any, routes: list[Route], rows: list[int] | None) -> bytes:
        hidden = _new_hidden(output.output_hidden_states, routes, rows) if output.output_hidden_states else None
        return slim.token_batch(output, [route.rid for route in routes], rows, self._load_tail(), hidden)

    def _embedding_batch(self, output: Any, routes: list[Route], rows: list[int] | None) -> bytes:
        return slim.embedding_batch(output, [route.rid for route in routes], rows, self._load_tail())

    def _end(self, name: str, finish: dict[str, Any], message: str | None) -> None:
        """An end outside the output stream: aborted while it waited, preempted, or refused."""
        route = self._forget(name)
        if route is not None:
            text = finish.get("message") or message or "aborted"
            status = finish.get("status_code")
            kind = finish.get("err_type")
            code = int(status) if isinstance(status, int) else None
            self._send(route.slot, slim.terminal(route.rid, text, code, kind, self._load_tail()))

    def _reply(self, output: Any, asked_by: Any) -> None:
        mark = getattr(asked_by, "rid", None)
        if not isinstance(mark, str) or not mark.startswith(CONTROL_MARK):
            return
        slot, _, call_id = mark.removeprefix(CONTROL_MARK).partition(":")
        message = output.message or (None if output.success else NOT_DONE)
        self._send(int(slot), slim.reply(int(call_id), output.success, message, self._tail.engine_index))

    def _failed(self, output: Any, error: Exception) -> None:
        key = (type(output).__name__, type(error).__name__)
        if key not in self._failures:
            self._failures.add(key)
            _log.error("a %s cannot be told to the front end", key[0], exc_info=error)
        for name in getattr(output, "rids", None) or [getattr(output, "rid", None) or ""]:
            route = self._forget(name)
            if route is not None:
                self._doomed.append(name)
                text = f"the engine's output cannot be told: {error}"
                self._send(route.slot, slim.terminal(route.rid, text, INTERNAL, None, self._tail))

    def _forget(self, name: str) -> Route | None:
        route = self._routes.pop(name, None)
        if route is not None and route.trace is not None:
            try:
                route.trace.set_finished_time()
            except Exception as error:
                _log.warning("the trace of %s cannot be ended: %s", route.rid, error)
        return route

    def _send(self, slot: int, message: bytes) -> None:
        try:
            self._outputs[slot].send(message, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            _log.warning("slot %d takes nothing: %s", slot, error)

    # -- load --------------------------------------------------------------------------------------------------------

    def _load_tail(self) -> Tail:
        if time.monotonic() - self._tail_at >= LOAD_INTERVAL_S:
            self._look()
        return self._tail

    def _look(self) -> None:
        self._tail_at = time.monotonic()
        try:
            load = self._load()
            self._tail = Tail(
                self._tail.engine_index,
                int(load.num_running_reqs),
                int(load.num_waiting_reqs),
                int(load.num_used_tokens),
                int(load.max_total_num_tokens),
            )
        except Exception as error:
            _log.warning("the scheduler's load cannot be read: %s", error)

    def idle(self) -> None:
        """The scheduler has nothing to run: say so, for the last batch may still have counted what it ended."""
        tail = self._tail
        if (tail.running or tail.waiting) and not self._routes:
            self._look()
            if not self._tail.running and not self._tail.waiting:
                message = slim.load_only(self._tail)
                for slot in range(len(self._outputs)):
                    self._send(slot, message)


def _readable(socket: Socket) -> bool:
    """Cheaper than a receive that finds nothing and raises."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def _new_hidden(columns: Sequence[Any], routes: Sequence[Route], rows: Sequence[int] | None) -> list[Any] | None:
    """The rows of hidden states that were not sent yet, a request: the engine's list only grows.

    An element of that list is one row, or the block of rows of a prefill; a list of numbers is the last row alone.
    """
    found: list[Any] = []
    for index, route in enumerate(routes):
        value = columns[index if rows is None else rows[index]]
        if not value:
            found.append(None)
            continue
        if isinstance(value[0], int | float):
            found.append([value])
            continue
        new: list[Any] = []
        for element in value[route.hidden :]:
            new += element if element and not isinstance(element[0], int | float) else [element]
        route.hidden = len(value)
        found.append(new)
    return found if any(one is not None for one in found) else None
