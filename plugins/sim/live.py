"""One request inside the simulated engine."""

from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec

from bridge.plugins.sim.blocks import chain
from bridge.plugins.sim.encode import encode
from bridge.plugins.sim.requests import Add, SamplingParams, deadly_detail
from bridge.plugins.sim.tokens import TokenStream, Vocabulary


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the simulated machine. Token counts in tokens, `num_gpu_blocks` in blocks of `block_size` tokens."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_gpu_blocks: int
    block_size: int
    prefix_caching: bool
    eos_after: int | None


class Phase(Enum):
    """Where a request is."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    GONE = "gone"


class Live:
    """A request from its ADD to its end.

    Output made ahead: `bodies`, of which `index` are sent; at `stop_at` the scheduler takes the slow path. `produced`
    counts the tokens in all bodies made so far, `finish` and `stop_reason` belong to the last of them. `todo` prompt (or,
    after preemption, prompt and output) tokens wait to be computed. KV blocks held: those in `named` (content-addressed)
    and `nameless` others; `chain` are the digests of all full blocks, `pending` the tokens after them. `sequence` orders
    admissions. `fatal` is why scheduling it kills the engine. `started`: its first output is out.
    """

    __slots__ = (
        "bodies",
        "cached",
        "chain",
        "client",
        "events",
        "fatal",
        "finish",
        "index",
        "limit",
        "named",
        "nameless",
        "pending",
        "phase",
        "prefix",
        "produced",
        "prompt_tokens",
        "request_id",
        "root",
        "sequence",
        "skip_cache",
        "started",
        "stop_at",
        "stop_ids",
        "stop_reason",
        "stream",
        "todo",
        "trace_headers",
    )

    def __init__(self, add: Add, vocab: Vocabulary, limits: Limits, prefix: bytes) -> None:
        sampling = add.sampling_params or SamplingParams()
        prompt = add.prompt_token_ids or []
        self.request_id = add.request_id
        self.client = add.client_index
        self.prefix = prefix
        self.prompt_tokens = len(prompt)
        self.fatal = deadly_detail(add, vocab.size, limits.max_model_len)
        self.trace_headers = encode(add.trace_headers) if add.trace_headers else None
        self.limit = max(1, min(sampling.max_tokens or 1, limits.max_model_len - len(prompt)))
        stops = set(sampling.stop_token_ids or ())
        if sampling.eos_token_id is not None:
            stops.add(sampling.eos_token_id)
        self.stop_ids = {stop: encode(stop) for stop in stops}
        if sampling.eos_token_id is not None:
            self.stop_ids[sampling.eos_token_id] = encode(None)
        self.skip_cache = bool(sampling.skip_reading_prefix_cache) or sampling.prompt_logprobs is not None
        self.phase = Phase.WAITING
        self.produced = 0
        self.bodies: list[bytes] = []
        self.index = 0
        self.stop_at = 0
        self.finish: int | None = None
        self.stop_reason = encode(None)
        self.started = False
        self.todo = 0
        self.cached = 0
        self.sequence = 0
        self.named: list[bytes] = []
        self.nameless = 0
        self.events: list[dict[str, Any]] = []
        self.root = (add.cache_salt or "").encode()[:64]
        self.chain: list[bytes] = []
        self.pending: list[int] = []
        if self.fatal is None:
            self.stream = TokenStream(
                prompt, sampling.seed, vocab, limits.eos_after, sampling.min_tokens, sampling.all_stop_token_ids
            )
            if limits.prefix_caching:
                self.chain = chain(self.root, prompt, limits.block_size)
                self.pending = prompt[len(self.chain) * limits.block_size :]
