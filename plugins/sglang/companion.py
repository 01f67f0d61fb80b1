"""The companion of an SGLang engine, run in SGLang's own Python with the arguments of its launcher:

    python -m bridge.plugins.sglang.companion facts -- ARGUMENTS

Prints the facts as one JSON object (`bridge.wire.companion.Facts`), the only line on standard output; a failure is one
line on standard error and exit code 1. It does not stay: SGLang's scheduler checks constraints itself, and answers one that
it cannot enforce with an abort.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from bridge import __version__
from bridge.plugins.resident.priority import yield_cpu
from bridge.plugins.sglang.ready import layouts, sglang_version
from bridge.wire.companion import Facts
from bridge.wire.model_folder import eos_ids, has_vision
from bridge.wire.redaction import redacted
from bridge.wire.tokenizer_files import NAMES, PATTERNS

USAGE = "usage: python -m bridge.plugins.sglang.companion facts -- ARGUMENTS OF SGLang"


class CompanionError(Exception):
    """What the companion cannot do, in one line."""


def read_facts(argv: Sequence[str]) -> Facts:
    """The facts of the engine that these arguments would start, by SGLang's own parser and model configuration.

    No engine starts and no weights are read. Raises `CompanionError`, or what SGLang raises.
    """
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.server_args import prepare_server_args

    try:
        args = prepare_server_args(list(argv))
    except SystemExit:
        raise CompanionError("SGLang does not take these arguments; the line above says why") from None
    model = ModelConfig.from_server_args(args)
    config = model.hf_config
    generation = getattr(model, "hf_generation_config", None)
    folder = _tokenizer_folder(args)
    vocab_size = int(model.vocab_size)
    reasoning = str(getattr(args, "reasoning_parser", None) or "")
    return Facts(
        engine="sglang",
        engine_version=sglang_version(),
        bridge_version=__version__,
        model_path=str(args.model_path),
        tokenizer_path=folder,
        served_model_name=str(args.served_model_name or args.model_path),
        model_type=str(getattr(config, "model_type", "")),
        architectures=list(getattr(config, "architectures", None) or ()),
        vocab_size=vocab_size,
        max_model_len=int(model.context_len),
        is_generation=bool(model.is_generation),
        supports_vision=bool(model.is_multimodal) and has_vision(config.to_dict()),
        eos_token_ids=_eos(args, model, generation, vocab_size),
        bos_token_id=_config_id(model, "bos_token_id"),
        pad_token_id=_config_id(model, "pad_token_id"),
        default_sampling={**model.get_default_sampling_params(), **_preferred(args)},
        skip_tokenizer_init=bool(args.skip_tokenizer_init),
        supports_lora=bool(args.enable_lora or args.lora_paths),
        max_logprobs=vocab_size,
        model_dtype=str(model.dtype).removeprefix("torch."),
        kv_cache_dtype=str(args.kv_cache_dtype),
        attention_backend=str(args.attention_backend or ""),
        reasoning_parser=reasoning,
        constrained_decoding_start="after_reasoning" if reasoning else "first_token",
        server_args=_server_args(args),
        layouts=layouts(),
    )


def _tokenizer_folder(args: Any) -> str:
    """The local folder with the tokenizer's files; for a hub name, those files are fetched."""
    name = str(args.tokenizer_path or args.model_path)
    if Path(name).is_dir():
        return str(Path(name).absolute())
    from huggingface_hub import snapshot_download

    return str(snapshot_download(name, revision=args.revision, allow_patterns=[*NAMES, *PATTERNS]))


def _eos(args: Any, model: Any, generation: Any, vocab_size: int) -> list[int]:
    """The tokenizer's EOS first, then the other ids that end a text for SGLang's scheduler."""
    primary = None
    if not args.skip_tokenizer_init:
        from sglang.srt.utils.hf_transformers_utils import get_tokenizer

        tokenizer = get_tokenizer(
            args.tokenizer_path or args.model_path,
            tokenizer_mode=args.tokenizer_mode,
            trust_remote_code=args.trust_remote_code,
            tokenizer_revision=args.revision,
        )
        primary = getattr(tokenizer, "eos_token_id", None)
    known = eos_ids(primary, generation.to_dict() if generation is not None else {}, vocab_size)
    return list(dict.fromkeys([*known, *sorted(model.hf_eos_token_id or ())]))


def _config_id(model: Any, name: str) -> int | None:
    for config in (model.hf_text_config, model.hf_config):
        value = getattr(config, name, None)
        if isinstance(value, list):
            value = value[0] if value else None
        if isinstance(value, int):
            return value
    return None


def _preferred(args: Any) -> dict[str, Any]:
    """`--preferred-sampling-params`, JSON on the command line."""
    value = getattr(args, "preferred_sampling_params", None)
    if isinstance(value, str):
        value = msgspec.json.decode(value)
    return dict(value or {})


def _server_args(args: Any) -> dict[str, Any]:
    """What differs from SGLang's defaults, secrets redacted."""
    defaults = type(args)(model_path=args.model_path)
    given = {}
    for name in _fields(args):
        value = getattr(args, name)
        if not name.startswith("_") and value != getattr(defaults, name):
            given[name] = value
    return redacted(given)


def _fields(args: Any) -> Sequence[str]:
    """ServerArgs is a dataclass up to 0.5.21, a struct since."""
    names = getattr(args, "__struct_fields__", None) or getattr(args, "__dataclass_fields__", None)
    if names is None:
        raise CompanionError("SGLang's ServerArgs is neither a struct nor a dataclass")
    return list(names)


def main(argv: Sequence[str]) -> int:
    match list(argv):
        case ["facts", "--", *arguments]:
            pass
        case _:
            print(USAGE, file=sys.stderr)
            return 2
    yield_cpu()
    answer = os.dup(1)
    os.dup2(2, 1)  # SGLang and what it imports log to standard output
    try:
        facts = msgspec.json.encode(read_facts(arguments))
    except Exception as error:
        text = " ".join(str(error).split()) or type(error).__name__
        print(f"error: {text}", file=sys.stderr)
        return 1
    with os.fdopen(answer, "wb") as out:
        out.write(facts + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
