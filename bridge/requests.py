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
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import chain
from typing import Any, NamedTuple, Protocol

from bridge.grpc.call import Call
from bridge.grpc.outflow import Flight, Outflow
from bridge.grpc.status import Code
from bridge.logprobs import Columns
from bridge.metrics import Meters
from bridge.refusal import Refusal
from bridge.stops import StopMatcher
from bridge.supervisor.ledger import Ledger
from bridge.template import Template
from bridge.varint import PADDED_BITS, padded
from bridge.wire.codec import Codec, EmbedCall, Finish, GenerateCall
from bridge.wire.errors import WireError
from bridge.wire.link import LinkError

log = logging.getLogger(__name__)

EngineCall = GenerateCall | EmbedCall

ENDED_KEPT = 4096
"""Wire ids remembered after their end: one or two steps may still come for an aborted request (vLLM 0.32)."""

STRANGER_ABORTS_PER_SECOND = 16
"""Aborts sent for outputs whose wire id this table never had or has forgotten."""

CANCELLED = "cancelled"
"""How a sequence ended whose client went away: nothing was rendered for it."""

FEW = 8
"""Deltas of a step from which on columns are cheaper than a loop."""

ABORT_HOLD_S = 30.0
"""Longest that an abort waits for the first token of a request whose KV cache is being transferred to the engine."""


FAILURES: Mapping[Finish, Code] = {
    Finish.ERROR: Code.INTERNAL,
    Finish.REFUSED: Code.INVALID_ARGUMENT,
    Finish.OVERLOADED: Code.UNAVAILABLE,
}
"""Ends that are errors → what the client is told."""


class Sink(Protocol):
    """Where one request's results go: a contract's renderer over one call.

    `template` makes the chunks of one token that follow the first chunk; None when only `chunk` can.
    """

    @property
    def template(self) -> Template | None: ...

    def chunk(self, sequence: Sequence, tokens: list[int]) -> None:
        """Render the last tokens of `sequence.output_ids`, one or more. `sequence.sent` already counts them."""
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


class Extras(Protocol):
    """Collects what one contract wants of one engine's deltas and the others do not know."""

    def take(self, delta: Any) -> None:
        """Take a delta of the sequence, in order; raises `WireError` for one that cannot be read."""
        ...


class Rich:
    """What a sequence carries beyond plain tokens: made only for requests that ask for it."""

    __slots__ = ("embeds", "extras", "logprobs", "prompt_logprobs", "stops", "vector")

    def __init__(self, *, embeds: bool = False) -> None:
        self.embeds = embeds
        self.extras: Extras | None = None
        self.stops: StopMatcher | None = None
        self.logprobs: Columns | None = None
        self.prompt_logprobs: Columns | None = None
        """Rows for the prompt's tokens but the first."""
        self.vector: list[float] | None = None
        """The result of an embedding."""

    @property
    def only_stops(self) -> bool:
        """Whether stop strings are all it is for, and nobody wants the text."""
        others = (self.extras, self.logprobs, self.prompt_logprobs)
        return not self.embeds and self.stops is not None and self.stops.pieces is None and others == (None,) * 3


class Sequence:
    """One engine request: its output so far and how it ended."""

    __slots__ = (
        "cached_tokens",
        "cell",
        "finish",
        "first_at",
        "held",
        "index",
        "out",
        "output_ids",
        "plain",
        "rank",
        "request",
        "rich",
        "sink",
        "spec_accepted",
        "spec_drafted",
        "started",
        "steady",
        "stop_id",
        "stop_string",
        "transfer_params",
        "wire_id",
    )

    def __init__(
        self, request: Request, wire_id: str, index: int, rank: bytes, rich: Rich | None, cell: int = 0
    ) -> None:
        self.cell = cell
        """Where the ledger has it, if there is one."""
        self.request = request
        self.wire_id = wire_id
        self.index = index
        self.rank = rank
        self.rich = rich
        self.out = request.out
        self.sink = request.sink
        self.output_ids: array[int] = array("I")
        self.held = 0
        """The last tokens of `output_ids` that no chunk was rendered for."""
        self.started = False
        self.plain = False
        """Started, and every delta is nothing but tokens."""
        self.steady = False
        """Streamed, and every delta is nothing but tokens, whose text may be searched."""
        self.cached_tokens = 0
        self.first_at = 0.0
        """When its first output came, by the meters' clock."""
        self.finish: Finish | None = None
        self.stop_id: int | None = None
        """The stop token id of the *request* that ended this sequence; None for EOS and every other end."""
        self.stop_string: str | None = None
        self.transfer_params: dict[str, Any] | None = None
        self.spec_accepted = 0
        self.spec_drafted = 0

    @property
    def sent(self) -> int:
        """Tokens that went into chunks."""
        return len(self.output_ids) - self.held


