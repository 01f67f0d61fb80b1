"""Facts read from a model folder alone, for engines whose Python is not at hand (`attach`) or that have none (sim).

Reads `config.json`, `generation_config.json` and the tokenizer's configuration. Rules follow vLLM 0.32: the primary EOS
is the tokenizer's, the generation configuration adds the rest, and a folder without a generation configuration falls
back to config.json for it; sizes of composite models come from their text part.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bridge import __version__
from bridge.wire.companion import Facts

SAMPLING_DEFAULTS: Mapping[str, str] = {
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
}
"""Generation-configuration key → sampling field (vLLM 0.32, `ModelConfig.get_diff_sampling_param`)."""

TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Where composite configurations keep their language model, in the order they are looked up; they nest (thinker)."""

VISION_KEYS = ("vision_config", "visual", "img_processor", "vision_tower", "mm_vision_tower")

CONTEXT_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
"""Names of the longest context in tokens; the smallest one given counts."""

SCALED_ALREADY = frozenset({"default", "su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling"})
"""RoPE types whose maximum position already holds the scaling; the others multiply it by their `factor`."""

GENERATIVE_SUFFIXES = ("ForCausalLM", "ForConditionalGeneration", "ChatModel", "LMHeadModel")


class ModelFolderError(Exception):
    """What is wrong with a model folder, in one line."""


