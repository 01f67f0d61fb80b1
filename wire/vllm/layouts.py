"""vLLM's positional structs, 0.27 to 0.33: field order per minor version.

Read from `__struct_fields__` and `_fields` of the packages themselves; the golden vectors prove each version against
its own package. What is keyed by name (SamplingParams, SchedulerStats, the ready map, KV events) needs no layout.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence

from bridge.wire.errors import LayoutError
from bridge.wire.layout import COMPANION, Layouts, table_source

log = logging.getLogger(__name__)

Order = tuple[str, ...]

_REQUEST_27: Order = (
    "request_id",
    "prompt_token_ids",
    "mm_features",
    "sampling_params",
    "pooling_params",
    "arrival_time",
    "lora_request",
    "cache_salt",
    "data_parallel_rank",
    "prompt_embeds",
    "prompt_is_token_ids",
    "client_index",
    "current_wave",
    "priority",
    "trace_headers",
    "resumable",
    "external_req_id",
    "reasoning_ended",
    "reasoning_parser_kwargs",
    "abort_immediately",
)
_REQUEST_28: Order = (*_REQUEST_27, "session_id")
_REQUEST_31: Order = (*_REQUEST_28, "kv_hints")

_OUTPUT_27: Order = (
    "request_id",
    "new_token_ids",
    "new_logprobs",
    "new_prompt_logprobs_tensors",
    "pooling_output",
    "finish_reason",
    "stop_reason",
    "events",
    "kv_transfer_params",
    "ec_transfer_params",
    "trace_headers",
    "prefill_stats",
    "routed_experts",
    "num_nans_in_logits",
)
_OUTPUT_28: Order = (*_OUTPUT_27, "mm_cache_miss_hashes", "new_sampling_mask")
_OUTPUT_29: Order = (*_OUTPUT_28, "spec_decode_metrics")
_OUTPUT_31: Order = (*_OUTPUT_29, "prompt_token_id_logprobs")
_OUTPUT_33: Order = (*_OUTPUT_31, "error")

_OUTPUTS_27: Order = (
    "engine_index",
    "outputs",
    "scheduler_stats",
    "timestamp",
    "utility_output",
    "finished_requests",
    "wave_complete",
    "start_wave",
)
_OUTPUTS_32: Order = (*_OUTPUTS_27, "weight_version")

_UTILITY: Order = ("call_id", "failure_message", "result")

_POOLING_27: Order = (
    "use_activation",
    "dimensions",
    "step_tag_id",
    "returned_token_ids",
    "task",
    "requires_token_ids",
    "skip_reading_prefix_cache",
    "late_interaction_params",
    "extra_kwargs",
    "output_kind",
)
_POOLING_33: Order = (*_POOLING_27, "late_chunking_params")

_LORA_27: Order = (
    "lora_name",
    "lora_int_id",
    "lora_path",
    "base_model_name",
    "tensorizer_config_dict",
    "load_inplace",
    "is_3d_lora_weight",
)
_LORA_32: Order = tuple(name for name in _LORA_27 if name != "tensorizer_config_dict")

_LISTS: Order = ("logprob_token_ids", "logprobs", "sampled_token_ranks", "cu_num_generated_tokens")
_TENSORS_27: Order = ("logprob_token_ids", "logprobs", "selected_token_ranks", "cu_num_generated_tokens")
_TENSORS_29: Order = (*_TENSORS_27, "cu_num_generated_tokens_tensor")


def _orders(
    request: Order, output: Order, outputs: Order, pooling: Order, lora: Order, tensors: Order
) -> Mapping[str, Order]:
    return {
        "EngineCoreRequest": request,
        "EngineCoreOutput": output,
        "EngineCoreOutputs": outputs,
        "UtilityOutput": _UTILITY,
        "PoolingParams": pooling,
        "LoRARequest": lora,
        "LogprobsLists": _LISTS,
        "LogprobsTensors": tensors,
    }


TABLE: Mapping[tuple[int, int], Mapping[str, Order]] = {
    (0, 27): _orders(_REQUEST_27, _OUTPUT_27, _OUTPUTS_27, _POOLING_27, _LORA_27, _TENSORS_27),
    (0, 28): _orders(_REQUEST_28, _OUTPUT_28, _OUTPUTS_27, _POOLING_27, _LORA_27, _TENSORS_27),
    (0, 29): _orders(_REQUEST_28, _OUTPUT_29, _OUTPUTS_27, _POOLING_27, _LORA_27, _TENSORS_29),
    (0, 30): _orders(_REQUEST_28, _OUTPUT_29, _OUTPUTS_27, _POOLING_27, _LORA_27, _TENSORS_29),
    (0, 31): _orders(_REQUEST_31, _OUTPUT_31, _OUTPUTS_27, _POOLING_27, _LORA_27, _TENSORS_29),
    (0, 32): _orders(_REQUEST_31, _OUTPUT_31, _OUTPUTS_32, _POOLING_27, _LORA_32, _TENSORS_29),
    (0, 33): _orders(_REQUEST_31, _OUTPUT_33, _OUTPUTS_32, _POOLING_33, _LORA_32, _TENSORS_29),
}
"""(major, minor) → struct name → field order."""

OLDEST = min(TABLE)
NEWEST = max(TABLE)

_VERSION = re.compile(r"v?(\d+)\.(\d+)")


def for_version(version: str, declared: Mapping[str, Sequence[str]] | None = None) -> Layouts:
    """The layouts of vLLM `version` (`0.32.0`, `0.33.1rc2`, `0.32.0+cpu`, `0.33.1.dev7+g1a2b3c`).

    `declared` is what the companion read from the installed package and wins over the table, struct by struct. A
    version that is newer than the table, or that names no release (`dev`), takes the newest table, with a warning when
    nothing was declared. A patch release, a candidate and a local suffix take their minor version's table. Raises
    `LayoutError` for a version older than 0.27 and for a declaration that is not lists of names.
    """
    key = _key(version)
    if key is not None and key < OLDEST:
        raise LayoutError(f"vLLM {version} is older than {_name(OLDEST)}, the oldest this bridge speaks to")
    if key is None or key not in TABLE:
        if not declared:
            log.warning("vLLM %s is newer than the newest known layout; using that of %s", version, _name(NEWEST))
        key = NEWEST
    table = Layouts(TABLE[key], table_source(_name(key)))
    return Layouts(declared, COMPANION).over(table) if declared else table


def _key(version: str) -> tuple[int, int] | None:
    match = _VERSION.match(version)
    return (int(match[1]), int(match[2])) if match else None


def _name(key: tuple[int, int]) -> str:
    return f"{key[0]}.{key[1]}.0"
