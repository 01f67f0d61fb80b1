"""What the companion (code in the engine's Python) tells the bridge: the facts the engine wire does not carry."""

from __future__ import annotations

from typing import Any

import msgspec


class Facts(msgspec.Struct, kw_only=True, frozen=True):
    """Facts about one engine and its model that contracts report and the guard checks against.

    Token counts are in tokens; ids are vocabulary indices. Every field has one source of truth: the engine's own
    configuration objects when the companion could load them, else the model folder.
    """

    engine: str
    engine_version: str
    bridge_version: str
    model_path: str
    tokenizer_path: str
    served_model_name: str
    model_type: str = ""
    architectures: list[str] = []
    vocab_size: int = 0
    max_model_len: int = 0
    is_generation: bool = True
    embed_activation: bool = True
    """Whether embeddings go through the pooler's activation (normalization), as the engine's own front end decides."""
    supports_vision: bool = False
    eos_token_ids: list[int] = []
    """The primary EOS id first, then the generation configuration's extra ids."""
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    default_sampling: dict[str, Any] = {}
    """Sampling defaults of the model's generation configuration, in the engine's own field names."""
    skip_tokenizer_init: bool = False
    supports_lora: bool = False
    max_logprobs: int = 20
    model_dtype: str = ""
    kv_cache_dtype: str = ""
    attention_backend: str = ""
    kv_connector: str = ""
    kv_role: str = ""
    kv_engine_id: str = ""
    reasoning_parser: str = ""
    constrained_decoding_start: str = ""
    server_args: dict[str, Any] = {}
    """The engine's launch arguments, secrets redacted."""
    layouts: dict[str, list[str]] = {}
    """Field order of each positional struct, as the installed engine declares it (struct name → field names)."""
