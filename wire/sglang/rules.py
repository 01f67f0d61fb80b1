"""SGLang's limits on what a request may hold, as data for the guard.

Read from SamplingParams.verify and normalize, the scheduler's request handling, its penalizers and sampler, and the
tokenizer manager of SGLang 0.5.23, and compared with 0.5.18, 0.5.20 and 0.5.21. The lane's plugin verifies sampling
values and answers a bad one with an abort; what it does not look at reaches tensors: a token id or bias outside the
vocabulary, more log-probabilities than tokens, a number that int32 does not hold, an adapter nobody loaded and a logit
processor that cannot be unpickled end the scheduler (`death`).
"""

from __future__ import annotations

from collections.abc import Mapping

from bridge.wire.rule import Rule

INT32_MAX = 2**31 - 1

MAX_HELD_BACK_STOP_IDS = INT32_MAX
"""No limit: `min_new_tokens` masks any number of ids."""

MAX_BIAS = 1e4
"""Larger ones mean the same, but divided by the smallest temperature they overflow: a logit that is not a number ends the
scheduler (0.5.18 to 0.5.23, where SGLANG_SANITIZE_NAN_LOGITS is off)."""

LEAST_REPETITION = 1e-3
"""SGLang's own limit is 0, whose neighbours overflow the logits they divide, as a bias would."""

GREEDY_SAMPLES_DIFFER = True
"""`n` above 1 is taken with temperature 0 too, as SGLang's own server takes it."""

OWN_CONSTRAINTS = frozenset({"json_schema", "json_object", "regex", "grammar", "structural_tag"})
"""Kinds of constraint that the scheduler checks itself: one it cannot compile ends its request."""

_IDS_FIT = "an id outside the vocabulary indexes past the logits"

RULES: Mapping[str, Rule] = {
    "temperature": Rule(kind="float", low=0.0, harm="error", note="0 is greedy"),
    "top_p": Rule(kind="float", low=0.0, low_exclusive=True, high=1.0, harm="error", note="1 is off"),
    "top_k": Rule(
        kind="int", low=1, high=INT32_MAX, also=(-1,), harm="death", note="-1 is off; an int32 in the sampler"
    ),
    "min_p": Rule(kind="float", low=0.0, high=1.0, harm="error", note="0 is off"),
    "frequency_penalty": Rule(kind="float", low=-2.0, high=2.0, harm="error"),
    "presence_penalty": Rule(kind="float", low=-2.0, high=2.0, harm="error"),
    "repetition_penalty": Rule(
        kind="float", low=LEAST_REPETITION, high=2.0, harm="death", note="1 is off; see LEAST_REPETITION"
    ),
    "n": Rule(kind="int", low=1, high=16384, harm="error", note="the lane takes 1; fanned out here"),
    "max_tokens": Rule(
        kind="int", low=0, high=INT32_MAX, harm="error", note="0 scores the prompt; capped to the context and KV cache"
    ),
    "min_tokens": Rule(kind="int", low=0, high=INT32_MAX, harm="error", note="at most max_tokens; needs a tokenizer"),
    "seed": Rule(kind="int", low=-(2**63), high=2**63 - 1, harm="error"),
    "ignore_eos": Rule(kind="bool", harm="error", note="SGLang then ignores stop_token_ids too"),
    "stop_token_ids": Rule(kind="ids", low=0, high="vocab_size", high_exclusive=True, harm="death", note=_IDS_FIT),
    "stop": Rule(kind="words", max_items=32, harm="error", note="matched by the scheduler, which needs its tokenizer"),
    "logprobs": Rule(kind="int", low=0, high="vocab_size", harm="death", note="more than there are is no top-k"),
    "prompt_logprobs": Rule(kind="int", low=0, high="vocab_size", harm="death", note="as logprobs"),
    "logprob_token_ids": Rule(kind="ids", low=0, high="vocab_size", high_exclusive=True, harm="death", note=_IDS_FIT),
    "logit_bias": Rule(kind="bias", low=0, high="vocab_size", high_exclusive=True, harm="death", note=_IDS_FIT),
    "prompt_token_ids": Rule(
        kind="ids",
        low=0,
        high="vocab_size",
        high_exclusive=True,
        min_items=1,
        max_items="max_model_len",
        harm="death",
        note="the engine refuses those within 6 tokens of the context, or of the KV cache, by itself",
    ),
}
"""Field → limit."""
