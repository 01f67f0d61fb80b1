"""Reads requests as strictly, and fails as badly, as vLLM 0.32 does. What arrives, and what becomes of it:

`InputDied`: the input thread ends, its sockets close (a ROUTER_MANDATORY send to it is EHOSTUNREACH from then on), the
process lives and finishes what runs. All that the typed decoder rejects: a wrong msgpack type, a sampling value out of
range, no structured-output constraint or two, an unknown pooling task, a LoRA id < 1 or empty path, a pickle; an unknown
type byte; a message without a payload; a utility call that is not four values. (A client_index without a socket ends the
output thread instead: nothing is sent any more.)

`Refused`: one request ends with finish reason error, the engine is unharmed. Neither sampling nor pooling parameters,
max_tokens nil, a structured output without `_backend`, no prompt ids.

`EngineDied`: ENGINE_CORE_DEAD to everybody, then exit. A live id again, an empty prompt, a prompt longer than the model,
a token id outside the vocabulary, an id in logit_bias or allowed_token_ids (with min_tokens, in the stop ids) outside it,
a pooling request (this is a generation model), type byte 4, an ABORT that holds no ids.

Accepted and without effect, as there: unknown sampling keys, n > 1, stop strings, bad words, data_parallel_rank, priority.
Without effect only here: logprobs, logit_bias, allowed_token_ids, constraints, media, LoRA, penalties, temperature.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, Literal

import msgspec

MAX_SEQUENCES = 16384
"""vLLM's VLLM_MAX_N_SEQUENCES."""

PoolingTask = Literal["embed", "classify", "token_embed", "token_classify", "plugin", "embed&token_classify"]


class InputDied(Exception):
    """The engine's input thread ends here; nothing that arrives later is read."""


class EngineDied(Exception):
    """The engine's busy loop ends here; the death frame goes out."""


class Refused(Exception):
    """One request ends with finish reason error; the engine is unharmed."""


def _require(fact: bool, text: str) -> None:
    if not fact:
        raise ValueError(text)


class StructuredOutputs(msgspec.Struct, kw_only=True, gc=False):
    """vLLM's StructuredOutputsParams (0.27 to 0.33)."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None
    backend: str | None = msgspec.field(name="_backend", default=None)
    backend_was_auto: bool = msgspec.field(name="_backend_was_auto", default=False)

    def __post_init__(self) -> None:
        given = (self.json, self.regex, self.choice, self.grammar, self.json_object, self.structural_tag)
        count = sum(value is not None for value in given)
        _require(count == 1, f"{count} structured-output constraints; exactly one is needed")


class RepetitionDetection(msgspec.Struct, gc=False):
    """vLLM's RepetitionDetectionParams. Never fires here: the token rule does not repeat."""

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        _require(0 <= self.min_pattern_size <= self.max_pattern_size, "repetition_detection pattern sizes")
        _require(self.max_pattern_size == 0 or self.min_count >= 2, "repetition_detection.min_count below 2")


class SamplingParams(msgspec.Struct, kw_only=True, gc=False):
    """vLLM's SamplingParams (0.27 to 0.33) with the checks its decoder makes; unknown keys pass."""

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    watermarking: bool | None = None
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprob_start: int | None = None
    logprob_token_ids: list[int] | None = None
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: Literal[0, 1, 2] = 0
    stream_interval: int | None = None
    skip_clone: bool = False
    output_text_buffer_length: int = 0
    eos_token_id: int | None = msgspec.field(name="_eos_token_id", default=None)
    all_stop_token_ids: set[int] = msgspec.field(name="_all_stop_token_ids", default_factory=set)
    structured_outputs: StructuredOutputs | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    extra_args: dict[str, Any] | None = None
    bad_words: list[str] | None = None
    bad_words_token_ids: list[list[int]] | None = msgspec.field(name="_bad_words_token_ids", default=None)
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None
    repetition_detection: RepetitionDetection | None = None
    routed_experts_prompt_start: int = 0
    trace_decode_token_ids: list[int] | None = None

    def __post_init__(self) -> None:
        _require(1 <= self.n <= MAX_SEQUENCES, f"n {self.n}")
        _require(-2.0 <= self.presence_penalty <= 2.0, f"presence_penalty {self.presence_penalty}")
        _require(-2.0 <= self.frequency_penalty <= 2.0, f"frequency_penalty {self.frequency_penalty}")
        _require(
            math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0.0,
            f"repetition_penalty {self.repetition_penalty}",
        )
        _require(0.0 <= self.temperature <= 2.0, f"temperature {self.temperature}")
        _require(0.0 < self.top_p <= 1.0, f"top_p {self.top_p}")
        _require(self.top_k >= -1, f"top_k {self.top_k}")
        _require(0.0 <= self.min_p <= 1.0, f"min_p {self.min_p}")
        _require(self.min_tokens >= 0, f"min_tokens {self.min_tokens}")
        if self.max_tokens is not None:
            _require(self.max_tokens >= 1, f"max_tokens {self.max_tokens}")
            _require(self.min_tokens <= self.max_tokens, f"min_tokens {self.min_tokens} > max_tokens {self.max_tokens}")
        _require(self.stream_interval is None or self.stream_interval >= 1, f"stream_interval {self.stream_interval}")
        _require(self.logprobs is None or self.logprobs >= -1, f"logprobs {self.logprobs}")
        _require(self.prompt_logprobs is None or self.prompt_logprobs >= -1, f"prompt_logprobs {self.prompt_logprobs}")
        _require(
            self.thinking_token_budget is None or self.thinking_token_budget >= -1,
            f"thinking_token_budget {self.thinking_token_budget}",
        )
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        _require(all(stops), "an empty stop string")
        _require(not stops or self.detokenize, "stop strings with detokenize false")
        _require(all(self.bad_words or []), "an empty bad word")
        _require(self.n == 1 or self.temperature >= 1e-5, f"n {self.n} with temperature 0")


