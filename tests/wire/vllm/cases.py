"""What the golden vectors prove: one `GenerateCall` for each thing `add` can say, and the values around each limit."""

from __future__ import annotations

from typing import Any

from bridge.wire.codec import GenerateCall, Sampling

CLIENT_INDEX = 1


def _call(sampling: Sampling, **changes: object) -> GenerateCall:
    values: dict[str, object] = {"wire_id": "1.7.42", "prompt_token_ids": [1, 15043, 29892], "arrival_time": 1764.25}
    values.update(changes)
    return GenerateCall(sampling=sampling, **values)  # type: ignore[arg-type]


CALLS: dict[str, GenerateCall] = {
    "plain": _call(Sampling(max_tokens=5)),
    "one eos": _call(Sampling(max_tokens=64, eos_token_ids=[2])),
    "several eos": _call(Sampling(max_tokens=64, eos_token_ids=[128009, 128001, 128008])),
    "several eos, own stop ids": _call(
        Sampling(max_tokens=64, eos_token_ids=[128009, 128001], stop_token_ids=[13, 128001, 13])
    ),
    "own stop id is the primary eos": _call(Sampling(max_tokens=8, eos_token_ids=[2, 3], stop_token_ids=[2])),
    "eos ignored": _call(Sampling(max_tokens=8, ignore_eos=True, eos_token_ids=[2, 3])),
    "eos ignored, own stop ids": _call(
        Sampling(max_tokens=8, ignore_eos=True, eos_token_ids=[2, 3], stop_token_ids=[13, 2])
    ),
    "no eos": _call(Sampling(max_tokens=8, stop_token_ids=[13])),
    "min tokens": _call(Sampling(max_tokens=8, min_tokens=8, eos_token_ids=[2, 3], stop_token_ids=[13])),
    "greedy": _call(Sampling(max_tokens=8, temperature=0.0, top_p=0.5, top_k=7, min_p=0.1)),
    "temperature under the floor": _call(Sampling(max_tokens=8, temperature=0.000001)),
    "highest": _call(
        Sampling(
            max_tokens=131072,
            min_tokens=131072,
            temperature=2.0,
            top_p=1.0,
            top_k=2**31 - 1,
            min_p=1.0,
            frequency_penalty=2.0,
            presence_penalty=2.0,
            repetition_penalty=1e6,
            seed=2**63 - 1,
        )
    ),
    "lowest": _call(
        Sampling(
            max_tokens=1,
            min_tokens=0,
            temperature=0.01,
            top_p=1e-9,
            top_k=-1,
            min_p=0.0,
            frequency_penalty=-2.0,
            presence_penalty=-2.0,
            repetition_penalty=1e-9,
            seed=-(2**63),
        )
    ),
    "seed 0": _call(Sampling(seed=0)),
    "seed -1": _call(Sampling(seed=-1)),
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
            eos_token_ids=[2],
        ),
        priority=-3,
        trace_headers={"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"},
    ),
    "ids of every width": _call(Sampling(), prompt_token_ids=[0, 127, 128, 255, 256, 65535, 65536, 262143]),
    "a long prompt": _call(Sampling(), prompt_token_ids=[7 * i % 251 for i in range(300)]),
    "the longest wire id": _call(Sampling(), wire_id="4294967295.18446744073709551615.18446744073709551615"),
}

_INF = float("inf")
_NAN = float("nan")

_EDGES: dict[str, list[Any]] = {
    "temperature": [-1.0, -1e-9, 0, 0.0, 1e-9, 0.5, 1, 2.0, 2.0000001, _INF, -_INF, _NAN, None, "1", True, [1.0]],
    "top_p": [-0.1, 0, 0.0, 1e-9, 1, 1.0, 1.0000001, _INF, _NAN, None, "1", True],
    "top_k": [-2, -1, 0, 1, 2**31, 2**63 - 1, 1.5, None, "1", True],
    "min_p": [-0.1, 0, 1.0, 1.1, _INF, _NAN, None, "1", True],
    "frequency_penalty": [-2.1, -2.0, 0, 2.0, 2.1, _INF, _NAN, None, "1", True],
    "presence_penalty": [-2.1, -2.0, 0, 2.0, 2.1, _INF, _NAN, None, "1", True],
    "repetition_penalty": [-1.0, 0, 0.0, 1e-9, 1, 2.0, 1e30, _INF, _NAN, None, "1", True],
    "n": [-1, 0, 1, 2, 16384, 16385, None, 1.5, "1", True],
    "max_tokens": [-1, 0, 1, 2**31 - 1, 2**31, 1.5, "1", True],
    "min_tokens": [-1, 0, 1, 16, 17, 1.5, None, "1", True],
    "seed": [-(2**63), -1, 0, 2**63 - 1, 2**63, 1.5, "1", True],
    "ignore_eos": [True, False, 0, 1, None, "true"],
    "stop_token_ids": [[], [0], [2**31], [-1], [1.5], ["1"], [None], [True], "1", 5, {}],
    "stop": [[], ["a"], [""], "", 5, [5]],
    "bad_words": [[], ["a"], [""], [5], 5],
    "logprobs": [-2, -1, 0, 5, 20, 1.5, "1", True],
    "prompt_logprobs": [-2, -1, 0, 5, 20, 1.5, "1", True],
    "logprob_token_ids": [[], [0, 1], [1.5], ["1"], 5],
    "logit_bias": [{}, {1: 1.0}, {1: 1}, {"1": 1.0}, {1: "1"}, {1: None}, [1]],
    "allowed_token_ids": [[0], [0, 1], [1.5], ["1"], 5],
    "thinking_token_budget": [-2, -1, 0, 5, 1.5, "1", True],
    "stream_interval": [-1, 0, 1, 5, 1.5, "1", True],
}
_POOLING_TASKS = ["embed", "classify", "token_embed", "token_classify", "plugin", "embed&token_classify"]

VALUES: list[tuple[str, str, Any]] = [
    *(("sampling_params", field, value) for field, values in _EDGES.items() for value in values),
    *(("pooling_params", "pooling_task", value) for value in (*_POOLING_TASKS, "score", "encode", "bogus", "", 5)),
    *(("lora_request", "lora_int_id", value) for value in (-1, 0, 1, 2**63 - 1, 1.5, "1", None, True)),
    *(("lora_request", "lora_path", value) for value in ("p", "", None, 5)),
]
"""(field of EngineCoreRequest, the name in `rules.py`, value): the edges of each limit, and values of another type."""
