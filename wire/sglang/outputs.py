"""What the scheduler sends back: one tagged positional array a message, a column for each figure.

The order is the lane's own, the same for every release, and grows at the end: a message may stop before the later
columns. A delta is a row number; what most requests leave empty is read from its columns when somebody asks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any

import msgspec

from bridge.wire.codec import Finish, Load, Logprobs, Reply, TokenId
from bridge.wire.errors import WireError
from bridge.wire.tensors import Tensor, packed_floats, tensor_of

RUNNING, STOP, LENGTH, ABORT = "", "stop", "length", "abort"
"""Values of `finished_reasons`."""

NAN = "NaN happened"
"""What the scheduler calls the stop string of a request whose sampled token is outside the vocabulary (0.5.18 to 0.5.23)."""

Rows = list[list[float]]
IdRows = list[list[TokenId]]
Raw = msgspec.Raw
NIL = Raw(b"\xc0")


class BatchTokenIDSlimOutput(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Tokens of one step. Every column has one entry a request; the figures are totals, ids and log-probabilities new.

    `finished_reasons` is empty while a request runs. A row of `output_top_logprobs_*` or `output_token_ids_logprobs_*`
    belongs to one output token, of `input_*` to one prompt token from `logprob_start_len` on, whose first has no value.
    What a plain step does not need is still msgpack: `Batch.cell` reads it.
    """

    rids: list[str]
    output_ids: list[list[TokenId]]
    finished_reasons: Raw
    finished_messages: Raw
    finished_matched: Raw
    prompt_tokens: Raw
    completion_tokens: Raw
    cached_tokens: Raw
    output_token_logprobs_val: Raw
    output_token_logprobs_idx: Raw
    engine_index: int = 0
    num_running: int = 0
    num_waiting: int = 0
    kv_used_tokens: int = 0
    kv_total_tokens: int = 0
    finished_status: Raw = NIL
    output_top_logprobs_val: Raw = NIL
    output_top_logprobs_idx: Raw = NIL
    reasoning_tokens: Raw = NIL
    input_token_logprobs_val: Raw = NIL
    input_token_logprobs_idx: Raw = NIL
    input_top_logprobs_val: Raw = NIL
    input_top_logprobs_idx: Raw = NIL
    output_token_ids_logprobs_val: Raw = NIL
    output_token_ids_logprobs_idx: Raw = NIL
    finished_err_types: Raw = NIL
    output_hidden_states: Raw = NIL


