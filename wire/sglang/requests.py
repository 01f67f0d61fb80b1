"""What the bridge sends: `[type byte] [msgpack] [metadata]`, one ZMQ message a request, abort or control call.

The scheduler's own decoder reads an ADD, so every field between two that we send holds the engine's default: the fields
of TokenizedGenerateReqInput and TokenizedEmbeddingReqInput, 0.5.18 to 0.5.23, up to the last one we send.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from bridge.wire.codec import EmbedCall, Frames, GenerateCall
from bridge.wire.layout import Field, Layouts, encoder_struct
from bridge.wire.sglang.sampling import SamplingEncoder, Stops

ADD = b"\x00"
ABORT = b"\x01"
CONTROL = b"\x02"

REQUEST = "TokenizedGenerateReqInput"
EMBEDDING = "TokenizedEmbeddingReqInput"

REQUEST_FIELDS = (
    Field("rid", str),
    Field("http_worker_ipc", str | None, None),
    Field("input_text", Any, None),
    Field("input_ids", list[int]),
    Field("input_embeds", Any, None),
    Field("mm_inputs", Any, None),
    Field("token_type_ids", list[int] | None, None),
    Field("sampling_params", Any),
    Field("return_logprob", bool),
    Field("logprob_start_len", int),
    Field("top_logprobs_num", int),
    Field("token_ids_logprob", list[int] | None),
    Field("stream", bool),
    Field("return_sampling_mask", bool, False),
    Field("return_flat_raw_top_logprobs", bool, False),
    Field("return_hidden_states", bool),
    Field("return_routed_experts", bool, False),
    Field("routed_experts_start_len", int, 0),
    Field("return_indexer_topk", bool, False),
    Field("session_id", str | None, None),
    Field("session_params", Any, None),
    Field("lora_id", str | None),
    Field("custom_logit_processor", str | None),
    Field("positional_embed_overrides", Any, None),
    Field("bootstrap_host", str | None),
    Field("bootstrap_port", int | None),
    Field("bootstrap_room", int | None),
    Field("bootstrap_pair_key", str | None, None),
    Field("decode_tp_size", int | None, None),
    Field("routed_dp_rank", int | None, None),
    Field("disagg_prefill_dp_rank", int | None, None),
    Field("routing_key", str | None, None),
    Field("require_reasoning", bool),
    Field("priority", int | None, None),
    Field("extra_key", str | None, None),
    Field("no_logs", bool, False),
    Field("return_bytes", bool, False),
    Field("return_entropy", bool, False),
    Field("need_wait_for_mm_inputs", bool | None, None),
    Field("num_items_assigned", Any, None),
    Field("mm_data_mooncake", Any, None),
    Field("encoder_urls", Any, None),
    Field("multi_item_delimiter_indices", list[int] | None, None),
    Field("token_indices_to_pool", list[int] | None, None),
    Field("time_stats", Any, None),
    Field("cache_salt", str | None, None),
)

EMBEDDING_FIELDS = (
    Field("rid", str),
    Field("http_worker_ipc", str | None, None),
    Field("input_text", Any, None),
    Field("input_ids", list[int]),
    Field("mm_inputs", Any, None),
    Field("token_type_ids", list[int] | None),
    Field("sampling_params", Any),
)

NO_PROMPT_LOGPROBS = -1
"""`logprob_start_len` of a request that wants none."""


class Transfer(msgspec.Struct, kw_only=True, gc=False):
    """Where the other leg of a disaggregated request is; all of it as the gateway paired them."""

    host: str | None = None
    port: int | None = None
    room: int | None = None


class Native(msgspec.Struct, kw_only=True, gc=False):
    """What only SGLang is asked for: `GenerateCall.native`.

    `logprob_start` is the first prompt position whose log-probabilities are wanted, -1 for none; it needs
    `Sampling.logprobs`. `scored_ids` are token ids whose log-probabilities are wanted at each output position.
    """

    stops: Stops = msgspec.field(default_factory=Stops)
    logprob_start: int = NO_PROMPT_LOGPROBS
    scored_ids: list[int] | None = None
    hidden_states: bool = False
    reasoning: bool = False
    """Whether the scheduler counts reasoning tokens."""
    lora_id: str | None = None
    logit_processor: str | None = None
    """JSON of a pickled class; the engine runs it, when it was started to."""
    custom_params: dict[str, Any] | None = None
    """Values are None, bool, int, float, str, or a list or map of those."""
    transfer: Transfer | None = None


class EmbedNative(msgspec.Struct, kw_only=True, gc=False):
    """What only SGLang is asked for: `EmbedCall.native`."""

    token_type_ids: list[int] | None = None


class RequestEncoder:
    """Encodes adds, aborts and control calls. Raises `LayoutError` when the engine lacks a field that is always sent."""

    __slots__ = ("_embedding", "_encode", "_request", "_sampling")

    def __init__(self, layouts: Layouts) -> None:
        self._request: Callable[..., msgspec.Struct] = encoder_struct(layouts, REQUEST, REQUEST_FIELDS, tagged=True)
        self._embedding: Callable[..., msgspec.Struct] = encoder_struct(
            layouts, EMBEDDING, EMBEDDING_FIELDS, tagged=True
        )
        self._sampling = SamplingEncoder(layouts)
        self._encode = msgspec.msgpack.Encoder().encode

    def add(self, call: GenerateCall) -> Frames:
        """One generation; what it asks of SGLang alone is in `call.native`."""
        native = call.native if isinstance(call.native, Native) else Native()
        sampling = call.sampling
        start = native.logprob_start
        if start < 0 and sampling.prompt_logprobs is not None:
            start = 0
        most = max(sampling.logprobs or 0, sampling.prompt_logprobs or 0)
        transfer = native.transfer or Transfer()
        request = self._request(
            rid=call.wire_id,
            input_ids=call.prompt_token_ids,
            sampling_params=self._sampling.params(sampling, native.stops, native.custom_params),
            return_logprob=sampling.logprobs is not None or start >= 0 or native.scored_ids is not None,
            logprob_start_len=start,
            top_logprobs_num=most,
            token_ids_logprob=native.scored_ids,
            stream=call.stream,
            return_hidden_states=native.hidden_states,
            lora_id=native.lora_id,
            custom_logit_processor=native.logit_processor,
            bootstrap_host=transfer.host,
            bootstrap_port=transfer.port,
            bootstrap_room=transfer.room,
            require_reasoning=native.reasoning,
            cache_salt=call.cache_salt,
        )
        frames = [ADD, self._encode(request)]
        if call.trace_headers:
            frames.append(self._encode({"trace_headers": call.trace_headers}))
        return frames

    def add_embed(self, call: EmbedCall) -> Frames:
        """One embedding of a whole prompt."""
        native = call.native if isinstance(call.native, EmbedNative) else EmbedNative()
        request = self._embedding(
            rid=call.wire_id,
            input_ids=call.prompt_token_ids,
            token_type_ids=native.token_type_ids,
            sampling_params=self._sampling.of_embedding(),
        )
        return [ADD, self._encode(request)]

    def abort(self, wire_ids: Sequence[str]) -> Frames:
        """Stop requests; the engine ignores ids it does not know."""
        return [ABORT, self._encode(list(wire_ids))]

    def control(self, call_id: int, method: str, args: Sequence[Any]) -> Frames:
        """`flush_cache [timeout_s]`, `start_profile [options map]`, `stop_profile []`."""
        return [CONTROL, self._encode([call_id, method, list(args)])]