def facts_from_folder(
    path: str | Path,
    *,
    engine: str,
    engine_version: str,
    served_model_name: str = "",
    tokenizer: str | Path | None = None,
    max_model_len: int | None = None,
) -> Facts:
    """The facts that the folder `path` tells about its model.

    `tokenizer` names another folder for the tokenizer; `max_model_len` (tokens) replaces the folder's own figure, which
    is 0 when there is none. What only an engine knows (attention backend, parsers, layouts) stays empty. Raises
    `ModelFolderError`.
    """
    folder = _folder(path)
    tokenizer_folder = folder if tokenizer is None else _folder(tokenizer)
    config = _read_json(folder / "config.json", required=True)
    text = text_part(config)
    generation = _read_json(folder / "generation_config.json")
    architectures = [str(name) for name in config.get("architectures") or ()]
    vocab_size = _vocab_size(folder, text)
    return Facts(
        engine=engine,
        engine_version=engine_version,
        bridge_version=__version__,
        model_path=str(folder),
        tokenizer_path=str(tokenizer_folder.absolute()),
        served_model_name=served_model_name or str(path),
        model_type=str(config.get("model_type", "")),
        architectures=architectures,
        vocab_size=vocab_size,
        max_model_len=max_model_len if max_model_len is not None else context_length(config),
        is_generation=any(name.endswith(GENERATIVE_SUFFIXES) for name in architectures),
        supports_vision=has_vision(config),
        eos_token_ids=eos_ids(
            _special_id(tokenizer_folder, "eos_token"), generation or _lifted(config, "eos_token_id"), vocab_size
        ),
        bos_token_id=_first_id(text, config, "bos_token_id"),
        pad_token_id=_first_id(text, config, "pad_token_id"),
        default_sampling=sampling_defaults(generation),
        model_dtype=str(_first(text, config, "dtype") or _first(text, config, "torch_dtype") or "").removeprefix(
            "torch."
        ),
    )


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a composite configuration; the configuration itself when it is not one."""
    for name in TEXT_PARTS:
        part = config.get(name)
        if isinstance(part, dict):
            return text_part(part)
    return config


def has_vision(config: Mapping[str, Any]) -> bool:
    """Whether the configuration names a vision encoder, at its top or in a nested part (Qwen omni's thinker)."""
    thinker = config.get("thinker_config")
    return any(config.get(key) for key in VISION_KEYS) or (isinstance(thinker, dict) and has_vision(thinker))


def eos_ids(primary: int | None, generation: Mapping[str, Any], vocab_size: int) -> list[int]:
    """The tokenizer's EOS id first, then what the generation configuration adds, each once.

    An id outside the vocabulary is left out: no model makes it, and engines index past their logits with it.
    """
    extra = generation.get("eos_token_id")
    ids = [] if primary is None else [primary]
    ids += [extra] if isinstance(extra, int) else list(extra or ())
    return [token for token in dict.fromkeys(ids) if 0 <= token < vocab_size]


def sampling_defaults(generation: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling values a generation configuration sets, in vLLM's field names."""
    return {field: generation[key] for key, field in SAMPLING_DEFAULTS.items() if generation.get(key) is not None}


def context_length(config: Mapping[str, Any]) -> int:
    """The longest context in tokens the configuration allows, RoPE scaling included; 0 when it does not say."""
    text = text_part(config)
    lengths: list[int] = [text[key] for key in CONTEXT_KEYS if isinstance(text.get(key), int)]
    if not lengths:
        return 0
    scalings = list(_rope_scalings(text))
    if any(kind == "longrope" for kind, _ in scalings):
        original = text.get("original_max_position_embeddings")
        return original if isinstance(original, int) else min(lengths)
    if "gemma3" in str(text.get("model_type", "")):
        return min(lengths)
    factor = max((factor for kind, factor in scalings if kind not in SCALED_ALREADY), default=1.0)
    return int(min(lengths) * factor)


def _rope_scalings(text: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """(type, factor) of each RoPE entry: one map, or one map per layer type, under its new or its old name."""
    entry = text.get("rope_parameters") or text.get("rope_scaling") or {}
    maps = [entry] if not any(isinstance(value, dict) for value in entry.values()) else list(entry.values())
    for one in maps:
        if isinstance(one, dict):
            kind = one.get("rope_type") or one.get("type") or "default"
            yield str(kind), float(one.get("factor") or 1.0)


def _vocab_size(folder: Path, text: Mapping[str, Any]) -> int:
    size = text.get("vocab_size")
    if not isinstance(size, int) or size <= 0:
        raise ModelFolderError(f"{folder}/config.json: vocab_size is {size!r}; token ids cannot be checked without it")
    return size


def _lifted(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = _first(text_part(config), config, key)
    return {} if value is None else {key: value}


def _first(text: Mapping[str, Any], config: Mapping[str, Any], key: str) -> Any:
    return text.get(key) if text.get(key) is not None else config.get(key)


def _first_id(text: Mapping[str, Any], config: Mapping[str, Any], key: str) -> int | None:
    value = _first(text, config, key)
    if isinstance(value, list):
        value = value[0] if value else None
    return value if isinstance(value, int) else None


def _special_id(folder: Path, name: str) -> int | None:
    """The id of a special token by the tokenizer's own files; None when they do not name one."""
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        token = _read_json(folder / file).get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            return _token_id(folder, token)
    return None


def _token_id(folder: Path, token: str) -> int | None:
    """Looked up among the added tokens, then in the vocabulary, of whichever file the folder has."""
    added = _read_json(folder / "tokenizer_config.json").get("added_tokens_decoder") or {}
    for number, entry in added.items():
        if entry.get("content") == token:
            return int(number)
    tokenizer = _read_json(folder / "tokenizer.json")
    for entry in tokenizer.get("added_tokens") or ():
        if entry.get("content") == token:
            return int(entry["id"])
    vocab = (tokenizer.get("model") or {}).get("vocab") or _read_json(folder / "vocab.json")
    if isinstance(vocab, list):  # Unigram models list [piece, score] pairs in id order
        return next((i for i, pair in enumerate(vocab) if pair[0] == token), None)
    number = vocab.get(token)
    return number if isinstance(number, int) else None


def _folder(path: str | Path) -> Path:
    folder = Path(path).expanduser()
    if not folder.is_dir():
        state = "is not a folder" if folder.exists() else "does not exist"
        raise ModelFolderError(f"model folder {folder} {state}")
    return folder


def _read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if not required:
            return {}
        raise ModelFolderError(f"model folder {path.parent} has no {path.name}") from None
    except (OSError, ValueError) as error:
        raise ModelFolderError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ModelFolderError(f"{path} holds a {type(value).__name__}, not an object")
    return value
