"""The scheduler's output structs → slim messages: one positional tagged array each, columns in the order of SMG 1.13.

Columns that nobody in the batch asked for are nil, and left off at the end; new columns go at the end only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

BATCH = "BatchTokenIDSlimOutput"
EMBEDDINGS = "BatchEmbeddingSlimOutput"
REPLY = "ControlReplySlim"

FIRST_OPTIONAL = 16
"""Elements of a token batch, its tag counted, that are always there."""


class Tail(NamedTuple):
    """What ends the fixed part of every batch: who made it and how loaded it is. KV figures are in tokens."""

    engine_index: int = 0
    running: int = 0
    waiting: int = 0
    kv_used: int = 0
    kv_total: int = 0


def _plain(value: Any) -> Any:
    """Arrays, tensors and numpy scalars as what msgpack knows."""
    convert = getattr(value, "tolist", None)
    if convert is None:
        raise TypeError(f"a {type(value).__name__} cannot be sent to the front end")
    return convert()


encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder(enc_hook=_plain).encode


def token_batch(
    output: Any, rids: list[str], rows: Sequence[int] | None, tail: Tail, hidden: list[Any] | None
) -> bytes:
    """A BatchTokenIDOutput for the requests `rids`, which are its `rows` (None: all of them, in order).

    `hidden` are the new rows of hidden states a request, None when no request has any.
    """

    def column(values: Any, default: Any) -> Any:
        if not values:
            return [default] * len(rids)
        return values if rows is None else [values[row] for row in rows]

    finished = column(output.finished_reasons, None)
    message: list[Any] = [BATCH, rids, column(output.output_ids, ())]
    if any(finished):
        reasons, messages, statuses = finish_columns(finished)
        matched = [_matched(one) for one in finished]
        kinds = [one.get("err_type") if one else None for one in finished]
        ends: tuple[Any, Any] = (statuses, kinds if any(kinds) else None)
    else:
        reasons, messages, matched = [""] * len(rids), [None] * len(rids), [None] * len(rids)
        ends = (None, None)
    message += (reasons, messages, matched)
    message += (column(output.prompt_tokens, 0), column(output.completion_tokens, 0), column(output.cached_tokens, 0))
    message += (_flat(column, output.output_token_logprobs_val), _flat(column, output.output_token_logprobs_idx))
    message += tail
    reasoning = column(output.reasoning_tokens, 0)
    message += (
        ends[0],
        _nested(column, output.output_top_logprobs_val),
        _nested(column, output.output_top_logprobs_idx),
        reasoning if any(reasoning) else None,
        _optional(column, output.input_token_logprobs_val),
        _optional(column, output.input_token_logprobs_idx),
        _nested(column, output.input_top_logprobs_val),
        _nested(column, output.input_top_logprobs_idx),
        _nested(column, output.output_token_ids_logprobs_val),
        _nested(column, output.output_token_ids_logprobs_idx),
        ends[1],
        hidden,
    )
    while len(message) > FIRST_OPTIONAL and message[-1] is None:
        message.pop()
    return encode(message)


def _flat(column: Any, values: Any) -> Any:
    """[[value]], an empty row where a request did not ask."""
    return [() if row is None else row for row in column(values, ())]


def _optional(column: Any, values: Any) -> Any:
    """As `_flat`, nil when every row is empty."""
    if not values:
        return None
    rows = _flat(column, values)
    return rows if any(len(row) for row in rows) else None


def _nested(column: Any, values: Any) -> Any:
    """[[[value]]]: a position without candidates (the first of a prompt) is an empty row. Nil when all rows are empty."""
    rows = _optional(column, values)
    if rows is None:
        return None
    return [[() if one is None else one for one in row] for row in rows]


def finish_columns(finished: Sequence[Any]) -> tuple[list[str], list[str | None], list[int | None] | None]:
    """(reasons, messages, HTTP statuses) of finish maps; statuses are nil when no finish has one."""
    reasons = [one["type"] if one else "" for one in finished]
    messages = [one.get("message") if one else None for one in finished]
    statuses = [_status(one.get("status_code")) if one else None for one in finished]
    return reasons, messages, statuses if any(statuses) else None


def _status(value: Any) -> int | None:
    return int(value) if isinstance(value, int) else None


def _matched(finish: Any) -> int | str | None:
    """The stop token or string that ended a request; a stop of several tokens has no single one to name."""
    value = finish.get("matched") if finish else None
    return value if isinstance(value, int | str) else None


def terminal(rid: str, message: str, status: int | None, kind: str | None, tail: Tail) -> bytes:
    """The end of one request that the scheduler's output stream does not tell: a token batch with one abort."""
    batch: list[Any] = [BATCH, [rid], [()], ["abort"], [message], [None], [0], [0], [0], [()], [()], *tail, [status]]
    if kind is not None:
        batch += [None] * 9
        batch += [[kind]]
    return encode(batch)


def load_only(tail: Tail) -> bytes:
    """A token batch of nobody's, for the load figures."""
    return encode([BATCH, *[()] * 10, *tail])


def embedding_batch(output: Any, rids: list[str], rows: Sequence[int] | None, tail: Tail) -> bytes:
    """A BatchEmbeddingOutput for the requests `rids`, which are its `rows`. A vector is a list of floats."""

    def column(values: Any, default: Any) -> Any:
        if not values:
            return [default] * len(rids)
        return list(values) if rows is None else [values[row] for row in rows]

    reasons, messages, statuses = finish_columns(column(output.finished_reasons, None))
    found = statuses or [None] * len(rids)
    vectors: list[Any] = []
    for index, value in enumerate(column(output.embeddings, None)):
        vector = _vector(value)
        if vector is None:
            reasons[index], found[index] = "abort", 501
            messages[index] = "this model's embeddings are not one dense vector, which is what this lane carries"
        vectors.append(vector or ())
    counts = (column(output.prompt_tokens, 0), column(output.cached_tokens, 0))
    return encode([EMBEDDINGS, rids, vectors, *counts, reasons, messages, found, *tail])


def _vector(value: Any) -> list[float] | None:
    """None for a sparse embedding (a map) or one vector a token."""
    if value is None:
        return []
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, int | float):
        return [float(value)]
    if isinstance(value, dict) or (value and not isinstance(value[0], int | float)):
        return None
    return [float(one) for one in value]


def reply(call_id: int, success: bool, message: str | None, engine_index: int) -> bytes:
    """The answer to a control call."""
    return encode([REPLY, call_id, bool(success), message or None, engine_index])
