"""vLLM's limits on what a request may hold, as data for the guard.

Read from SamplingParams._verify_args and verify, InputProcessor, PoolingParams, LoRARequest and the two model runners
of vLLM 0.32, and compared with 0.27 to 0.33, whose SamplingParams enforce the same. vLLM's own front end checks all of
this and its engine core trusts it: a value its decoder refuses ends the input thread in silence (`wedge`), one its
workers cannot use ends the engine (`death`). A proto field that was never set reads 0, which for `top_p`,
`repetition_penalty` and `n` is a wedge.
"""

from __future__ import annotations

from collections.abc import Mapping

from bridge.wire.rule import Rule

INT32_MAX = 2**31 - 1
INT64_MIN = -(2**63)
INT64_MAX = 2**63 - 1

MAX_HELD_BACK_STOP_IDS = 128
"""With `min_tokens` above 0, the request's stop ids and the model's EOS ids together: the newer model runner raises on
more, which is death (0.32, v1/worker/gpu/sample/logit_bias.py)."""

MAX_BIAS: float | None = 100.0
"""vLLM's front end clamps each logit bias to this, either way."""

GREEDY_SAMPLES_DIFFER = False
"""vLLM's front end refuses `n` above 1 with temperature 0."""

_WHOLE_VOCABULARY = "-1 is the whole vocabulary, which vLLM's front end refuses when max_logprobs is less"
_IDS_FIT = "an id outside the vocabulary indexes past the logits"

RULES: Mapping[str, Rule] = {
    "temperature": Rule(
        kind="float",
        low=0.0,
        high=2.0,
        harm="wedge",
        note="0 is greedy; between 0 and 0.01 vLLM uses 0.01",
    ),
    "top_p": Rule(kind="float", low=0.0, low_exclusive=True, high=1.0, harm="wedge", note="1 is off"),
    "top_k": Rule(kind="int", low=0, high=INT64_MAX, also=(-1,), harm="wedge", note="0 and -1 are off"),
    "min_p": Rule(kind="float", low=0.0, high=1.0, harm="wedge", note="0 is off"),
    "frequency_penalty": Rule(kind="float", low=-2.0, high=2.0, harm="wedge"),
    "presence_penalty": Rule(kind="float", low=-2.0, high=2.0, harm="wedge"),
    "repetition_penalty": Rule(
        kind="float", low=0.0, low_exclusive=True, harm="wedge", note="1 is off; must be finite; no upper limit"
    ),
    "n": Rule(
        kind="int",
        low=1,
        high=16384,
        harm="wedge",
        note="must be 1 with temperature 0; the engine core ignores it, so it is sent as 1 and fanned out",
    ),
    "max_tokens": Rule(
        kind="int",
        low=1,
        high=INT32_MAX,
        harm="wedge",
        note="nil is an error of the one request; with the prompt above 2**31 - 1 the newer model runner dies",
    ),
    "min_tokens": Rule(
        kind="int",
        low=0,
        high=INT32_MAX,
        harm="wedge",
        note="at most max_tokens; above 0, see MAX_HELD_BACK_STOP_IDS",
    ),
    "seed": Rule(kind="int", low=INT64_MIN, high=INT64_MAX, harm="death", note="-1 means no seed"),
    "ignore_eos": Rule(kind="bool", harm="wedge"),
    "stop_token_ids": Rule(kind="ids", low=0, high="vocab_size", high_exclusive=True, harm="death", note=_IDS_FIT),
    "stop": Rule(
        kind="words",
        harm="wedge",
        note="the engine core never matches text; an empty string is a wedge, as is any with detokenize false",
    ),
    "bad_words": Rule(kind="words", harm="wedge", note="needs a tokenizer: the engine reads _bad_words_token_ids only"),
    "logprobs": Rule(kind="int", low=0, high="max_logprobs", also=(-1,), harm="wedge", note=_WHOLE_VOCABULARY),
    "prompt_logprobs": Rule(kind="int", low=0, high="max_logprobs", also=(-1,), harm="wedge", note=_WHOLE_VOCABULARY),
    "logprob_token_ids": Rule(
        kind="ids",
        low=0,
        high="vocab_size",
        high_exclusive=True,
        max_items=128,
        harm="death",
        note="`logprobs`, when set too, must equal its length",
    ),
    "logit_bias": Rule(
        kind="bias",
        low=0,
        high="vocab_size",
        high_exclusive=True,
        max_items=1024,
        harm="death",
        note=f"{_IDS_FIT}; not with speculative decoding; vLLM's front end clamps each bias to [-100, 100]",
    ),
    "allowed_token_ids": Rule(
        kind="ids",
        low=0,
        high="vocab_size",
        high_exclusive=True,
        min_items=1,
        max_items=1024,
        harm="death",
        note=_IDS_FIT,
    ),
    "bypass_prefix_cache": Rule(kind="bool", harm="wedge", note="sent as skip_reading_prefix_cache"),
    "thinking_token_budget": Rule(kind="int", low=0, also=(-1,), harm="wedge", note="-1 is unlimited"),
    "stream_interval": Rule(kind="int", low=1, harm="wedge", note="read by vLLM's own front end only"),
    "priority": Rule(kind="int", low=INT64_MIN, high=INT64_MAX, harm="wedge", note="lower is earlier"),
    "prompt_token_ids": Rule(
        kind="ids",
        low=0,
        high="vocab_size",
        high_exclusive=True,
        min_items=1,
        max_items="max_model_len",
        harm="death",
        note="a generation needs room for one token more, so there it is max_model_len - 1",
    ),
    "pooling_task": Rule(
        kind="word",
        choices=("embed", "classify", "token_embed", "token_classify", "plugin", "embed&token_classify"),
        harm="wedge",
        note="and one that get_supported_tasks names",
    ),
    "lora_int_id": Rule(kind="int", low=1, high=INT64_MAX, harm="wedge"),
    "lora_path": Rule(kind="word", harm="wedge"),
    "structured_output_backend": Rule(
        kind="word",
        choices=("xgrammar", "guidance", "outlines", "lm-format-enforcer"),
        harm="error",
        note="exactly one constraint, or a wedge; the engine keeps the first backend it sees for its life",
    ),
}
"""Field → limit. A value that these allow may still break a rule between two fields; the notes name those."""
