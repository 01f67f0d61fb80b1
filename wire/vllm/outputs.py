"""What vLLM's engine core sends back: EngineCoreOutputs, one message a step and client (vLLM 0.27 to 0.33).

The hot path decodes a step to structs whose fields are attributes; what most deltas leave nil is kept as it came and
read by a method of `OutputReader` when somebody asks: statistics, utility replies, logprobs, pooled tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import msgspec

from bridge.wire.codec import Finish, Logprobs
from bridge.wire.errors import WireError
from bridge.wire.layout import Field, Layouts, decoder_struct
from bridge.wire.tensors import RAW_VIEW, Tensor, read_tensor

OUTPUT = "EngineCoreOutput"
OUTPUTS = "EngineCoreOutputs"

OUTPUT_FIELDS = (
    Field("request_id", str),
    Field("new_token_ids", list[int]),
    Field("new_logprobs", Any, None),
    Field("new_prompt_logprobs_tensors", Any, None),
    Field("pooling_output", Any, None),
    Field("finish_reason", int | None, None),
    Field("stop_reason", int | str | None, None),
    Field("events", Any, None),
    Field("kv_transfer_params", Any, None),
    Field("prefill_stats", Any, None),
    Field("spec_decode_metrics", Any, None),
    Field("error", Any, None),
)

STOP, LENGTH, ABORT, ERROR, REPETITION = range(5)
"""FinishReason codes."""

_FINISH = {
    STOP: Finish.STOP,
    LENGTH: Finish.LENGTH,
    ABORT: Finish.ABORT,
    ERROR: Finish.ERROR,
    REPETITION: Finish.STOP,
}
"""Repetition is a stop that the request itself asked for, through `repetition_detection`."""

_LISTS = ("LogprobsLists", "sampled_token_ranks")
_TENSORS = ("LogprobsTensors", "selected_token_ranks")


class VllmStep(msgspec.Struct, gc=False):
    """One decoded message. `frames` are the message's own and stay alive as long as a lazily read tensor may need them.

    `scheduler_stats` and `utility_output` are still msgpack, nil included. `finished_requests` is filled only with
    internal data parallel balancing and in the replies of the engine's input thread.
    """

    outputs: Sequence[Any]
    engine_index: int
    scheduler_stats: msgspec.Raw | None
    utility_output: msgspec.Raw | None
    finished_requests: list[str] | None
    weight_version: str | None
    """Since 0.32; `default` until weights are updated in place."""
    frames: Sequence[Any]


class OutputReader:
    """Decodes steps and reads what a delta holds, for one layout. Tensors are views into the message's frames.

    Everything raises `WireError`, and nothing else, for bytes that do not fit. Pickles (ext types 1 and 2) do not fit.
    """

    __slots__ = ("_decode", "_logprobs")

    def __init__(self, layouts: Layouts) -> None:
        output = decoder_struct(layouts, OUTPUT, OUTPUT_FIELDS)
        outputs = decoder_struct(
            layouts,
            OUTPUTS,
            (
                Field("engine_index", int, 0),
                Field("outputs", list[output], ()),  # type: ignore[valid-type]
                Field("scheduler_stats", msgspec.Raw, None),
                Field("utility_output", msgspec.Raw, None),
                Field("finished_requests", list[str] | None, None),
                Field("weight_version", str | None, None),
            ),
        )
        self._decode = msgspec.msgpack.Decoder(outputs, ext_hook=raw_view).decode
        self._logprobs = {kind: _positions(layouts, *kind) for kind in (_LISTS, _TENSORS)}

    def step(self, frames: Sequence[Any]) -> VllmStep:
        if not frames:
            raise WireError("an engine message has no frames")
        message = cast(Any, decoded(self._decode, frames[0], "a step"))
        return VllmStep(
            message.outputs,
            message.engine_index,
            message.scheduler_stats,
            message.utility_output,
            message.finished_requests,
            message.weight_version,
            frames,
        )

    def finish(self, delta: Any) -> tuple[Finish, int | None, str | None]:
        """(reason, stop token id, error text) of a terminal delta.

        The id is what the engine calls the stop reason: nil for the primary EOS id, but the id itself for the model's
        other EOS ids, because they are sent as stop ids. Whether an id is one the client asked for, the caller knows.
        """
        code = delta.finish_reason
        reason = _FINISH.get(code)
        if reason is None:
            return Finish.ERROR, None, f"the engine ended the request with the unknown finish code {code}"
        if code == ERROR:
            return reason, None, _error_text(delta.error)
        stop = delta.stop_reason
        return reason, stop if code == STOP and isinstance(stop, int) else None, None

    def cached_tokens(self, delta: Any) -> int | None:
        """Prompt tokens served from a cache, local or remote; on the first delta of a request, None on the others."""
        stats = delta.prefill_stats
        value = stats.get("num_cached_tokens") if isinstance(stats, dict) else None
        return value if isinstance(value, int) else None

    def logprobs(self, step: VllmStep, delta: Any) -> Logprobs | None:
        """One row for each of the delta's `new_token_ids`, when the request asked for logprobs."""
        found = self._read_logprobs(delta.new_logprobs, _LISTS, step.frames)
        if found is not None and found.token_ids.shape[0] != len(delta.new_token_ids):
            raise WireError(f"{len(delta.new_token_ids)} tokens came with {found.token_ids.shape[0]} rows of logprobs")
        return found

    def prompt_logprobs(self, step: VllmStep, delta: Any) -> Logprobs | None:
        """One row for each prompt token but the first, once the prompt is computed, when the request asked for them."""
        return self._read_logprobs(delta.new_prompt_logprobs_tensors, _TENSORS, step.frames)

    def pooled(self, step: VllmStep, delta: Any) -> Tensor | None:
        """The result of a pooling request."""
        form = delta.pooling_output
        return None if form is None else read_tensor(form, step.frames)

    def transfer_params(self, delta: Any) -> dict[str, Any] | None:
        """The KV connector's parameters, on the terminal delta of the leg that hands its cache over."""
        found = delta.kv_transfer_params
        return found if isinstance(found, dict) else None

    def spec_counts(self, delta: Any) -> tuple[int, int]:
        """(accepted, drafted) tokens of the request; told only with --per-request-spec-decode-metrics (since 0.28)."""
        found = delta.spec_decode_metrics
        if not isinstance(found, dict):
            return 0, 0
        histogram = found.get("histogram") or ()
        accepted = sum(number * count for number, count in enumerate(histogram))
        return accepted, int(found.get("num_draft_tokens") or 0)

    def _read_logprobs(self, form: Any, kind: tuple[str, str], frames: Sequence[Any]) -> Logprobs | None:
        if form is None:
            return None
        positions = self._logprobs[kind]
        found = _inline(form, positions)
        if found is not None:
            return found
        if not isinstance(form, list) or len(form) <= max(positions):
            raise WireError(f"{kind[0]} is an array with at least {max(positions) + 1} elements")
        token_ids, values, ranks = (read_tensor(form[position], frames) for position in positions)
        if len(token_ids.shape) != 2 or values.shape != token_ids.shape or ranks.shape != token_ids.shape[:1]:
            shapes = f"{list(token_ids.shape)}, {list(values.shape)} and {list(ranks.shape)}"
            raise WireError(f"{kind[0]} has tensors of the shapes {shapes}, which do not fit each other")
        return Logprobs(token_ids, values, ranks)


