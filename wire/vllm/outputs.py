"""What vLLM's engine core sends back: EngineCoreOutputs, one message a step and client (vLLM 0.27 to 0.33).

The hot path decodes a step to structs whose fields are attributes; what most deltas leave nil is kept as it came and
read by a method of `OutputReader` when somebody asks: statistics, utility replies, logprobs, pooled tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import msgspec

from bridge.wire.codec import Finish, Logprobs, TokenId
from bridge.wire.errors import WireError
from bridge.wire.layout import Field, Layouts, decoder_struct
from bridge.wire.tensors import Tensor, raw_view, read_tensor
from bridge.wire.vllm.logprobs import LogprobsReader

OUTPUT = "EngineCoreOutput"
OUTPUTS = "EngineCoreOutputs"

OUTPUT_FIELDS = (
    Field("request_id", str),
    Field("new_token_ids", list[TokenId]),
    Field("new_logprobs", msgspec.Raw, None),
    Field("new_prompt_logprobs_tensors", msgspec.Raw, None),
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

    __slots__ = ("_decode", "_prompt_rows", "_rows")

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
        self._rows = _reader(layouts, "LogprobsLists", "sampled_token_ranks")
        self._prompt_rows = _reader(layouts, "LogprobsTensors", "selected_token_ranks")

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
        found = self._rows.read(delta.new_logprobs, step.frames)
        if found is not None and len(found.ranks) != len(delta.new_token_ids):
            raise WireError(f"{len(delta.new_token_ids)} tokens came with {len(found.ranks)} rows of logprobs")
        return found

    def prompt_logprobs(self, step: VllmStep, delta: Any) -> Logprobs | None:
        """One row for each prompt token but the first, once the prompt is computed, when the request asked for them."""
        return self._prompt_rows.read(delta.new_prompt_logprobs_tensors, step.frames)

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


def decoded(decode: Any, data: Any, what: str) -> Any:
    """`decode(data)`, with every way in which bytes can be wrong turned into `WireError`."""
    try:
        return decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise WireError(f"{what} does not fit the engine's layout: {error}") from None


def _reader(layouts: Layouts, struct: str, ranks: str) -> LogprobsReader:
    return LogprobsReader(struct, layouts.positions(struct, ("logprob_token_ids", "logprobs", ranks)))


def _error_text(error: Any) -> str | None:
    """RequestError (since 0.33) as `code: message`."""
    if not isinstance(error, dict):
        return None
    return ": ".join(str(error[key]) for key in ("code", "message") if error.get(key)) or None
