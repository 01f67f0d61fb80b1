"""The seam between the neutral core and one engine's wire: what a request asks for, what a step says.

The core holds a `Codec` and never an engine's struct names. A codec is built from the layout of the engine version that
answered the handshake.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from typing import Annotated, Any, Protocol

import msgspec

from bridge.wire.tensors import Tensor

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
"""What a contract can carry as a token id."""

Frames = list[bytes]
"""One ZMQ message without the peer identity: type and payload frames, as the engine reads them."""


class Finish(enum.Enum):
    """Why a request ended, in the words of the neutral core."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    REFUSED = "refused"
    """An error that is the request's own fault."""
    OVERLOADED = "overloaded"
    """An error that the same request may not meet later."""


class Constraint(msgspec.Struct, kw_only=True, gc=False):
    """What the output must match, already validated for the engine.

    `kind` is json_schema, json_object, regex, grammar, choice or structural_tag; `value` is the schema, pattern or
    grammar text, the list of choices, or True for json_object. `backend` is the engine's own name for what enforces it.
    """

    kind: str
    value: Any
    backend: str
    backend_was_auto: bool = False


class Sampling(msgspec.Struct, kw_only=True, gc=False):
    """Sampling values with every default already decided; the codec copies them and adds nothing.

    `eos_token_id` and `eos_token_ids` are set even with `ignore_eos`: the codec knows what its engine wants then.
    `top_k` 0 and `min_p` 0 mean off. `seed` None means unseeded.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int = 16
    min_tokens: int = 0
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: list[int] = []
    """What the request asked for; never EOS ids."""
    eos_token_ids: list[int] = []
    """The model's EOS ids, the primary one first."""
    logprobs: int | None = None
    """Most likely tokens reported beside each output token; -1 is the whole vocabulary, None reports nothing."""
    prompt_logprobs: int | None = None
    """The same for each prompt token."""
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words_token_ids: list[list[int]] | None = None
    bypass_prefix_cache: bool = False
    """Nothing of the prompt may come from the prefix cache."""
    constraint: Constraint | None = None


class Adapter(msgspec.Struct, frozen=True, gc=False):
    """A LoRA adapter by the engine's number for it (1 or more), its name and its folder. An argument of `utility` too."""

    number: int
    name: str
    path: str


class GenerateCall(msgspec.Struct, kw_only=True, gc=False):
    """One generation as an engine receives it. `arrival_time` is in seconds since the epoch."""

    wire_id: str
    prompt_token_ids: list[int] | msgspec.Raw
    """The ids, or a msgpack array of them."""
    sampling: Sampling
    arrival_time: float
    priority: int = 0
    trace_headers: dict[str, str] | None = None
    cache_salt: str | None = None
    constrain_from_first_token: bool = False
    """The constraint starts at the first token, whatever reasoning parser the engine runs."""
    session_id: str | None = None
    """Requests of one conversation share it; engines may use it to keep their caches."""
    adapter: Adapter | None = None
    """The adapter to generate with, which the engine has."""
    transfer_params: dict[str, Any] | None = None
    """KV transfer parameters for the engine's connector, as its own kind of object."""
    stream: bool = True
    """Whether tokens are wanted as they come; an engine may send those of other requests in large pieces."""
    native: Any = None
    """What one engine's contract asks of that engine alone, in a struct of its wire; None on every other engine."""


class EmbedCall(msgspec.Struct, kw_only=True, gc=False):
    """One embedding as an engine receives it: one vector for the whole prompt.

    `activation` says whether the vector goes through the pooler's activation (normalization).
    """

    wire_id: str
    prompt_token_ids: list[int] | msgspec.Raw
    """The ids, or a msgpack array of them."""
    arrival_time: float
    activation: bool
    native: Any = None
    """As in `GenerateCall`."""


class Logprobs(msgspec.Struct, frozen=True, gc=False):
    """Log-probabilities of consecutive tokens, columnar and flat: one row of `width` cells a token.

    Column 0 is the token itself, columns 1 to k the k most likely, in which it may come again. `values` are float32 in
    little-endian order. `ranks` has one number a row, 1 for the most likely.
    """

    width: int
    token_ids: Sequence[int]
    values: bytes
    ranks: Sequence[int]

    def rows(self) -> list[tuple[list[int], list[float]]]:
        """(ids, values) of each row."""
        width, count = self.width, len(self.ranks)
        values = struct.unpack(f"<{count * width}f", self.values)
        cuts = [slice(start, start + width) for start in range(0, count * width, width)] if width else []
        return [(list(self.token_ids[cut]), list(values[cut])) for cut in cuts]


class Delta(Protocol):
    """What one step adds to one request. `finish_reason` is the engine's own code, None while it runs."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: Any


class Load(msgspec.Struct, kw_only=True, gc=False):
    """Scheduler load of one rank. `kv_cache_usage` is a fraction in [0, 1]."""

    rank: int = 0
    running: int = 0
    waiting: int = 0
    kv_cache_usage: float = 0.0


class Reply(msgspec.Struct, gc=False):
    """The answer to a utility call; `failure` is the engine's own text."""

    call_id: int
    failure: str | None
    value: Any


class Step(Protocol):
    """One decoded engine output message."""

    outputs: Sequence[Any]
    engine_index: int


class Codec(Protocol):
    """Encodes requests for, and decodes steps of, one engine at one version."""

    engine: str
    version: str

    def add(self, call: GenerateCall) -> Frames: ...

    def add_embed(self, call: EmbedCall) -> Frames: ...

    def abort(self, wire_ids: Sequence[str]) -> Frames: ...

    def utility(self, call_id: int, method: str, args: Sequence[Any]) -> Frames: ...

    def ping(self, call_id: int) -> Frames:
        """A call that the engine's loop answers between two steps and that changes nothing."""
        ...

    def is_death(self, frames: Sequence[Any]) -> bool:
        """Whether the message is the engine's last word instead of a step."""
        ...

    def step(self, frames: Sequence[Any]) -> Any:
        """Decode one output message to a `Step`; raises `WireError` when it cannot."""
        ...

    def has_load(self, step: Any) -> bool:
        """Whether `load` has something to read; costs nothing, so that a step's load is read when it is asked for."""
        ...

    def load(self, step: Any) -> Load | None: ...

    def reply(self, step: Any) -> Reply | None: ...

    def finish(self, delta: Any) -> tuple[Finish, int | str | None, str | None]:
        """(reason, stop token id or stop string the engine named or None, error text or None) of a terminal delta."""
        ...

    def cached_tokens(self, delta: Any) -> int | None:
        """Prompt tokens served from the prefix cache, when this delta carries the figure."""
        ...

    def logprobs(self, step: Any, delta: Any) -> Logprobs | None:
        """One row for each of the delta's tokens, when the request asked; raises `WireError`."""
        ...

    def prompt_logprobs(self, step: Any, delta: Any) -> Logprobs | None:
        """One row for each prompt token but the first, once, when the request asked; raises `WireError`."""
        ...

    def pooled(self, step: Any, delta: Any) -> Tensor | None:
        """The result of an embedding; raises `WireError`."""
        ...

    def transfer_params(self, delta: Any) -> dict[str, Any] | None:
        """What the engine's KV connector hands over for the other leg of a disaggregated request."""
        ...

    def spec_counts(self, delta: Any) -> tuple[int, int]:
        """(accepted, drafted) speculative tokens of the whole request, on its terminal delta; zeros when not told."""
        ...