class BatchEmbeddingSlimOutput(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Embeddings of one step, each request's terminal."""

    rids: list[str]
    embeddings: Raw
    prompt_tokens: Raw
    cached_tokens: Raw
    finished_reasons: Raw
    finished_messages: Raw
    finished_status: Raw
    engine_index: int = 0
    num_running: int = 0
    num_waiting: int = 0
    kv_used_tokens: int = 0
    kv_total_tokens: int = 0


class ControlReplySlim(msgspec.Struct, tag=True, array_like=True, gc=False):
    """The scheduler's answer to a control call."""

    call_id: int
    success: bool
    message: str | None = None
    engine_index: int = 0


Message = BatchTokenIDSlimOutput | BatchEmbeddingSlimOutput | ControlReplySlim

_COLUMNS: Mapping[str, Any] = {
    "finished_reasons": list[str],
    "finished_messages": list[str | None],
    "finished_matched": list[int | str | None],
    "finished_status": list[int | None] | None,
    "finished_err_types": list[str | None] | None,
    "cached_tokens": list[int],
    "output_token_logprobs_val": Rows,
    "output_token_logprobs_idx": IdRows,
    "output_top_logprobs_val": list[Rows] | None,
    "output_top_logprobs_idx": list[IdRows] | None,
    "reasoning_tokens": list[int] | None,
    "input_token_logprobs_val": list[list[float | None]] | None,
    "input_token_logprobs_idx": IdRows | None,
    "input_top_logprobs_val": list[Rows] | None,
    "input_top_logprobs_idx": list[IdRows] | None,
    "output_token_ids_logprobs_val": list[Rows] | None,
    "output_token_ids_logprobs_idx": list[IdRows] | None,
    "output_hidden_states": list[Rows | None] | None,
    "embeddings": Rows,
}
"""Column → what it holds."""

_DECODE = {name: msgspec.msgpack.Decoder(kind).decode for name, kind in _COLUMNS.items()}


class Batch:
    """The columns of one step; each is decoded when the first of its cells is asked for. Raises `WireError`."""

    __slots__ = ("_decoded", "message")

    def __init__(self, message: Any) -> None:
        self.message = message
        self._decoded: dict[str, Any] = {}

    def column(self, name: str) -> Any:
        """A column, None when the message does not have it."""
        if name not in self._decoded:
            raw = getattr(self.message, name, None)
            try:
                self._decoded[name] = None if raw is None else _DECODE[name](raw)
            except (msgspec.MsgspecError, RecursionError) as error:
                raise WireError(f"the column {name} of a step cannot be read: {error}") from None
        return self._decoded[name]

    def cell(self, name: str, row: int) -> Any:
        """The entry of a request, None in a column that was left out."""
        column = self.column(name)
        if column is None:
            return None
        try:
            return column[row]
        except IndexError:
            raise WireError(f"the column {name} of a step ends before request {row}") from None


class SglangDelta(msgspec.Struct, gc=False):
    """Row `row` of a batch. `finish_reason` is the engine's word, None while the request runs."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: str | None
    row: int
    batch: Batch
    """The columns; they know nothing of their deltas, so that no cycle keeps them."""


class SglangStep(msgspec.Struct, gc=False):
    """One decoded message."""

    outputs: Sequence[SglangDelta]
    engine_index: int
    message: Any


_NO_TOKENS: list[int] = []


class OutputReader:
    """Decodes steps and reads what a delta holds. Raises `WireError`, and nothing else, for bytes that do not fit."""

    __slots__ = ("_decode",)

    def __init__(self) -> None:
        self._decode = msgspec.msgpack.Decoder(Message).decode

    def step(self, frames: Sequence[Any]) -> SglangStep:
        if not frames:
            raise WireError("an engine message has no frames")
        try:
            message = self._decode(frames[0])
        except (msgspec.MsgspecError, RecursionError) as error:
            raise WireError(f"a step does not fit the lane's columns: {error}") from None
        if isinstance(message, ControlReplySlim):
            return SglangStep((), message.engine_index, message)
        count, batch = len(message.rids), Batch(message)
        tokens: Iterable[list[int]] = repeat(_NO_TOKENS)
        if isinstance(message, BatchTokenIDSlimOutput):
            tokens = message.output_ids
            if len(message.output_ids) != count:
                raise WireError(f"{count} requests came with {len(message.output_ids)} rows of ids")
        reasons: Iterable[str | None] = repeat(None)
        if bytes(message.finished_reasons) != _all_run(count):
            told = batch.column("finished_reasons")
            if len(told) != count:
                raise WireError(f"{count} requests came with {len(told)} finish reasons")
            reasons = [reason or None for reason in told]
            if ABORT in told and isinstance(message, BatchTokenIDSlimOutput):
                tokens = _without_refused(message.output_ids, batch)
        outputs = list(map(SglangDelta, message.rids, tokens, reasons, range(count), repeat(batch)))
        return SglangStep(outputs, message.engine_index, message)

    def has_load(self, step: SglangStep) -> bool:
        """Replies to control calls carry none."""
        return not isinstance(step.message, ControlReplySlim)

    def load(self, step: SglangStep) -> Load | None:
        """The rank's load, at most 50 ms old; replies to control calls carry none."""
        message = step.message
        if isinstance(message, ControlReplySlim):
            return None
        total = message.kv_total_tokens
        return Load(
            rank=message.engine_index,
            running=message.num_running,
            waiting=message.num_waiting,
            kv_cache_usage=message.kv_used_tokens / total if total > 0 else 0.0,
        )

    def reply(self, step: SglangStep) -> Reply | None:
        """The answer to a control call; its value is the engine's text."""
        message = step.message
        if not isinstance(message, ControlReplySlim):
            return None
        failure = None if message.success else message.message or "the scheduler gives no reason"
        return Reply(message.call_id, failure, message.message)

    def finish(self, delta: SglangDelta) -> tuple[Finish, int | str | None, str | None]:
        """(reason, what was matched, error text) of a terminal delta.

        An abort with a status is an error: 400 to 499 the request's own fault, but 429; 503 and 429 the engine's for
        now. One with a cause but no status is an error of the engine's. A bare abort is what somebody asked for.
        """
        batch, row, reason = delta.batch, delta.row, delta.finish_reason
        if reason == STOP:
            matched = batch.cell("finished_matched", row)
            if matched == NAN:
                return Finish.ERROR, None, "the model's output was not a number"
            return Finish.STOP, matched, None
        if reason == LENGTH:
            return Finish.LENGTH, None, None
        text = batch.cell("finished_messages", row) or "the scheduler ended the request without a reason"
        if reason != ABORT:
            return Finish.ERROR, None, f"the engine ended the request with the unknown finish {reason!r}"
        status = batch.cell("finished_status", row)
        if status is None:
            cause = batch.cell("finished_err_types", row)
            return (Finish.ABORT, None, None) if cause is None else (Finish.ERROR, None, f"{cause}: {text}")
        if status in (429, 503):
            return Finish.OVERLOADED, None, text
        return Finish.REFUSED if 400 <= status < 500 else Finish.ERROR, None, text

    def cached_tokens(self, delta: SglangDelta) -> int | None:
        """Prompt tokens served from the prefix cache: the same figure on every delta."""
        cached: int | None = delta.batch.cell("cached_tokens", delta.row)
        return cached

    def logprobs(self, delta: SglangDelta) -> Logprobs | None:
        """One row for each new token; a request that only scores its prompt has no token, and its row is left out."""
        batch, row = delta.batch, delta.row
        values, ids = batch.cell("output_token_logprobs_val", row), batch.cell("output_token_logprobs_idx", row)
        count = len(delta.new_token_ids)
        if not values or not count:
            return None
        tops, top_ids = batch.cell("output_top_logprobs_val", row), batch.cell("output_top_logprobs_idx", row)
        if len(values) != count:
            raise WireError(f"{count} tokens came with {len(values)} log-probabilities")
        return _columns(values, ids, tops, top_ids)

    def prompt_logprobs(self, delta: SglangDelta) -> Logprobs | None:
        """One row for each prompt token behind the first one that was asked for."""
        batch, row = delta.batch, delta.row
        values, ids = batch.cell("input_token_logprobs_val", row), batch.cell("input_token_logprobs_idx", row)
        if not values or not ids or values[0] is not None:
            return None
        tops, top_ids = batch.cell("input_top_logprobs_val", row), batch.cell("input_top_logprobs_idx", row)
        return _columns(values[1:], ids[1:], tops and tops[1:], top_ids and top_ids[1:])

    def pooled(self, delta: SglangDelta) -> Tensor | None:
        """The vector of an embedding; None for a request that got none."""
        vector = delta.batch.cell("embeddings", delta.row)
        return tensor_of("float32", (len(vector),), vector) if vector else None


@functools.lru_cache(maxsize=1024)
def _all_run(count: int) -> bytes:
    """`finished_reasons` of a step in which nothing ends."""
    return msgspec.msgpack.encode([RUNNING] * count)


def _without_refused(tokens: list[list[int]], batch: Batch) -> list[list[int]]:
    """A refused request is run for one step on a placeholder: what it samples there is no output (0.5.18 to 0.5.23)."""
    if batch.column("finished_status") is None:
        return tokens
    return [ids if batch.cell("finished_status", row) is None else _NO_TOKENS for row, ids in enumerate(tokens)]


class Scores(msgspec.Struct, gc=False):
    """What a delta brings beyond tokens and their own log-probabilities; all of it new, but `reasoning_tokens`."""

    reasoning_tokens: int
    """Counted by the scheduler so far."""
    scored: list[tuple[list[float], list[int]]]
    """(log-probabilities, ids) of the ids that were asked for, at each output position."""
    hidden_states: Rows
    """The last layer's, one row a position: the prompt's first, then each output token's."""


def scores(delta: SglangDelta) -> Scores:
    """Reads them; raises `WireError` for columns that do not fit each other."""
    batch, row = delta.batch, delta.row
    values = batch.cell("output_token_ids_logprobs_val", row) or []
    ids = batch.cell("output_token_ids_logprobs_idx", row) or []
    if list(map(len, values)) != list(map(len, ids)):
        raise WireError("log-probabilities of chosen ids came without their ids")
    hidden = batch.cell("output_hidden_states", row) or []
    return Scores(batch.cell("reasoning_tokens", row) or 0, list(zip(values, ids, strict=True)), hidden)


def _columns(values: Any, ids: Any, tops: Any, top_ids: Any) -> Logprobs:
    """Rows of a token and its k most likely; the lane has no ranks, so they are 0."""
    count = len(values)
    if not tops:
        tops = top_ids = [()] * count
    k = len(tops[0]) if tops else 0
    if len(ids) != count or any(len(rows) != count for rows in (tops, top_ids)):
        raise WireError("log-probabilities came without their ids")
    if any(len(row) != k for rows in (tops, top_ids) for row in rows):
        raise WireError("the most likely tokens of one request are not the same number at each position")
    if None in values:
        raise WireError("a log-probability is missing")
    width = 1 + k
    flat_ids: list[int] = []
    flat: list[float] = []
    for value, token, top, top_id in zip(values, ids, tops, top_ids, strict=True):
        flat_ids.append(token)
        flat_ids += top_id
        flat.append(value)
        flat += top
    return Logprobs(width, flat_ids, packed_floats(flat), [0] * count)
