"""The request table: client ids ↔ wire ids, every token in order, exactly one terminal per request.

A `Request` is what a client asked for; its `Sequence`s are what the engine runs, one wire id each. A sequence keeps all
its output ids and how many of them went into chunks, so a blocked stream holds tokens, never frames: when it can be
written again the pending tokens leave as one chunk.

The table knows no engine and no contract: deltas come from a `Codec`, and each request renders through the `Sink` that
its contract made.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from bridge.grpc.status import Code
from bridge.refusal import Refusal
from bridge.wire.codec import Codec, Finish, GenerateCall

log = logging.getLogger(__name__)

ENDED_KEPT = 4096
"""Wire ids remembered after their end: one or two steps may still come for an aborted request (vLLM 0.32)."""

STRANGER_ABORTS_PER_SECOND = 16
"""Aborts sent for outputs whose wire id this table never had or has forgotten."""


class Writable(Protocol):
    """The call that a request answers on."""

    @property
    def blocked(self) -> bool:
        """True while chunks must wait: the table keeps the tokens until `RequestTable.resume`."""
        ...


class Sink(Protocol):
    """Where one request's results go: a contract's renderer over one call."""

    def chunk(self, sequence: Sequence, tokens: list[int]) -> None:
        """Render new tokens of a sequence. `sequence.sent` already counts them."""
        ...

    def complete(self, sequence: Sequence) -> None:
        """Render the terminal of one sequence."""
        ...

    def close(self) -> None:
        """Every sequence has its terminal: end the call with OK."""
        ...

    def fail(self, code: Code, message: str) -> None:
        """End the call with an error; no terminal was rendered for the open sequences."""
        ...


class Sequence:
    """One engine request: its output so far and how it ended."""

    __slots__ = (
        "cached_tokens",
        "finish",
        "index",
        "output_ids",
        "rank",
        "request",
        "sent",
        "started",
        "stop_id",
        "wire_id",
    )

    def __init__(self, request: Request, wire_id: str, index: int, rank: bytes) -> None:
        self.request = request
        self.wire_id = wire_id
        self.index = index
        self.rank = rank
        self.output_ids: list[int] = []
        self.sent = 0
        self.started = False
        self.cached_tokens = 0
        self.finish: Finish | None = None
        self.stop_id: int | None = None
        """The stop token id of the *request* that ended this sequence; None for EOS and every other end."""


class Request:
    """One client request and the sequences that still run for it."""

    __slots__ = ("arrived", "client_id", "open", "out", "prompt_tokens", "sequences", "sink", "stop_ids", "stream")

    def __init__(
        self,
        client_id: str,
        prompt_tokens: int,
        out: Writable,
        sink: Sink,
        *,
        stream: bool,
        stop_ids: Iterable[int],
        arrived: float,
    ) -> None:
        self.client_id = client_id
        self.prompt_tokens = prompt_tokens
        self.out = out
        self.sink = sink
        self.stream = stream
        self.stop_ids = frozenset(stop_ids)
        self.arrived = arrived
        self.sequences: list[Sequence] = []
        self.open = 0


class RequestTable:
    """Live requests of one front end on one engine.

    `send(rank, frames)` queues frames to a rank and raises `LinkError` when it cannot. `prefix` starts every wire id and
    must never have been used on this engine: a live duplicate id kills vLLM.
    """

    def __init__(
        self,
        codec: Codec,
        send: Callable[[bytes, list[bytes]], None],
        prefix: str,
        *,
        max_in_flight: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._codec = codec
        self._send = send
        self._prefix = prefix
        self._max_in_flight = max_in_flight
        self._clock = clock
        self._counter = 0
        self._live: dict[str, Sequence] = {}
        self._by_client: dict[str, Request] = {}
        self._requests: set[Request] = set()
        self._ended: dict[str, None] = {}
        self._strangers_window = 0.0
        self._strangers_aborted = 0
        self.strangers = 0
        """Outputs for wire ids that were never live here."""
        self._tokens_ended = 0
        self.per_rank: dict[bytes, int] = {}
        """Live sequences by rank."""
        self.waiting_prompt_tokens: dict[bytes, int] = {}
        """Prompt tokens by rank of sequences that have no output yet."""
        self.on_idle: Callable[[], None] | None = None

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def tokens_out(self) -> int:
        """Output tokens received since the start; O(live requests), so that steps pay nothing for it."""
        return self._tokens_ended + sum(len(sequence.output_ids) for sequence in self._live.values())

    # -- admission ---------------------------------------------------------------------------------------------------

    def admit(self, request: Request, rank: bytes, call: GenerateCall) -> None:
        """Give `call` a wire id, send it to `rank` and make `request` live.

        Raises `Refusal`: ALREADY_EXISTS for a live duplicate client id, RESOURCE_EXHAUSTED over the in-flight limit.
        """
        if request.client_id and request.client_id in self._by_client:
            raise Refusal(
                Code.ALREADY_EXISTS, f"request_id {request.client_id!r} is in flight; use another id or abort it first"
            )
        if len(self._requests) >= self._max_in_flight:
            raise Refusal(
                Code.RESOURCE_EXHAUSTED,
                f"{len(self._requests)} requests are in flight and the limit is {self._max_in_flight}; "
                "retry later or raise --max-in-flight",
            )
        self._counter += 1
        call.wire_id = f"{self._prefix}.{self._counter:x}"
        self._send(rank, self._codec.add(call))
        sequence = Sequence(request, call.wire_id, 0, rank)
        request.sequences.append(sequence)
        request.open += 1
        self._live[call.wire_id] = sequence
        self._requests.add(request)
        if request.client_id:
            self._by_client[request.client_id] = request
        self.per_rank[rank] = self.per_rank.get(rank, 0) + 1
        self.waiting_prompt_tokens[rank] = self.waiting_prompt_tokens.get(rank, 0) + request.prompt_tokens

    # -- steps -------------------------------------------------------------------------------------------------------

    def deliver(self, steps: list[Any]) -> None:
        """Hand every delta of the waiting steps to its request and render.

        With several steps waiting, a sequence's tokens are merged into one chunk.
        """
        if len(steps) == 1:
            self._deliver_one(steps[0].outputs)
            return
        touched: dict[Sequence, None] = {}
        live = self._live.get
        for step in steps:
            for delta in step.outputs:
                sequence = live(delta.request_id)
                if sequence is None:
                    self._stranger(delta.request_id, step.engine_index)
                    continue
                sequence.output_ids += delta.new_token_ids
                if not sequence.started:
                    self._first(sequence, delta)
                touched[sequence] = None
                if delta.finish_reason is not None:
                    del touched[sequence]
                    self._last(sequence, delta)
        for sequence in touched:
            request = sequence.request
            if request.stream and not request.out.blocked:
                self._render(sequence)

    def _deliver_one(self, outputs: Iterable[Any]) -> None:
        live = self._live.get
        for delta in outputs:
            sequence = live(delta.request_id)
            if sequence is None:
                self._stranger(delta.request_id, 0)
                continue
            ids = sequence.output_ids
            ids += delta.new_token_ids
            if not sequence.started:
                self._first(sequence, delta)
            if delta.finish_reason is not None:
                self._last(sequence, delta)
                continue
            request = sequence.request
            if request.stream:
                sent = sequence.sent
                count = len(ids)
                if count > sent and not request.out.blocked:
                    sequence.sent = count
                    request.sink.chunk(sequence, ids[sent:])

    def resume(self, request: Request) -> None:
        """Render what waited while the request's sink was blocked."""
        for sequence in request.sequences:
            if sequence.finish is None and not request.out.blocked:
                self._render(sequence)

    def _render(self, sequence: Sequence) -> None:
        sent, count = sequence.sent, len(sequence.output_ids)
        if count > sent:
            sequence.sent = count
            sequence.request.sink.chunk(sequence, sequence.output_ids[sent:])

    def _first(self, sequence: Sequence, delta: Any) -> None:
        sequence.started = True
        self.waiting_prompt_tokens[sequence.rank] -= sequence.request.prompt_tokens
        cached = self._codec.cached_tokens(delta)
        if cached is not None:
            sequence.cached_tokens = cached

    def _last(self, sequence: Sequence, delta: Any) -> None:
        finish, stop_id, error = self._codec.finish(delta)
        request = sequence.request
        if finish is Finish.ERROR:
            sequence.finish = finish
            self._forget(sequence)
            self._fail(request, Code.INTERNAL, error or "the engine ended the request with an error")
            return
        if stop_id is not None and stop_id in request.stop_ids:
            sequence.stop_id = stop_id
        self._end(sequence, finish)

    # -- ends --------------------------------------------------------------------------------------------------------

    def _end(self, sequence: Sequence, finish: Finish) -> None:
        request = sequence.request
        sequence.finish = finish
        self._forget(sequence)
        if request.stream:
            self._render(sequence)
        request.sink.complete(sequence)
        if request.open == 0:
            self._release(request)
            request.sink.close()

    def _fail(self, request: Request, code: Code, message: str) -> None:
        """End a request with an error: its other sequences are aborted in the engine."""
        self._abort_in_engine(request)
        self._release(request)
        request.sink.fail(code, message)

    def cancel(self, request: Request) -> None:
        """The client is gone or its deadline passed: abort in the engine, render nothing."""
        if request in self._requests:
            self._abort_in_engine(request)
            self._release(request)

    def abort(self, client_id: str) -> bool:
        """Abort a live request by its client id; every open sequence gets the terminal `abort`. False: no such id."""
        request = self._by_client.get(client_id)
        if request is None:
            return False
        open_sequences = [sequence for sequence in request.sequences if sequence.finish is None]
        self._send_aborts(open_sequences)
        for sequence in open_sequences:
            self._end(sequence, Finish.ABORT)
        return True

    def abort_all(self) -> int:
        """Give every live request its `abort` terminal (the drain's cap passed); returns how many there were."""
        count = 0
        for request in list(self._requests):
            open_sequences = [sequence for sequence in request.sequences if sequence.finish is None]
            self._send_aborts(open_sequences)
            for sequence in open_sequences:
                self._end(sequence, Finish.ABORT)
            count += 1
        return count

    def fail_all(self, code: Code, message: str) -> None:
        """The engine is gone: every live request ends with an error and nothing is sent."""
        for request in list(self._requests):
            for sequence in request.sequences:
                if sequence.finish is None:
                    self._forget(sequence)
            self._release(request)
            request.sink.fail(code, message)

    def fail_running(self, code: Code, message: str) -> None:
        """Any live request may have lost tokens: each ends with an error and is aborted in the engine."""
        for request in list(self._requests):
            self._fail(request, code, message)

    def _abort_in_engine(self, request: Request) -> None:
        open_sequences = [sequence for sequence in request.sequences if sequence.finish is None]
        self._send_aborts(open_sequences)
        for sequence in open_sequences:
            if sequence.wire_id in self._live:
                self._forget(sequence)

    def _send_aborts(self, sequences: list[Sequence]) -> None:
        by_rank: dict[bytes, list[str]] = {}
        for sequence in sequences:
            if sequence.wire_id in self._live:
                by_rank.setdefault(sequence.rank, []).append(sequence.wire_id)
        for rank, wire_ids in by_rank.items():
            self._send(rank, self._codec.abort(wire_ids))

    def _forget(self, sequence: Sequence) -> None:
        del self._live[sequence.wire_id]
        ended = self._ended
        ended[sequence.wire_id] = None
        if len(ended) > ENDED_KEPT:
            del ended[next(iter(ended))]
        request = sequence.request
        request.open -= 1
        self.per_rank[sequence.rank] -= 1
        self._tokens_ended += len(sequence.output_ids)
        if not sequence.started:
            self.waiting_prompt_tokens[sequence.rank] -= request.prompt_tokens

    def _release(self, request: Request) -> None:
        self._requests.discard(request)
        if request.client_id:
            self._by_client.pop(request.client_id, None)
        if not self._requests and self.on_idle is not None:
            self.on_idle()

    def _stranger(self, wire_id: str, engine_index: int) -> None:
        """An output for a wire id that is not live: late tokens of an ended one, or an orphan, which is aborted."""
        if wire_id in self._ended:
            return
        self.strangers += 1
        now = self._clock()
        if now - self._strangers_window >= 1.0:
            self._strangers_window, self._strangers_aborted = now, 0
        if self._strangers_aborted >= STRANGER_ABORTS_PER_SECOND:
            return
        self._strangers_aborted += 1
        log.warning("the engine sent output for the unknown wire id %s; aborting it", wire_id)
        frames = self._codec.abort([wire_id])
        for rank in self.per_rank:
            self._send(rank, frames)