def _inline(form: Any, positions: tuple[int, ...]) -> Logprobs | None:
    """Rows as vLLM sends those of a few tokens (0.27 to 0.33: int32, float32, int64, inline); None for any other form."""
    try:
        (ids_type, ids_shape, ids), (type_, shape, values), (ranks_type, ranks_shape, ranks) = (
            form[positions[0]],
            form[positions[1]],
            form[positions[2]],
        )
        rows, width = shape
        cells = rows * width * 4
        if (
            (ids_type, type_, ranks_type) == ("<i4", "<f4", "<i8")
            and ids_shape == shape
            and ranks_shape == [rows]
            and cells > 0
            and type(ids) is type(values) is type(ranks) is memoryview
            and ids.nbytes == values.nbytes == cells
            and ranks.nbytes == rows * 8
        ):
            both = (rows, width)
            return Logprobs(Tensor("<i4", both, ids), Tensor("<f4", both, values), Tensor("<i8", (rows,), ranks))
    except (TypeError, ValueError, IndexError):
        return None
    return None


def decoded(decode: Any, data: Any, what: str) -> Any:
    """`decode(data)`, with every way in which bytes can be wrong turned into `WireError`."""
    try:
        return decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise WireError(f"{what} does not fit the engine's layout: {error}") from None


def raw_view(code: int, data: memoryview) -> memoryview:
    """Ext hook: tensor bytes are a view into the message; any other ext type is refused, pickles above all."""
    if code != RAW_VIEW:
        raise WireError(f"an engine message has msgpack ext type {code}; only {RAW_VIEW} (raw bytes) is read")
    return data


def _positions(layouts: Layouts, struct: str, ranks: str) -> tuple[int, ...]:
    return layouts.positions(struct, ("logprob_token_ids", "logprobs", ranks))


def _error_text(error: Any) -> str | None:
    """RequestError (since 0.33) as `code: message`."""
    if not isinstance(error, dict):
        return None
    return ": ".join(str(error[key]) for key in ("code", "message") if error.get(key)) or None
