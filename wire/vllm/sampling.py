"""SamplingParams as vLLM's engine core receives it: a map, which the engine validates again when it decodes it.

A value its decoder refuses ends the engine's input thread without a word (vLLM 0.27 to 0.33), so the guard has checked
every value against `rules.py` before it comes here. What vLLM's own front end fills in is filled in here: the EOS ids.
"""

from __future__ import annotations

from typing import Any

import msgspec

from bridge.wire.codec import Constraint, Sampling

DELTA = 1
"""RequestOutputKind: each output carries only what is new."""

MIN_TEMPERATURE = 0.01
"""vLLM raises a temperature between 0 and this to this; done here, because the engine logs a warning each time."""


class SamplingParams(msgspec.Struct, omit_defaults=True, kw_only=True, gc=False):
    """The keys we send (vLLM 0.27 to 0.33). The engine ignores a key it does not know.

    Values with a meaning of their own are always sent, so that a changed default in the engine changes nothing. The
    engine stops on `eos_token_id` and `stop_token_ids`, and holds `all_stop_token_ids` back until `min_tokens`.
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    detokenize: bool
    output_kind: int
    seed: int | None = None
    stop_token_ids: list[int] = []
    eos_token_id: int | None = msgspec.field(default=None, name="_eos_token_id")
    all_stop_token_ids: list[int] = msgspec.field(default_factory=list, name="_all_stop_token_ids")
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_reading_prefix_cache: bool | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words_token_ids: list[list[int]] | None = msgspec.field(default=None, name="_bad_words_token_ids")
    structured_outputs: dict[str, Any] | None = None
    extra_args: dict[str, Any] | None = None


_CONSTRAINTS = {
    "json_schema": "json",
    "json_object": "json_object",
    "regex": "regex",
    "grammar": "grammar",
    "choice": "choice",
    "structural_tag": "structural_tag",
}
"""Our word for a constraint → its key in StructuredOutputsParams."""


def structured_outputs(constraint: Constraint) -> dict[str, Any]:
    """StructuredOutputsParams as a map; what is left out takes the dataclass's default. Exactly one constraint is set."""
    return {
        _CONSTRAINTS[constraint.kind]: constraint.value,
        "_backend": constraint.backend,
        "_backend_was_auto": constraint.backend_was_auto,
    }


def sampling_params(sampling: Sampling, transfer_params: dict[str, Any] | None = None) -> SamplingParams:
    """The engine's view of `sampling`, with the KV connector's parameters beside it.

    A request for prompt logprobs must not read the prefix cache: cached tokens have none.

    EOS as vLLM 0.27 to 0.33 does it: the primary id stops through `_eos_token_id`, the model's other EOS ids through
    `stop_token_ids`, neither with `ignore_eos`; all of them, and the request's own stop ids, are held back until
    `min_tokens` whether or not EOS is ignored.
    """
    eos = sampling.eos_token_ids
    stop = sampling.stop_token_ids
    held_back = list(dict.fromkeys([*stop, *eos]))
    if eos and not sampling.ignore_eos:
        stop = list(dict.fromkeys([*stop, *eos[1:]]))
    temperature = sampling.temperature
    if 0.0 < temperature < MIN_TEMPERATURE:
        temperature = MIN_TEMPERATURE
    return SamplingParams(
        temperature=temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=sampling.repetition_penalty,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        ignore_eos=sampling.ignore_eos,
        detokenize=False,
        output_kind=DELTA,
        seed=sampling.seed,
        stop_token_ids=stop,
        eos_token_id=eos[0] if eos and not sampling.ignore_eos else None,
        all_stop_token_ids=held_back,
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        skip_reading_prefix_cache=True
        if sampling.bypass_prefix_cache or sampling.prompt_logprobs is not None
        else None,
        logit_bias=sampling.logit_bias,
        allowed_token_ids=sampling.allowed_token_ids,
        bad_words_token_ids=sampling.bad_words_token_ids,
        structured_outputs=None if sampling.constraint is None else structured_outputs(sampling.constraint),
        extra_args=None if transfer_params is None else {"kv_transfer_params": transfer_params},
    )