class Request:
    """One client request and the sequences that run for it.

    `receiving` says that a KV transfer fills its cache from another engine: until its first token, an abort would free
    blocks that are being written (it kills engines), so the table holds that abort back.
    """

    __slots__ = (
        "arrived",
        "began",
        "client_id",
        "keep_stop_text",
        "open",
        "out",
        "prompt_ids",
        "prompt_tokens",
        "receiving",
        "sequences",
        "sink",
        "stop_ids",
        "stream",
    )

    def __init__(
        self,
        client_id: str,
        prompt_ids: list[int],
        out: Call,
        sink: Sink,
        *,
        stream: bool,
        arrived: float,
        stop_ids: Iterable[int] = (),
        keep_stop_text: bool = False,
        keep_prompt: bool = False,
        receiving: bool = False,
    ) -> None:
        self.client_id = client_id
        self.prompt_tokens = len(prompt_ids)
        self.prompt_ids = prompt_ids if keep_prompt else []
        self.out = out
        self.sink = sink
        self.stream = stream
        self.stop_ids = frozenset(stop_ids)
        self.keep_stop_text = keep_stop_text
        self.receiving = receiving
        self.arrived = arrived
        self.began = 0.0
        """`arrived` by the meters' clock."""
        self.sequences: list[Sequence] = []
        self.open = 0


class Express(NamedTuple):
    """What turns a sequence's next token into a frame on its connection."""

    output_ids: array[int]
    lead: bytes
    """The frame's header and the template's lead."""
    link: bytes | None
    outflow: Outflow
    flight: Flight

    def takes(self, token: int) -> bool:
        """Whether `next` may be called."""
        return not token >> PADDED_BITS and self.outflow.has_room

    def next(self, token: int) -> tuple[Outflow, bytes]:
        """Where the token's chunk goes, and the chunk."""
        output_ids, lead, link, outflow, _ = self
        output_ids.append(token)
        id_, count = padded((token, len(output_ids)))
        return outflow, chunk(lead, id_, link, count)


