"""The limits the guard reads, compared with what vLLM's own decoder took and refused."""

from __future__ import annotations

import msgspec
import pytest

from bridge.wire.companion import Facts
from bridge.wire.vllm.rules import RULES
from tests.wire.vllm.recorded import VECTORS, VERSIONS

FACTS = Facts(
    engine="vllm",
    engine_version="0.32.0",
    bridge_version="0",
    model_path="m",
    tokenizer_path="m",
    served_model_name="m",
    vocab_size=32000,
    max_model_len=4096,
    max_logprobs=20,
)
RESOLVED = {name: rule.resolved(FACTS) for name, rule in RULES.items()}
VALUES = [(version, entry) for version in VERSIONS for entry in VECTORS[version]["values"]]
IDS = [f"{version}: {entry['field']}" for version, entry in VALUES]

DEADLIER_LATER = {
    "max_tokens": [2**31],
    "seed": [2**63],
    "stop_token_ids": [[2**31], [-1]],
}
"""What the decoder takes and our rules refuse, because a worker cannot hold it or indexes with it."""

ACROSS_FIELDS = {"min_tokens": [17]}
"""Refused because of another field: the recorded requests have max_tokens 16."""


@pytest.mark.parametrize(("version", "entry"), VALUES, ids=IDS)
def test_nothing_that_the_decoder_refuses_is_allowed(version: str, entry: dict[str, object]) -> None:
    rule = RESOLVED[str(entry["field"])]
    refused = [msgspec.msgpack.decode(bytes.fromhex(value)) for value in entry["refuses"]]  # type: ignore[attr-defined]
    assert refused
    assert [value for value in refused if rule.allows(value)] == ACROSS_FIELDS.get(str(entry["field"]), [])


@pytest.mark.parametrize(("version", "entry"), VALUES, ids=IDS)
def test_everything_that_the_decoder_takes_is_allowed_unless_a_worker_dies_of_it(
    version: str, entry: dict[str, object]
) -> None:
    field = str(entry["field"])
    taken = [
        msgspec.msgpack.decode(bytes.fromhex(value), strict=False)
        for value in entry["takes"]  # type: ignore[attr-defined]
    ]
    assert [value for value in taken if not RESOLVED[field].allows(value)] == DEADLIER_LATER.get(field, [])


def test_every_field_with_a_recorded_verdict_has_a_rule_and_the_others_are_not_the_decoders() -> None:
    recorded = {entry["field"] for entry in VECTORS["0.32.0"]["values"]}
    assert set(RULES) - recorded == {"bypass_prefix_cache", "priority", "prompt_token_ids", "structured_output_backend"}


@pytest.mark.parametrize(
    ("field", "limit"),
    [
        ("temperature", "a number at least 0 and at most 2"),
        ("top_p", "a number above 0 and at most 1"),
        ("top_k", f"an integer at least 0 and at most {2**63 - 1} or -1"),
        ("repetition_penalty", "a number above 0"),
        ("logprobs", "an integer at least 0 and at most 20 or -1"),
        ("allowed_token_ids", "a list of integers at least 0 and below 32000 (at least 1 and at most 1024 of them)"),
        ("structured_output_backend", "one of xgrammar, guidance, outlines, lm-format-enforcer"),
        ("ignore_eos", "true or false"),
        ("stop", "a list of strings that are not empty"),
    ],
)
def test_limits_read_as_text(field: str, limit: str) -> None:
    assert RESOLVED[field].limit == limit


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids", "prompt_token_ids"])
def test_token_ids_must_be_in_the_vocabulary(field: str) -> None:
    rule = RESOLVED[field]
    assert rule.allows([0, 31999])
    for ids in ([32000], [-1], [0, 2**40], [True], [1.0], "12", None):
        assert not rule.allows(ids)


def test_a_prompt_has_at_least_one_token_and_fits_the_context() -> None:
    rule = RESOLVED["prompt_token_ids"]
    assert not rule.allows([])
    assert rule.allows([1] * 4096)
    assert not rule.allows([1] * 4097)


def test_biases_are_finite_numbers_by_token_id() -> None:
    rule = RESOLVED["logit_bias"]
    assert rule.allows({0: -100, 31999: 1.5})
    for bias in ({32000: 1.0}, {0: float("nan")}, {0: True}, {"0": 1.0}, [0], dict.fromkeys(range(1025), 1.0)):
        assert not rule.allows(bias)
