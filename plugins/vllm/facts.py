"""The facts of the engine that `vllm serve ARGUMENTS` would start, by vLLM's own parser and model configuration.

No engine starts and no weights are read.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bridge import __version__
from bridge.plugins.vllm.installed import CompanionError, first_named, module, named
from bridge.wire.companion import Facts
from bridge.wire.model_folder import eos_ids, has_vision
from bridge.wire.redaction import redacted
from bridge.wire.tokenizer_files import NAMES, PATTERNS

PARSER_MODULES = (
    "vllm.entrypoints.common.cli_args",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.entrypoints.openai.cli_args",
)
"""Homes of `make_arg_parser`: since 0.33, 0.29 to 0.32, and up to 0.28."""

STRUCTS = (
    ("vllm.v1.engine", "EngineCoreRequest"),
    ("vllm.v1.engine", "EngineCoreOutput"),
    ("vllm.v1.engine", "EngineCoreOutputs"),
    ("vllm.v1.engine", "UtilityOutput"),
    ("vllm.v1.engine", "EngineCoreReadyResponse"),
    ("vllm.v1.outputs", "LogprobsLists"),
    ("vllm.v1.outputs", "LogprobsTensors"),
    ("vllm.v1.metrics.stats", "SchedulerStats"),
    ("vllm.v1.metrics.stats", "PrefillStats"),
    ("vllm.sampling_params", "SamplingParams"),
    ("vllm.sampling_params", "StructuredOutputsParams"),
    ("vllm.pooling_params", "PoolingParams"),
    ("vllm.lora.request", "LoRARequest"),
)
"""The classes whose field order the wire is built from."""


@dataclasses.dataclass(frozen=True)
class Loaded:
    """vLLM's own objects for one engine: `engine_args` is AsyncEngineArgs, `model` its ModelConfig."""

    facts: Facts
    engine_args: Any
    model: Any


def read_facts(argv: Sequence[str]) -> Facts:
    """The facts of the engine that `vllm serve *argv` would start. Raises `CompanionError`."""
    return load(argv).facts


def load(argv: Sequence[str]) -> Loaded:
    """The facts, and what they were read from. Raises `CompanionError`."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    vllm = module("vllm")
    args, parser = _parse(argv)
    engine_args = named("vllm.engine.arg_utils", "AsyncEngineArgs").from_cli_args(args)
    model = _model_config(engine_args)
    generation = model.try_get_generation_config()
    hf_config = model.hf_config
    names = model.served_model_name
    transfer = engine_args.kv_transfer_config
    vocab_size = int(model.get_vocab_size())
    facts = Facts(
        engine="vllm",
        engine_version=str(vllm.__version__),
        bridge_version=__version__,
        model_path=str(model.model),
        tokenizer_path=_tokenizer_folder(model),
        served_model_name=names if isinstance(names, str) else str(names[0]),
        model_type=str(getattr(hf_config, "model_type", "")),
        architectures=list(getattr(hf_config, "architectures", None) or ()),
        vocab_size=vocab_size,
        max_model_len=int(model.max_model_len),
        is_generation=model.runner_type == "generate",
        embed_activation=_embed_activation(model),
        supports_vision=bool(model.is_multimodal_model) and has_vision(hf_config.to_dict()),
        eos_token_ids=eos_ids(_tokenizer_eos(model), generation, vocab_size),
        bos_token_id=_config_id(model, "bos_token_id"),
        pad_token_id=_config_id(model, "pad_token_id"),
        default_sampling=model.get_diff_sampling_param(),
        needs_coordinator=bool(model.is_moe),
        skip_tokenizer_init=bool(model.skip_tokenizer_init),
        supports_lora=bool(engine_args.enable_lora),
        max_logprobs=vocab_size if model.max_logprobs == -1 else int(model.max_logprobs),
        model_dtype=str(model.dtype).removeprefix("torch."),
        kv_cache_dtype=str(engine_args.kv_cache_dtype),
        attention_backend=_attention_backend(engine_args),
        kv_connector=str(getattr(transfer, "kv_connector", None) or ""),
        kv_role=str(getattr(transfer, "kv_role", None) or ""),
        kv_engine_id=_given_engine_id(argv, transfer),
        reasoning_parser=_reasoning_parser(engine_args),
        constrained_decoding_start=_constrained_decoding_start(engine_args),
        server_args=_server_args(args, parser),
        layouts={name: fields_of(named(home, name)) for home, name in STRUCTS},
    )
    return Loaded(facts, engine_args, model)


def fields_of(struct: Any) -> list[str]:
    """Field names in wire order of a msgspec struct, a named tuple or a dataclass."""
    fields = getattr(struct, "__struct_fields__", None) or getattr(struct, "_fields", None)
    if fields is None and dataclasses.is_dataclass(struct):
        fields = [field.name for field in dataclasses.fields(struct)]
    if fields is None:
        raise CompanionError(
            f"{struct.__module__}.{struct.__qualname__} is neither a struct, a named tuple nor a dataclass"
        )
    return list(fields)


def _parse(argv: Sequence[str]) -> tuple[Any, Any]:
    """(parsed arguments, the parser of `serve`), by vLLM's own parser: dashes, config files, dotted JSON included."""
    parser = named("vllm.utils.argparse_utils", "FlexibleArgumentParser")(prog="vllm")
    make = first_named(PARSER_MODULES, "make_arg_parser")
    serve = make(parser.add_subparsers(dest="subparser").add_parser("serve"))
    for one in (parser, serve):
        one.error = _refuse
    args = parser.parse_args(["serve", *argv])
    if getattr(args, "model_tag", None) is not None:  # the positional model wins over --model, as in `vllm serve`
        args.model = args.model_tag
    return args, serve