Watched = tuple[Sequence, StopMatcher, Express]


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
        call_later: Callable[[float, Callable[[], None]], Any],
        clock: Callable[[], float] = time.monotonic,
        meters: Meters | None = None,
        ledger: Ledger | None = None,
        counter: int = 0,
    ) -> None:
        """`ledger` outlives this process; `counter` is the last that was used with `prefix`."""
        self._codec = codec
        self._ledger = ledger
        self._meters = meters
        self._send = send
        self._prefix = prefix
        self._max_in_flight = max_in_flight
        self._call_later = call_later
        self._clock = clock
        self.counter = counter
        """Of the last wire id."""
        self._held_aborts: dict[str, Sequence] = {}
        self._live: dict[str, Sequence] = {}
        self._watched: dict[str, Watched] = {}
        """The sequences that would be in `_express` if their text were not searched for stop strings, by wire id."""
        self._express: dict[str, Express] = {}
        """The sequences whose plain deltas of one token need nothing else, by wire id."""
        self._on_full = self._full
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
        self._prefix_cache: dict[bytes, tuple[int, int]] = {}
        """By rank, of the prompts that were computed: tokens found in the prefix cache, and all."""
        self.on_idle: Callable[[], None] | None = None

    def __len__(self) -> int:
        return len(self._requests)

    def oldest(self) -> float | None:
        """When the live request that began first began, by the meters' clock; O(live requests)."""
        return min((request.began for request in self._requests), default=None)

    @property
    def tokens_out(self) -> int:
        """Output tokens received since the start; O(live requests), so that steps pay nothing for it."""
        return self._tokens_ended + self.tokens_live

    @property
    def tokens_live(self) -> int:
        """Output tokens of the live sequences."""
        return sum(len(sequence.output_ids) for sequence in self._live.values())

    def cache_hit_rate(self, rank: bytes) -> float:
        """The part in [0, 1] of this front end's prompt tokens that `rank` found in its prefix cache."""
        found, asked = self._prefix_cache.get(rank, (0, 0))
        return found / asked if asked else 0.0

    # -- admission ---------------------------------------------------------------------------------------------------

    def admit(
        self,
        request: Request,
        rank: bytes,
        calls: list[EngineCall],
        rich: Callable[[], Rich] | None,
    ) -> None:
        """Give each of `calls` a wire id, send them to `rank` as the sequences of `request`, and make it live.

        `rich` makes what each sequence carries beyond tokens. Raises `Refusal`: ALREADY_EXISTS for a live duplicate
        client id, RESOURCE_EXHAUSTED over the in-flight limit.
        """
        if request.client_id and request.client_id in self._by_client:
            raise Refusal(
                Code.ALREADY_EXISTS, f"request_id {request.client_id!r} is in flight; use another id or abort it first"
            )
        if len(self._live) + len(calls) > self._max_in_flight:
            raise Refusal(
                Code.RESOURCE_EXHAUSTED,
                f"{len(self._live)} generations are in flight and the limit is {self._max_in_flight}; "
                "retry later or raise --max-in-flight",
            )
        if self._meters is not None:
            self._meters.admitted(request)
        self._requests.add(request)
        if request.client_id:
            self._by_client[request.client_id] = request
        try:
            for index, call in enumerate(calls):
                self.counter += 1
                call.wire_id = f"{self._prefix}.{self.counter:x}"
                frames = self._codec.add_embed(call) if isinstance(call, EmbedCall) else self._codec.add(call)
                carried = rich() if rich is not None else None
                cell = self._ledger.enter(self.counter, held=request.receiving) if self._ledger is not None else 0
                try:
                    self._send(rank, frames)
                except BaseException:
                    if self._ledger is not None:
                        self._ledger.leave(cell)
                    raise
                self._start(Sequence(request, call.wire_id, index, rank, carried, cell))
        except BaseException:
            self.cancel(request)
            raise
        if log.isEnabledFor(logging.DEBUG):
            names = " ".join(call.wire_id for call in calls)
            fields = {"request_id": request.client_id, "method": request.out.method}
            log.debug(
                "request %r: prompt of %d tokens sent as %s",
                *(request.client_id, request.prompt_tokens, names),
                extra={"fields": fields},
            )

    def _start(self, sequence: Sequence) -> None:
        request, rank = sequence.request, sequence.rank
        request.sequences.append(sequence)
        request.open += 1
        self._live[sequence.wire_id] = sequence
        self.per_rank[rank] = self.per_rank.get(rank, 0) + 1
        self.waiting_prompt_tokens[rank] = self.waiting_prompt_tokens.get(rank, 0) + request.prompt_tokens

    # -- steps -------------------------------------------------------------------------------------------------------

    def deliver(self, steps: list[Any]) -> None:
        """Hand every delta of the waiting steps to its request and render.

        With several steps waiting, a sequence's tokens are merged into one chunk.
        """
        if len(steps) == 1:
            self._deliver_one(steps[0])
            return
        touched: list[Sequence] = []
        live, boarded = self._live.get, bool(self._express or self._watched)
        for step in steps:
            for delta in step.outputs:
                sequence = live(delta.request_id)
                if sequence is None:
                    self._stranger(delta)
                    continue
                if not sequence.held:
                    touched.append(sequence)
                    if boarded:
                        self._land(sequence)
                if sequence.plain:
                    tokens = delta.new_token_ids
                    sequence.output_ids.extend(tokens)
                    sequence.held += len(tokens)
                elif self._take(sequence, step, delta):
                    continue
                if delta.finish_reason is not None:
                    self._last(sequence, delta)
        for sequence in touched:
            self._flow(sequence)

    def _deliver_one(self, step: Any) -> None:
        rest = self._deliver_express(step.outputs)
        if self._watched:
            rest = self._deliver_watched(rest)
        live = self._live.get
        for delta in rest:
            sequence = live(delta.request_id)
            if sequence is None:
                self._stranger(delta)
                continue
            self._land(sequence)
            tokens = delta.new_token_ids
            if sequence.plain:
                sequence.output_ids.extend(tokens)
                sequence.held += len(tokens)
            elif self._take(sequence, step, delta):
                continue
            if delta.finish_reason is not None:
                self._last(sequence, delta)
            else:
                self._flow(sequence)
                if sequence.steady:
                    self._board(sequence)

    def _deliver_express(self, outputs: Collection[Any]) -> Iterable[Any]:
        """Send every delta that is one token of a sequence in `_express`; returns the others.

        Columns instead of a loop over objects, because a step's cost is what it fetches into the cache; with few streams
        it is what it sets up.
        """
        if len(outputs) < FEW:
            return self._deliver_few(outputs)
        found = list(map(self._express.get, [delta.request_id for delta in outputs]))
        pairs = [
            (express, delta.new_token_ids[0])
            for express, delta in zip(found, outputs, strict=True)
            if express is not None and delta.finish_reason is None and len(delta.new_token_ids) == 1
        ]
        if not pairs:
            return outputs
        rows, tokens = zip(*pairs, strict=True)
        output_ids, leads, links, outflows, _ = zip(*rows, strict=True)
        if not all(outflow.has_room for outflow in set(outflows)):
            return self._deliver_few(outputs)
        try:
            ids = padded(tokens)
        except OverflowError:
            return self._deliver_few(outputs)
        deque(map(array.append, output_ids, tokens), maxlen=0)
        outflow, link = outflows[0], links[0]
        alike = outflows.count(outflow) == len(rows) == links.count(link)
        columns = [leads, ids] if alike and link is None else [leads, ids, links, padded(map(len, output_ids))]
        if alike:
            outflow.express(b"".join(chain.from_iterable(zip(*columns, strict=True))), len(rows))
        else:
            express_each(zip(outflows, map(chunk, *columns), strict=True))
        if len(pairs) == len(found):
            return ()
        return [
            delta
            for express, delta in zip(found, outputs, strict=True)
            if express is None or delta.finish_reason is not None or len(delta.new_token_ids) != 1
        ]

    def _deliver_few(self, outputs: Collection[Any]) -> list[Any]:
        """As `_deliver_express`, one delta after the other."""
        rest: list[Any] = []
        sent: list[tuple[Outflow, bytes]] = []
        find = self._express.get
        for delta in outputs:
            express = find(delta.request_id)
            tokens = delta.new_token_ids
            if express is None or delta.finish_reason is not None or len(tokens) != 1 or not express.takes(tokens[0]):
                rest.append(delta)
            elif len(outputs) == 1:
                outflow, only = express.next(tokens[0])
                outflow.express(only, 1)
            else:
                sent.append(express.next(tokens[0]))
        if sent:
            express_each(sent)
        return rest

    def _deliver_watched(self, outputs: Iterable[Any]) -> list[Any]:
        """Send every delta that is one token of a sequence in `_watched`, or end that there; returns the others.

        The ends come last: `takes` does not know of them.
        """
        rest: list[Any] = []
        sent: list[tuple[Outflow, bytes]] = []
        stopped: list[tuple[Sequence, str, Any]] = []
        for delta in outputs:
            watched = self._watched.get(delta.request_id)
            tokens = delta.new_token_ids
            if watched is None or delta.finish_reason is not None or len(tokens) != 1:
                rest.append(delta)
                continue
            sequence, stops, express = watched
            if not express.takes(tokens[0]):
                rest.append(delta)
                continue
            found = stops.feed(tokens)
            if found is None:
                sent.append(express.next(tokens[0]))
                continue
            self._land(sequence)
            sequence.output_ids.append(tokens[0])
            sequence.held += 1
            stopped.append((sequence, found[1], delta))
        express_each(sent)
        for sequence, matched, delta in stopped:
            self._stopped(sequence, matched, delta)
        return rest

    def _board(self, sequence: Sequence) -> None:
        """From now on the sequence's tokens need nothing but its template."""
        template = sequence.sink.template
        if template is None or sequence.held:
            return
        outflow = sequence.out.outflow
        flight = Flight(sequence.wire_id, sequence.out, template.size, sequence.output_ids, self._on_full)
        header = outflow.board(flight)
        if header is None:
            return
        express = Express(sequence.output_ids, header + template.lead, template.link, outflow, flight)
        stops = sequence.rich.stops if sequence.rich is not None else None
        if stops is None:
            self._express[sequence.wire_id] = express
        else:
            self._watched[sequence.wire_id] = (sequence, stops, express)

    def _land(self, sequence: Sequence) -> None:
        """End `_board`, before anything else is done with the sequence."""
        wire_id = sequence.wire_id
        express = self._express.pop(wire_id, None)
        if express is None and self._watched:
            watched = self._watched.pop(wire_id, None)
            express = watched[2] if watched is not None else None
        if express is not None:
            express.outflow.land(express.flight)

    def _full(self, flight: Flight) -> None:
        """The flight has landed."""
        self._express.pop(flight.name, None)
        self._watched.pop(flight.name, None)

    def hold(self, request: Request) -> None:
        """The request's sink is blocked: its tokens are held from now on."""
        for sequence in request.sequences:
            self._land(sequence)

    def resume(self, request: Request) -> None:
        """Render what was held while the request's sink was blocked."""
        for sequence in request.sequences:
            self._flow(sequence)

    def _flow(self, sequence: Sequence) -> None:
        """Render what is held, unless the sequence ended, is not streamed, or its call is blocked."""
        if sequence.held and sequence.finish is None and sequence.request.stream and not sequence.out.blocked:
            self._render(sequence)

    def _render(self, sequence: Sequence) -> None:
        held = sequence.held
        if held:
            sequence.held = 0
            sequence.sink.chunk(sequence, sequence.output_ids[-held:].tolist())

    def _take(self, sequence: Sequence, step: Any, delta: Any) -> bool:
        """The first delta of a sequence, and every delta of a rich one; True when that ended it."""
        if not sequence.started:
            self._first(sequence, delta)
        rich = sequence.rich
        if rich is None:
            sequence.plain = True
            sequence.steady = sequence.request.stream
            sequence.output_ids.extend(delta.new_token_ids)
            sequence.held += len(delta.new_token_ids)
            return False
        try:
            matched = self._enrich(sequence, rich, step, delta)
        except WireError as error:
            self._fail(sequence.request, Code.INTERNAL, f"an engine message could not be read: {error}")
            return True
        if matched is None:
            sequence.steady = sequence.request.stream and rich.only_stops
            return False
        self._stopped(sequence, matched, delta)
        return True

    def _stopped(self, sequence: Sequence, matched: str, delta: Any) -> None:
        """A stop string is complete."""
        sequence.stop_string = matched
        if delta.finish_reason is None:
            self._send_aborts([sequence])
        self._end(sequence, Finish.STOP)

    def _enrich(self, sequence: Sequence, rich: Rich, step: Any, delta: Any) -> str | None:
        """Add a delta's tokens and what came with them; the stop string that they complete."""
        codec = self._codec
        tokens = delta.new_token_ids
        kept, matched = len(tokens), None
        if rich.stops is not None and tokens:
            text = tokens
            if delta.finish_reason is not None and not sequence.request.keep_stop_text:
                # The token that made the engine stop is no text, as in vLLM's own output.
                text = tokens[:-1] if codec.finish(delta)[0] is Finish.STOP else tokens
            found = rich.stops.feed(text)
            if found is not None:
                kept, matched = found
        sequence.output_ids.extend(tokens[:kept])
        sequence.held += kept
        if rich.logprobs is not None:
            rows = codec.logprobs(step, delta)
            if rows is not None:
                rich.logprobs.extend(rows, kept)
            elif kept:
                raise WireError(f"{kept} tokens came without the log-probabilities that the request asked for")
        if rich.prompt_logprobs is not None:
            rows = codec.prompt_logprobs(step, delta)
            if rows is not None:
                rich.prompt_logprobs.extend(rows, len(rows.ranks))
        if rich.extras is not None:
            rich.extras.take(delta)
        if rich.embeds:
            pooled = codec.pooled(step, delta)
            rich.vector = None if pooled is None else pooled.values()
        return matched

    def _first(self, sequence: Sequence, delta: Any) -> None:
        sequence.started = True
        self.waiting_prompt_tokens[sequence.rank] -= sequence.request.prompt_tokens
        cached = self._codec.cached_tokens(delta)
        if cached is not None:
            sequence.cached_tokens = cached
        found, asked = self._prefix_cache.get(sequence.rank, (0, 0))
        self._prefix_cache[sequence.rank] = found + sequence.cached_tokens, asked + sequence.request.prompt_tokens
        if self._meters is not None:
            self._meters.first(sequence)

    def _last(self, sequence: Sequence, delta: Any) -> None:
        finish, matched, error = self._codec.finish(delta)
        request = sequence.request
        code = FAILURES.get(finish)
        if code is not None:
            sequence.finish = Finish.ERROR
            self._forget(sequence, Finish.ERROR.value)
            self._fail(request, code, error or "the engine ended the request with an error")
            return
        if isinstance(matched, str):
            sequence.stop_string = matched
        elif matched in request.stop_ids:
            sequence.stop_id = matched
        sequence.transfer_params = self._codec.transfer_params(delta)
        sequence.spec_accepted, sequence.spec_drafted = self._codec.spec_counts(delta)
        self._end(sequence, finish)

    # -- ends --------------------------------------------------------------------------------------------------------

    def _end(self, sequence: Sequence, finish: Finish) -> None:
        request = sequence.request
        sequence.finish = finish
        self._forget(sequence, finish.value)
        if request.stream:
            self._render(sequence)
        request.sink.complete(sequence)
        if request.open == 0:
            self._release(request)
            request.sink.close()

    def _fail(self, request: Request, code: Code, message: str) -> None:
        """End a request with an error: its other sequences are aborted in the engine."""
        self._abort_in_engine(request, Finish.ERROR.value)
        self._release(request)
        request.sink.fail(code, message)

    def cancel(self, request: Request) -> None:
        """The client is gone or its deadline passed: abort in the engine, render nothing."""
        if request in self._requests:
            self._abort_in_engine(request, CANCELLED)
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
        for held in list(self._held_aborts):
            self._leave(self._held_aborts.pop(held))
        for request in list(self._requests):
            for sequence in request.sequences:
                if sequence.finish is None:
                    self._forget(sequence, Finish.ERROR.value)
            self._release(request)
            request.sink.fail(code, message)

    def fail_running(self, code: Code, message: str) -> None:
        """Any live request may have lost tokens: each ends with an error and is aborted in the engine."""
        for request in list(self._requests):
            self._fail(request, code, message)

    def _abort_in_engine(self, request: Request, end: str) -> None:
        open_sequences = [sequence for sequence in request.sequences if sequence.finish is None]
        self._send_aborts(open_sequences)
        for sequence in open_sequences:
            if sequence.wire_id in self._live:
                self._forget(sequence, end)

    def _send_aborts(self, sequences: list[Sequence]) -> None:
        by_rank: dict[bytes, list[str]] = {}
        for sequence in sequences:
            if sequence.wire_id not in self._live:
                continue
            if sequence.request.receiving and not sequence.started:
                self._hold_abort(sequence)
            else:
                by_rank.setdefault(sequence.rank, []).append(sequence.wire_id)
        for rank, wire_ids in by_rank.items():
            self._send_abort(rank, wire_ids)

    def _send_abort(self, rank: bytes, wire_ids: list[str]) -> None:
        """Queue an abort; a rank that cannot be reached runs nothing of ours any more."""
        try:
            self._send(rank, self._codec.abort(wire_ids))
        except LinkError as error:
            log.warning("an abort of %d requests was not sent: %s", len(wire_ids), error)

    def _hold_abort(self, sequence: Sequence) -> None:
        """Keep an abort until the sequence's first output or `ABORT_HOLD_S`, whichever is first."""
        wire_id = sequence.wire_id
        self._held_aborts[wire_id] = sequence
        self._call_later(ABORT_HOLD_S, lambda: self._release_abort(wire_id))

    def _release_abort(self, wire_id: str) -> None:
        sequence = self._held_aborts.pop(wire_id, None)
        if sequence is not None:
            self._send_abort(sequence.rank, [wire_id])
            self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        if self._ledger is not None and sequence.wire_id not in self._held_aborts:
            self._ledger.leave(sequence.cell)

    def _forget(self, sequence: Sequence, end: str) -> None:
        """The sequence is live no more; `end` is how it ended, a `Finish` value or `CANCELLED`."""
        del self._live[sequence.wire_id]
        self._leave(sequence)
        self._land(sequence)
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
        if self._meters is not None:
            self._meters.ended(sequence, end)
        if log.isEnabledFor(logging.DEBUG):
            fields = {"request_id": request.client_id, "method": request.out.method, "finish": end}
            log.debug(
                "request %r: %s ended with %s, %d tokens",
                *(request.client_id, sequence.wire_id, end, len(sequence.output_ids)),
                extra={"fields": fields},
            )

    def _release(self, request: Request) -> None:
        self._requests.discard(request)
        # They know each other: what they hold would wait for the garbage collector, which comes rarely.
        request.sequences.clear()
        if request.client_id:
            self._by_client.pop(request.client_id, None)
        if not self._requests and self.on_idle is not None:
            self.on_idle()

    def _stranger(self, delta: Any) -> None:
        """An output for a wire id that is not live: late tokens of an ended one, or an orphan, which is aborted."""
        wire_id = delta.request_id
        if wire_id in self._held_aborts:
            if delta.finish_reason is None:
                self._release_abort(wire_id)
            else:
                self._leave(self._held_aborts.pop(wire_id))
            return
        if wire_id in self._ended:
            return
        self.strangers += 1
        if self._meters is not None:
            self._meters.strangers += 1
        now = self._clock()
        if now - self._strangers_window >= 1.0:
            self._strangers_window, self._strangers_aborted = now, 0
        if delta.finish_reason is not None or self._strangers_aborted >= STRANGER_ABORTS_PER_SECOND:
            return
        self._strangers_aborted += 1
        log.warning("the engine sent output for the unknown wire id %s; aborting it", wire_id)
        for rank in self.per_rank:
            self._send_abort(rank, [wire_id])


def chunk(lead: bytes, id_: bytes, link: bytes | None, count: bytes) -> bytes:
    """The frame of one chunk."""
    return lead + id_ if link is None else b"".join((lead, id_, link, count))


def express_each(chunks: Iterable[tuple[Outflow, bytes]]) -> None:
    """Send chunks of one step, several connections' in any order."""
    by_outflow: dict[Outflow, list[bytes]] = {}
    for outflow, chunk in chunks:
        by_outflow.setdefault(outflow, []).append(chunk)
    for outflow, parts in by_outflow.items():
        outflow.express(b"".join(parts), len(parts))
