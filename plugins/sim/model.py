"""The model the simulated engine pretends to serve: a folder's, or a synthetic one. Companion and engine agree on it."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from bridge import __version__
from bridge.plugins.sim.options import Options, OptionsError
from bridge.plugins.sim.tokens import DEFAULT_VOCABULARY, Vocabulary
from bridge.wire.companion import Facts

SYNTHETIC_CONTEXT = 32768
SYNTHETIC_NAME = "sim"


def facts_of(options: Options) -> Facts:
    """Facts of the model; raises `OptionsError` when the folder does not tell them or a value cannot be."""
    if options.model_path is None:
        facts = Facts(
            engine="sim",
            engine_version=options.wire_version,
            bridge_version=__version__,
            model_path="",
            tokenizer_path="",
            served_model_name=options.served_model_name or SYNTHETIC_NAME,
            model_type="sim",
            architectures=["SimForCausalLM"],
            vocab_size=DEFAULT_VOCABULARY.size,
            max_model_len=SYNTHETIC_CONTEXT,
            eos_token_ids=[DEFAULT_VOCABULARY.eos_token_id],
            bos_token_id=1,
            model_dtype="bfloat16",
            skip_tokenizer_init=True,
        )
    else:
        facts = _folder_facts(options, options.model_path)
    changes: dict[str, object] = {}
    if options.vocab_size is not None:
        changes["vocab_size"] = options.vocab_size
    if options.max_model_len is not None:
        changes["max_model_len"] = options.max_model_len
    if options.eos_token_id is not None:
        changes["eos_token_ids"] = [options.eos_token_id]
    changes["supports_lora"] = options.lora
    facts = msgspec.structs.replace(facts, server_args=_server_args(options), **changes)
    _check(facts, options)
    return facts


def vocabulary_of(facts: Facts) -> Vocabulary:
    """What the token rule draws from: everything but EOS, BOS, padding and the tokenizer's special tokens."""
    special = {*facts.eos_token_ids, *_special_ids(facts.tokenizer_path)}
    special.update(token for token in (facts.bos_token_id, facts.pad_token_id) if token is not None)
    if not facts.tokenizer_path:
        special |= DEFAULT_VOCABULARY.special
    eos = facts.eos_token_ids[0] if facts.eos_token_ids else DEFAULT_VOCABULARY.eos_token_id
    return Vocabulary(
        size=facts.vocab_size,
        special=frozenset(token for token in special if token < facts.vocab_size),
        eos_token_id=eos,
    )


def _folder_facts(options: Options, path: Path) -> Facts:
    from bridge.wire.model_folder import ModelFolderError, facts_from_folder

    try:
        return facts_from_folder(
            path,
            engine="sim",
            engine_version=options.wire_version,
            served_model_name=options.served_model_name or "",
        )
    except ModelFolderError as error:
        raise OptionsError(str(error)) from None


def _special_ids(tokenizer_path: str) -> set[int]:
    file = Path(tokenizer_path) / "tokenizer.json"
    if not tokenizer_path or not file.is_file():
        return set()
    added = json.loads(file.read_text(encoding="utf-8")).get("added_tokens") or []
    return {token["id"] for token in added if token.get("special")}


def _server_args(options: Options) -> dict[str, object]:
    values: dict[str, object] = {}
    for name in options.__struct_fields__:
        value = getattr(options, name)
        if name != "faults" and value is not None:
            values[name] = str(value) if isinstance(value, Path) else value
    return values


def _check(facts: Facts, options: Options) -> None:
    if facts.vocab_size < 8:
        raise OptionsError(f"a vocabulary of {facts.vocab_size} ids is too small; give --vocab-size of 8 or more")
    if facts.max_model_len < 1:
        raise OptionsError("the model folder names no context length; give --max-model-len")
    bad = [token for token in facts.eos_token_ids if not 0 <= token < facts.vocab_size]
    if bad:
        raise OptionsError(f"EOS id {bad[0]} is outside the vocabulary of {facts.vocab_size}")
    capacity = (options.num_gpu_blocks - 1) * options.block_size
    if capacity < facts.max_model_len:
        raise OptionsError(
            f"--num-gpu-blocks {options.num_gpu_blocks} of {options.block_size} tokens hold {max(0, capacity)} tokens "
            f"beside the reserved block; one request of --max-model-len {facts.max_model_len} does not fit"
        )
