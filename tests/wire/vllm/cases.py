"""The generations that the golden vectors prove: one `GenerateCall` for each thing `add` can say."""

from __future__ import annotations

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