def _refuse(message: str) -> None:
    raise CompanionError(f"vllm serve does not take these arguments: {message}")


def _model_config(engine_args: Any) -> Any:
    """vLLM's model configuration; of the target model where the given one is a speculator, as the engine itself does."""
    override = named("vllm.transformers_utils.config", "maybe_override_with_speculators")
    if "://" not in engine_args.model:
        engine_args.model, engine_args.tokenizer, _ = override(
            model=engine_args.model,
            tokenizer=engine_args.tokenizer,
            revision=engine_args.revision,
            trust_remote_code=engine_args.trust_remote_code,
            vllm_speculative_config=engine_args.speculative_config,
        )
    return engine_args.create_model_config()


def _embed_activation(model: Any) -> bool:
    """What PoolingParams fills in for an embedding: the pooler's own setting, else True."""
    found = getattr(model.pooler_config, "use_activation", None)
    return True if found is None else bool(found)


def _tokenizer_eos(model: Any) -> int | None:
    """The tokenizer's EOS, which vLLM's front end sends as the primary one; None when no tokenizer is loaded."""
    tokenizer = named("vllm.tokenizers", "cached_tokenizer_from_config")(model)
    eos: int | None = None if tokenizer is None else tokenizer.eos_token_id
    return eos


def _tokenizer_folder(model: Any) -> str:
    """The local folder with the tokenizer's files; for a hub name, those files are fetched as vLLM itself fetches them."""
    folder = Path(model.tokenizer)
    if folder.is_dir():
        return str(folder.absolute())
    download: Callable[..., str] = named("huggingface_hub", "snapshot_download")
    return download(str(model.tokenizer), revision=model.tokenizer_revision, allow_patterns=[*NAMES, *PATTERNS])


def _config_id(model: Any, name: str) -> int | None:
    for config in (model.hf_text_config, model.hf_config):
        value = getattr(config, name, None)
        if isinstance(value, list):
            value = value[0] if value else None
        if isinstance(value, int):
            return value
    return None


def _attention_backend(engine_args: Any) -> str:
    """The backend that was asked for; "" when the engine chooses."""
    backend = engine_args.attention_backend or getattr(engine_args.attention_config, "backend", None)
    return str(getattr(backend, "name", None) or backend or "")


def _given_engine_id(argv: Sequence[str], transfer: Any) -> str:
    """The engine id that was asked for. vLLM draws one at random in every process otherwise, so ours would be no fact."""
    engine_id = str(getattr(transfer, "engine_id", None) or "")
    return engine_id if engine_id and any(engine_id in word for word in argv) else ""


def _reasoning_parser(engine_args: Any) -> str:
    return str(engine_args.reasoning_parser or engine_args.structured_outputs_config.reasoning_parser or "")


def _constrained_decoding_start(engine_args: Any) -> str:
    """Where a grammar starts: behind the thought when a reasoning parser runs and nothing says otherwise."""
    gated = _reasoning_parser(engine_args) and not engine_args.structured_outputs_config.enable_in_reasoning
    return "after_reasoning" if gated else "first_token"


def _server_args(args: Any, parser: Any) -> dict[str, Any]:
    """What differs from vLLM's defaults, secrets redacted."""
    skip = {"subparser", "model_tag", "dispatch_function"}
    given = {
        name: value for name, value in vars(args).items() if name not in skip and value != parser.get_default(name)
    }
    return redacted(given)