class PoolingParams(msgspec.Struct, array_like=True, gc=False):
    """vLLM's PoolingParams up to the field the engine checks."""

    use_activation: bool | None = None
    dimensions: int | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    task: PoolingTask | None = None


class LoRARequest(msgspec.Struct, array_like=True, gc=False):
    """vLLM's LoRARequest up to the fields the engine checks."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""

    def __post_init__(self) -> None:
        _require(self.lora_int_id >= 1, f"lora_int_id {self.lora_int_id}")
        _require(bool(self.lora_path), "an empty lora_path")


class Add(msgspec.Struct, array_like=True, gc=False):
    """vLLM's EngineCoreRequest; positions 0 to 19 are the same in 0.27 to 0.33, later ones are ignored."""

    request_id: str
    prompt_token_ids: list[int] | None
    mm_features: list[dict[str, Any]] | None
    sampling_params: SamplingParams | None
    pooling_params: PoolingParams | None
    arrival_time: float
    lora_request: LoRARequest | None
    cache_salt: str | None
    data_parallel_rank: int | None
    prompt_embeds: Any = None
    prompt_is_token_ids: list[bool] | None = None
    client_index: int = 0
    current_wave: int = 0
    priority: int = 0
    trace_headers: dict[str, str] | None = None
    resumable: bool = False
    external_req_id: str | None = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None
    abort_immediately: bool = False


def _ext_hook(code: int, data: memoryview) -> Any:
    if code == 3:
        return data
    raise NotImplementedError(f"extension type {code} (pickle) is refused")


_ADD = msgspec.msgpack.Decoder(Add, ext_hook=_ext_hook)
_ANY = msgspec.msgpack.Decoder(ext_hook=_ext_hook)


def decode_add(payload: bytes) -> Add:
    """An ADD's main frame; raises `InputDied` for anything vLLM's decoder raises on."""
    try:
        return _ADD.decode(payload)
    except Exception as error:
        raise InputDied(f"ADD cannot be decoded: {error}") from None


def decode_utility(payload: bytes) -> tuple[Any, Any, Any, Any]:
    """(client_index, call_id, method, args) of a UTILITY frame; raises `InputDied` when it is anything else."""
    try:
        client, call_id, method, args = _ANY.decode(payload)
    except Exception as error:
        raise InputDied(f"UTILITY is not four msgpack values: {error}") from None
    return client, call_id, method, args


def decode_any(payload: bytes) -> Any:
    """Any msgpack value; raises `InputDied` when it is none."""
    try:
        return _ANY.decode(payload)
    except Exception as error:
        raise InputDied(f"a message cannot be decoded: {error}") from None


def refuse_unusable(add: Add) -> None:
    """Raises `Refused` for what vLLM's request preparation rejects, before the scheduler sees it."""
    sampling = add.sampling_params
    if sampling is None and add.pooling_params is None:
        raise Refused("neither sampling nor pooling parameters")
    if add.pooling_params is None and sampling is not None:
        if sampling.max_tokens is None:
            raise Refused("max_tokens is nil")
        if sampling.structured_outputs is not None and sampling.structured_outputs.backend is None:
            raise Refused("structured_outputs without _backend")
    if add.prompt_token_ids is None:
        raise Refused("no prompt token ids (prompt embeddings are not simulated)")


def deadly_detail(add: Add, vocab_size: int, max_model_len: int) -> str | None:
    """Why scheduling this request kills vLLM's busy loop, or None when it does not."""
    prompt = add.prompt_token_ids
    if not prompt:
        return "an empty prompt"
    if len(prompt) > max_model_len:
        return f"a prompt of {len(prompt)} tokens; the model takes {max_model_len}"
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        return f"a prompt token id outside the vocabulary of {vocab_size}"
    sampling = add.sampling_params
    if sampling is None:
        return None
    lists: list[tuple[str, Collection[int] | None]] = [
        ("logit_bias", sampling.logit_bias),
        ("allowed_token_ids", sampling.allowed_token_ids),
    ]
    if sampling.min_tokens > 0:
        lists.append(("stop_token_ids", sampling.stop_token_ids))
        lists.append(("_all_stop_token_ids", sampling.all_stop_token_ids))
    for name, ids in lists:
        if ids and (min(ids) < 0 or max(ids) >= vocab_size):
            return f"an id in {name} outside the vocabulary of {vocab_size}"
    return None
