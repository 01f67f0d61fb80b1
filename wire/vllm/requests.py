"""What the bridge sends to vLLM's engine core: `[type] [msgpack] [tensor frames …]` (vLLM 0.27 to 0.33)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from bridge.wire.codec import Adapter, EmbedCall, Frames, GenerateCall, Sampling
from bridge.wire.layout import Field, Layouts, encoder_struct
from bridge.wire.vllm.sampling import SamplingParams, sampling_params

ADD = b"\x00"
ABORT = b"\x01"
UTILITY = b"\x03"

REQUEST = "EngineCoreRequest"

REQUEST_FIELDS = (
    Field("request_id", str),
    Field("prompt_token_ids", list[int]),
    Field("mm_features", Any, None),
    Field("sampling_params", SamplingParams | None),
    Field("pooling_params", Any, None),
    Field("arrival_time", float),
    Field("lora_request", Any, None),
    Field("cache_salt", str | None, None),
    Field("data_parallel_rank", int | None, None),
    Field("prompt_embeds", Any, None),
    Field("prompt_is_token_ids", Any, None),
    Field("client_index", int),
    Field("current_wave", int, 0),
    Field("priority", int),
    Field("trace_headers", dict[str, str] | None),
    Field("resumable", bool, False),
    Field("external_req_id", str | None, None),
    Field("reasoning_ended", bool | None, None),
    Field("reasoning_parser_kwargs", Any, None),
    Field("abort_immediately", bool, False),
    Field("session_id", str | None, None),
    Field("kv_hints", Any, None),
)
"""Every field of EngineCoreRequest, 0.27 to 0.33, with the engine's own defaults. Those without one are always sent."""

ADAPTER = "LoRARequest"

ADAPTER_FIELDS = (
    Field("lora_name", str),
    Field("lora_int_id", int),
    Field("lora_path", str),
    Field("base_model_name", str | None, None),
    Field("tensorizer_config_dict", Any, None),
    Field("load_inplace", bool, False),
    Field("is_3d_lora_weight", bool, False),
)
"""LoRARequest, 0.27 to 0.33. Its number must be 1 or more and its path not empty, or the input thread ends."""

POOLING = "PoolingParams"
FINAL_ONLY = 2
"""RequestOutputKind: one output, at the end."""

POOLING_FIELDS = (
    Field("use_activation", bool),
    Field("dimensions", int | None, None),
    Field("step_tag_id", int | None, None),
    Field("returned_token_ids", list[int] | None, None),
    Field("task", str),
    Field("requires_token_ids", bool, False),
    Field("skip_reading_prefix_cache", bool | None, None),
    Field("late_interaction_params", Any, None),
    Field("extra_kwargs", Any, None),
    Field("output_kind", int),
)
"""PoolingParams, 0.27 to 0.33. The engine core fills in no default: a nil `use_activation` is no activation."""


class RequestEncoder:
    """Encodes adds, aborts and utility calls of one front end, whose outputs come back on slot `client_index`.

    A `client_index` the engine has no output socket for silences the engine for good (vLLM 0.27 to 0.33).
    """

    __slots__ = (
        "_adapter",
        "_client_index",
        "_encode",
        "_encoded",
        "_has_session",
        "_pooling",
        "_request",
        "_sampling",
    )

    def __init__(self, layouts: Layouts, client_index: int) -> None:
        self._request: Callable[..., Any] = encoder_struct(layouts, REQUEST, REQUEST_FIELDS)
        self._has_session = "session_id" in layouts.order(REQUEST)
        self._pooling: Callable[..., msgspec.Struct] = encoder_struct(layouts, POOLING, POOLING_FIELDS)
        self._adapter: Callable[..., msgspec.Struct] = encoder_struct(layouts, ADAPTER, ADAPTER_FIELDS)
        self._client_index = client_index
        self._encode = msgspec.msgpack.Encoder().encode
        self._sampling: Sampling | None = None
        self._encoded = msgspec.Raw()

    def add(self, call: GenerateCall) -> Frames:
        """One generation. `call.wire_id` must be new: a live duplicate kills the engine."""
        request = self._request(
            request_id=call.wire_id,
            prompt_token_ids=call.prompt_token_ids,
            sampling_params=self._params(call),
            cache_salt=call.cache_salt,
            reasoning_ended=True if call.constrain_from_first_token else None,
            arrival_time=call.arrival_time,
            client_index=self._client_index,
            priority=call.priority,
            trace_headers=call.trace_headers,
        )
        if self._has_session and call.session_id is not None:
            request.session_id = call.session_id
        if call.adapter is not None:
            request.lora_request = self._form(call.adapter)
        return [ADD, self._encode(request)]

    def _params(self, call: GenerateCall) -> SamplingParams | msgspec.Raw:
        """The sampling values; encoded once where calls have one and the same object of them, one after the other."""
        sampling = call.sampling
        if call.transfer_params is not None:
            return sampling_params(sampling, call.transfer_params)
        if sampling is not self._sampling:
            self._sampling, self._encoded = sampling, msgspec.Raw(self._encode(sampling_params(sampling)))
        return self._encoded

    def add_embed(self, call: EmbedCall) -> Frames:
        """One embedding of a whole prompt, as vLLM's embeddings endpoint asks for it."""
        request = self._request(
            request_id=call.wire_id,
            prompt_token_ids=call.prompt_token_ids,
            sampling_params=None,
            pooling_params=self._pooling(
                use_activation=call.activation, task="embed", skip_reading_prefix_cache=False, output_kind=FINAL_ONLY
            ),
            arrival_time=call.arrival_time,
            client_index=self._client_index,
            priority=0,
            trace_headers=None,
        )
        return [ADD, self._encode(request)]

    def abort(self, wire_ids: Sequence[str]) -> Frames:
        """Stop requests. The engine answers nothing, and ignores ids it does not know."""
        return [ABORT, self._encode(list(wire_ids))]

    def utility(self, call_id: int, method: str, args: Sequence[Any]) -> Frames:
        """Call a method of the engine core; `args` are positional. `call_id` is any 64-bit integer but -1 and -2."""
        given = [self._form(one) if isinstance(one, Adapter) else one for one in args]
        return [UTILITY, self._encode([self._client_index, call_id, method, given])]

    def _form(self, adapter: Adapter) -> msgspec.Struct:
        return self._adapter(lora_name=adapter.name, lora_int_id=adapter.number, lora_path=adapter.path)
