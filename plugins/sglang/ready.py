"""What a loaded scheduler says about itself: its rank, its ready map, and the limits its requests are checked against."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from bridge.plugins.sglang.guarded import Limits

DTYPES = {"bfloat16": "bfloat16", "float16": "float16", "half": "float16", "float32": "float32", "float": "float32"}
"""torch's names of what the ready map's `dtype` may say."""


class ReadyError(Exception):
    """A scheduler that cannot be described; one line."""


def rank_of(scheduler: Any) -> int:
    """The data-parallel rank of this scheduler, 0 without data parallelism.

    Up to 0.5.20 the scheduler keeps its parallel state itself. With attention data parallelism the ranks are those of
    the attention groups.
    """
    state = _parallel(scheduler)
    if _number(state, "attn_dp_size", 1) > 1:
        return _number(state, "attn_dp_rank", 0)
    return _number(state, "dp_rank", 0)


def _parallel(scheduler: Any) -> Any:
    own = getattr(scheduler, "ps", None)
    if own is not None:
        return own
    from sglang.srt.runtime_context import get_parallel

    return get_parallel()


def _number(state: Any, name: str, default: int) -> int:
    """An unset name raises in SGLang's context, and may be None."""
    try:
        value = getattr(state, name)
    except (AttributeError, RuntimeError, ValueError):
        return default
    return default if value is None else int(value)


def sglang_version() -> str:
    return version("sglang")


def layouts() -> dict[str, list[str]]:
    """Field order, tag not counted, of every struct an ADD decodes into, as the running release declares it."""
    from sglang.srt.managers import io_struct, schedule_batch
    from sglang.srt.sampling.sampling_params import SamplingParams

    structs = (
        io_struct.TokenizedGenerateReqInput,
        io_struct.TokenizedEmbeddingReqInput,
        io_struct.EncoderDispatchErrorReq,
        SamplingParams,
        schedule_batch.MultimodalProcessorOutput,
        schedule_batch.MultimodalDataItem,
    )
    return {struct.__name__: list(struct.__struct_fields__) for struct in structs}


def ready_map(scheduler: Any, rank: int) -> dict[str, Any]:
    """vLLM's ready map for an SGLang rank (the keys SMG 1.13 reads), and the layouts. Sizes are in tokens.

    Raises `ReadyError` for a model whose dtype has no name there.
    """
    args, model = scheduler.server_args, scheduler.model_config
    dtype = str(model.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise ReadyError(f"the model's dtype {dtype} has no name in the ready map; known are {', '.join(DTYPES)}")
    page, capacity = int(scheduler.page_size), int(scheduler.max_total_num_tokens)
    state = _parallel(scheduler)
    tensor = _number(state, "tp_size", int(args.tp_size))
    return {
        "max_model_len": int(model.context_len),
        "num_gpu_blocks": capacity // page,
        "block_size": page,
        "dtype": DTYPES[dtype],
        "vllm_version": f"sglang-{sglang_version()}",
        "world_size": tensor * int(args.pp_size),
        "data_parallel_size": _number(state, "num_dp_ranks", int(args.dp_size)),
        "tensor_parallel_size": _number(state, "attn_tp_size", tensor),
        "pipeline_parallel_size": int(args.pp_size),
        "decode_context_parallel_size": 1,
        "data_parallel_rank": rank,
        "max_num_seqs": int(scheduler.max_running_requests),
        "max_num_batched_tokens": max(0, int(scheduler.chunked_prefill_size or 0)),
        "instance_id": str(args.served_model_name or model.model_path),
        "supports_lora": bool(scheduler.enable_lora),
        "max_loras": int(scheduler.max_loras_per_batch) if scheduler.enable_lora else 0,
        "kv_cache_size_tokens": capacity,
        "kv_cache_max_concurrency": capacity / int(model.context_len),
        "positional_layouts": layouts(),
    }


def limits_of(scheduler: Any) -> Limits:
    """The limits of a loaded scheduler."""
    args, model = scheduler.server_args, scheduler.model_config
    hidden = getattr(args, "return_hidden_states_mode", None)
    if hidden not in ("last", "full"):
        hidden = "full" if getattr(args, "enable_return_hidden_states", False) else ""
    sizes = None
    if getattr(model, "is_matryoshka", False):
        sizes = tuple(getattr(model, "matryoshka_dimensions", None) or ())
    return Limits(
        vocab_size=int(model.vocab_size),
        is_generation=bool(scheduler.is_generation),
        is_multimodal=bool(model.is_multimodal),
        hidden_states=hidden,
        custom_logit_processors=_load_processor if getattr(args, "enable_custom_logit_processor", False) else None,
        loras=(lambda: _loras(scheduler)) if scheduler.enable_lora else None,
        embedding_dimensions=sizes,
        hidden_size=int(model.hidden_size),
    )


def _load_processor(text: str) -> Any:
    from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

    return CustomLogitProcessor.from_str(text)


def _loras(scheduler: Any) -> Mapping[str, str]:
    references = scheduler.tp_worker.model_runner.lora_manager.lora_refs.values()
    known = {one.lora_id: one.lora_id for one in references}
    known.update({one.lora_name: one.lora_id for one in references if one.lora_name})
    return known
