"""What each vLLM release puts into the ready map and the scheduler statistics (read in the packages 0.27.0 to 0.33.0)."""

from __future__ import annotations

from collections.abc import Sequence

FIRST = (0, 27)
LAST = (0, 33)

Since = tuple[str, tuple[int, int]]
"""A key and the release that brought it."""

READY_KEYS: Sequence[Since] = (
    ("max_model_len", (0, 20)),
    ("num_gpu_blocks", (0, 20)),
    ("block_size", (0, 23)),
    ("dp_stats_address", (0, 20)),
    ("dtype", (0, 22)),
    ("vllm_version", (0, 23)),
    ("world_size", (0, 24)),
    ("data_parallel_size", (0, 24)),
    ("tensor_parallel_size", (0, 27)),
    ("pipeline_parallel_size", (0, 27)),
    ("decode_context_parallel_size", (0, 27)),
    ("data_parallel_rank", (0, 27)),
    ("max_num_seqs", (0, 27)),
    ("max_num_batched_tokens", (0, 27)),
    ("instance_id", (0, 27)),
    ("supports_lora", (0, 29)),
    ("max_loras", (0, 29)),
    ("mamba_block_size", (0, 29)),
    ("kv_cache_size_tokens", (0, 24)),
    ("kv_cache_max_concurrency", (0, 24)),
    ("kv_events_config", (0, 27)),
    ("weight_transfer_backend", (0, 28)),
    ("enable_sleep_mode", (0, 28)),
    ("supports_draft_weight_updates", (0, 28)),
    ("effective_attention_block_size", (0, 31)),
    ("coord_store_port", (0, 33)),
    ("coordinator_input_address", (0, 33)),
    ("coordinator_output_address", (0, 33)),
)
"""EngineCoreReadyResponse."""

STATS_KEYS: Sequence[Since] = (
    ("num_running_reqs", FIRST),
    ("num_waiting_reqs", FIRST),
    ("num_skipped_waiting_reqs", FIRST),
    ("num_kv_fetch_reqs_by_stage", (0, 32)),
    ("step_counter", FIRST),
    ("current_wave", FIRST),
    ("kv_cache_usage", FIRST),
    ("iteration_details", FIRST),
    ("prefix_cache_stats", FIRST),
    ("connector_prefix_cache_stats", FIRST),
    ("kv_cache_eviction_events", FIRST),
    ("spec_decoding_stats", FIRST),
    ("kv_connector_stats", FIRST),
    ("ec_connector_stats", (0, 31)),
    ("waiting_lora_adapters", FIRST),
    ("running_lora_adapters", FIRST),
    ("cudagraph_stats", FIRST),
    ("perf_stats", FIRST),
)
"""SchedulerStats; always every key."""

PREFIX_STATS_KEYS: Sequence[Since] = (
    ("reset", FIRST),
    ("requests", FIRST),
    ("queries", FIRST),
    ("hits", FIRST),
    ("preempted_requests", FIRST),
    ("preempted_queries", FIRST),
    ("preempted_hits", FIRST),
    ("hits_by_source", (0, 32)),
)
"""SchedulerStats.prefix_cache_stats: counts since the previous statistics, not totals."""


def parse(version: str) -> tuple[int, int]:
    """(major, minor) of a release; raises ValueError outside the range the simulated engine can speak."""
    numbers = version.split("+")[0].split(".")
    try:
        release = (int(numbers[0]), int(numbers[1]))
    except (IndexError, ValueError):
        raise ValueError(f"{version!r} is not a release number such as 0.32.0") from None
    if not FIRST <= release <= LAST:
        raise ValueError(f"the simulated engine speaks the wire of 0.27.0 to 0.33.0, not of {version}")
    return release


def keys_at(keys: Sequence[Since], release: tuple[int, int]) -> list[str]:
    """The keys of a map as that release sends them, in order."""
    return [name for name, since in keys if since <= release]
