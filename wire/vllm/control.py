"""What is not a request or its output: the ready map, scheduler statistics, utility replies, the death frame."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from bridge.wire.codec import Load, Reply
from bridge.wire.errors import WireError
from bridge.wire.layout import Field, Layouts, decoder_struct
from bridge.wire.tensors import raw_view
from bridge.wire.vllm.outputs import VllmStep, decoded

DEATH = b"ENGINE_CORE_DEAD"
"""The only frame of the last message of an engine that caught its own fatal error; a killed one sends nothing."""

_NIL = b"\xc0"

OPERATIONS: Mapping[str, str] = {
    "pause": "pause_scheduler",
    "resume": "resume_scheduler",
    "is_paused": "is_scheduler_paused",
    "sleep": "sleep",
    "wake_up": "wake_up",
    "is_sleeping": "is_sleeping",
    "get_weight_version": "get_weight_version",
    "set_weight_version": "set_weight_version",
    "reset_prefix_cache": "reset_prefix_cache",
    "load_adapter": "add_lora",
    "unload_adapter": "remove_lora",
    "list_adapters": "list_loras",
}
"""Neutral operation → method of the engine core (0.32), all with positional arguments: pause(mode, clear_cache),
sleep(level, mode), wake_up(tags or nil), set_weight_version(version), reset_prefix_cache(running too, connector too),
load_adapter(Adapter), unload_adapter(number)."""


class Ready(msgspec.Struct, kw_only=True, gc=False):
    """EngineCoreReadyResponse, vLLM 0.27 to 0.33: what the engine settled on while it started. Counts are in tokens.

    Keys of other versions are ignored, and what this version lacks keeps its default.
    """

    vllm_version: str = ""
    max_model_len: int = 0
    num_gpu_blocks: int = 0
    block_size: int = 0
    dtype: str = ""
    world_size: int = 1
    data_parallel_size: int = 1
    """1 on every rank of a dense group: each is its own engine."""
    data_parallel_rank: int = 0
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    instance_id: str = ""
    supports_lora: bool = False
    """Since 0.29."""
    max_loras: int = 0
    kv_cache_size_tokens: int | None = None
    kv_cache_max_concurrency: float | None = None
    kv_events_config: dict[str, Any] | None = None
    """With the endpoint the publisher really bound."""
    enable_sleep_mode: bool = False


def read_ready(ready: Mapping[str, Any]) -> Ready:
    """The ready map as a struct; raises `WireError` when a value has another type than vLLM gives it."""
    try:
        return msgspec.convert(dict(ready), Ready)
    except msgspec.ValidationError as error:
        raise WireError(f"the engine's ready map is not vLLM's: {error}") from None


def is_death(frames: Sequence[Any]) -> bool:
    return len(frames) == 1 and len(frames[0]) == len(DEATH) and bytes(frames[0]) == DEATH


class _Stats(msgspec.Struct, gc=False):
    """The keys of SchedulerStats that make a load figure."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_skipped_waiting_reqs: int = 0
    kv_cache_usage: float = 0.0


class ControlReader:
    """Reads statistics and utility replies out of steps, for one layout. Raises `WireError` for what does not fit."""

    __slots__ = ("_stats", "_utility")

    def __init__(self, layouts: Layouts) -> None:
        fields = (Field("call_id", int), Field("failure_message", str | None, None), Field("result", Any, None))
        reply = decoder_struct(layouts, "UtilityOutput", fields)
        self._utility = msgspec.msgpack.Decoder(reply, ext_hook=raw_view).decode
        self._stats = msgspec.msgpack.Decoder(_Stats).decode

    def has_load(self, step: VllmStep) -> bool:
        raw = step.scheduler_stats
        return raw is not None and bytes(raw) != _NIL

    def load(self, step: VllmStep) -> Load | None:
        """The rank's load after this step, None when the step carries none.

        `waiting` counts the requests the scheduler put off (`num_skipped_waiting_reqs`) too, as vLLM's own metrics do.
        The engine sends statistics to one front end only, and none with --disable-log-stats.
        """
        if not self.has_load(step):
            return None
        stats = cast(_Stats, decoded(self._stats, step.scheduler_stats, "a step's scheduler_stats"))
        return Load(
            rank=step.engine_index,
            running=stats.num_running_reqs,
            waiting=stats.num_waiting_reqs + stats.num_skipped_waiting_reqs,
            kv_cache_usage=stats.kv_cache_usage,
        )

    def reply(self, step: VllmStep) -> Reply | None:
        """The utility reply in this step, None when it holds none.

        The ids -1 (elastic expert parallelism) and -2 (fault tolerance) are the engine's own notices, not replies. The
        result is `[type_info, value]`; type info comes only with VLLM_ALLOW_INSECURE_SERIALIZATION and is not needed.
        """
        raw = step.utility_output
        if raw is None or bytes(raw) == _NIL:
            return None
        output = cast(Any, decoded(self._utility, raw, "a utility reply"))
        result = output.result
        if result is None:
            return Reply(output.call_id, output.failure_message, None)
        if not isinstance(result, list) or len(result) != 2:
            raise WireError("a utility result is not [type_info, value]")
        return Reply(output.call_id, output.failure_message, result[1])
