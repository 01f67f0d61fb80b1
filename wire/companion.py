"""What the companion (code in the engine's Python) tells the bridge: the facts the engine wire does not carry, and
whether the engine can enforce a constraint.

The facts are one line of JSON on the companion's standard output. One that stays then answers on a unix socket, in
`framing`: a `Hello` first, then a `Verdict` for each `Check`, in any order.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

COMPANION_VERSION = 1
"""Of the messages on the socket."""

MAX_MESSAGE = 8 << 20
"""Bytes of one message on the socket."""


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
    needs_coordinator: bool = False
    """Data-parallel ranks of this model step together (mixture of experts), which takes a coordinator between them."""
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


class Hello(msgspec.Struct, tag="hello", kw_only=True):
    """Companion → front end, first message of a connection."""

    version: int = COMPANION_VERSION
    bridge_version: str
    engine_version: str


class Check(msgspec.Struct, tag="check", kw_only=True):
    """Front end → companion: can the engine enforce this? `kind` and `value` are those of `codec.Constraint`.

    `backend` is what enforces constraints in this engine already; empty when nothing does yet.
    """

    id: int
    kind: str
    value: bool | str | list[str]
    backend: str = ""


class Accepted(msgspec.Struct, tag="accepted", kw_only=True):
    """Companion → front end: send this. The engine's own validation may have rewritten `kind` and `value`."""

    id: int
    kind: str
    value: bool | str | list[str]
    backend: str
    backend_was_auto: bool = False


class Cause(enum.Enum):
    """Why a constraint is not sent."""

    INVALID = "invalid"
    """The engine's own validation refuses it."""
    COST = "cost"
    """Checking it takes more time or memory than the limit, or crashes the code that would enforce it."""
    BACKEND = "backend"
    """Another backend could enforce it; the engine has its one backend already."""
    UNABLE = "unable"
    """This engine enforces nothing."""
    AGAIN = "again"
    """The companion could not decide; the same check may pass in a moment."""


class Refused(msgspec.Struct, tag="refused", kw_only=True):
    """Companion → front end: do not send it. `reason` is one line for people."""

    id: int
    cause: Cause
    reason: str


Verdict = Accepted | Refused
FromCompanion = Hello | Accepted | Refused
