"""What the golden vectors prove: one call for each thing `add` and `add_embed` can say, and values around each limit."""

from __future__ import annotations

from typing import Any

from bridge.wire.codec import Constraint, EmbedCall, GenerateCall, Sampling
from bridge.wire.sglang.requests import EmbedNative, Native, Transfer
from bridge.wire.sglang.sampling import Stops


def _call(sampling: Sampling, native: Native | None = None, **changes: object) -> GenerateCall:
    values: dict[str, object] = {"wire_id": "1.7.42", "prompt_token_ids": [1, 15043, 29892], "arrival_time": 1764.25}
    values.update(changes)
    return GenerateCall(sampling=sampling, native=native, **values)  # type: ignore[arg-type]


def _constrained(kind: str, value: str) -> GenerateCall:
    return _call(Sampling(max_tokens=64, constraint=Constraint(kind=kind, value=value, backend="")))


CALLS: dict[str, GenerateCall] = {
    "plain": _call(Sampling(max_tokens=5)),
    "not streamed": _call(Sampling(max_tokens=5), stream=False),
    "eos ids are the engine's": _call(Sampling(max_tokens=64, eos_token_ids=[2, 3])),
    "eos ignored": _call(Sampling(max_tokens=8, ignore_eos=True, eos_token_ids=[2])),
    "greedy": _call(Sampling(max_tokens=8, temperature=0.0, top_p=0.5, top_k=7, min_p=0.1)),
    "every value": _call(
        Sampling(
            max_tokens=100,
            min_tokens=3,
            temperature=0.7,
            top_p=0.9,
            top_k=40,
            min_p=0.05,
            frequency_penalty=0.25,
            presence_penalty=-0.5,
            repetition_penalty=1.1,
            seed=1234,
            stop_token_ids=[13, 15],
            logit_bias={5: -3.5, 7: 100.0},
        ),
        Native(
            stops=Stops(
                strings=["\n\n", "Ende"],
                skip_special_tokens=False,
                spaces_between_special_tokens=False,
                no_stop_trim=True,
                stream_interval=4,
            ),
            custom_params={"token_id": 5, "scale": 0.5, "tags": ["a", 1], "map": {"x": None}},
        ),
        cache_salt="salt",
    ),
    "top_k -1": _call(Sampling(max_tokens=8, top_k=-1)),
    "scores the prompt": _call(Sampling(max_tokens=0, logprobs=0), Native(logprob_start=1, scored_ids=[3, 4])),
    "logprobs of the output": _call(Sampling(max_tokens=8, logprobs=5)),
    "logprobs of the prompt": _call(Sampling(max_tokens=8, logprobs=2, prompt_logprobs=2), Native(logprob_start=0)),
    "logprobs of the prompt, in neutral words": _call(Sampling(max_tokens=8, prompt_logprobs=3)),
    "hidden states and reasoning": _call(Sampling(max_tokens=8), Native(hidden_states=True, reasoning=True)),
    "adapter and processor": _call(Sampling(max_tokens=8), Native(lora_id="ad1", logit_processor='{"callable":"00"}')),
    "transfer": _call(Sampling(max_tokens=8), Native(transfer=Transfer(host="10.0.0.1", port=8998, room=0))),
    "json schema": _constrained("json_schema", '{"type":"object"}'),
    "regex": _constrained("regex", "[a-z]+"),
    "grammar": _constrained("grammar", 'root ::= "a"'),
    "structural tag": _constrained("structural_tag", '{"type":"structural_tag"}'),
    "ids of every width": _call(Sampling(), prompt_token_ids=[0, 127, 128, 255, 256, 65535, 65536, 262143]),
    "trace": _call(Sampling(max_tokens=5), trace_headers={"traceparent": "00-0af7-b7ad-01"}),
    "the longest wire id": _call(Sampling(), wire_id="4294967295.18446744073709551615.18446744073709551615"),
}

EMBEDS: dict[str, EmbedCall] = {
    "embedding": EmbedCall(wire_id="1.7.43", prompt_token_ids=[1, 2, 3], arrival_time=1.5, activation=True),
    "embedding with token types": EmbedCall(
        wire_id="1.7.44",
        prompt_token_ids=[1, 2],
        arrival_time=1.5,
        activation=False,
        native=EmbedNative(token_type_ids=[0, 1]),
    ),
}

_INF = float("inf")
_NAN = float("nan")

VALUES: list[tuple[str, str, Any]] = [
    (name, field, value)
    for name, field, values in (
        ("temperature", "temperature", [-1.0, -1e-9, 0.0, 1e-9, 0.5, 2.0, 100.0, _INF, _NAN]),
        ("top_p", "top_p", [-0.1, 0.0, 1e-9, 1.0, 1.0000001, _INF, _NAN]),
        ("top_k", "top_k", [-2, -1, 0, 1, 2**31 - 1, 1.5]),
        ("min_p", "min_p", [-0.1, 0.0, 1.0, 1.1, _INF, _NAN]),
        ("frequency_penalty", "frequency_penalty", [-2.1, -2.0, 0.0, 2.0, 2.1, _INF, _NAN]),
        ("presence_penalty", "presence_penalty", [-2.1, -2.0, 0.0, 2.0, 2.1, _INF, _NAN]),
        ("repetition_penalty", "repetition_penalty", [-1.0, 0.0, 1e-9, 1.0, 2.0, 2.1, _INF, _NAN]),
        ("max_tokens", "max_new_tokens", [-1, 0, 1, 16, 2**31 - 1, 1.5]),
        ("min_tokens", "min_new_tokens", [-1, 0, 1, 16, 17, 1.5]),
        ("ignore_eos", "ignore_eos", [True, False, 1]),
        ("stop_token_ids", "stop_token_ids", [[], [0], [31999], [1.5], ["1"]]),
        ("stop", "stop", [[], ["a"], ["a"] * 32, ["a"] * 33, [5]]),
        ("logit_bias", "logit_bias", [{}, {"1": 1.0}, {"31999": -1.0}, {"32000": 1.0}, {"-1": 1.0}, {"x": 1.0}]),
        ("seed", "sampling_seed", [-(2**63), -1, 0, 2**63 - 1, 2**63, 1.5]),
    )
    for value in values
]
"""(name in `rules.py`, field of SamplingParams, value): the edges of each limit."""

VOCABULARY = 32000
