"""The limits the guard reads, compared with what SGLang's own SamplingParams took and refused."""

from __future__ import annotations

import msgspec
import pytest

from bridge.wire.companion import Facts
from bridge.wire.sglang.rules import RULES
from tests.wire.sglang.cases import VOCABULARY
from tests.wire.sglang.recorded import VECTORS, VERSIONS

FACTS = Facts(
    engine="sglang",
    engine_version="0.5.23",
    bridge_version="0",
    model_path="m",
    tokenizer_path="m",
    served_model_name="m",
    vocab_size=VOCABULARY,
    max_model_len=4096,
)
RESOLVED = {name: rule.resolved(FACTS) for name, rule in RULES.items()}
VALUES = [(version, entry) for version in VERSIONS for entry in VECTORS[version]["values"]]
IDS = [f"{version}: {entry['field']}" for version, entry in VALUES]

ACROSS_FIELDS = {"min_tokens": [17]}
"""Refused because of another field: the recorded requests have max_new_tokens 16."""


STRICTER_LATER = {("0.5.18", "stop"), ("0.5.18", "seed"), ("0.5.20", "seed")}
"""Limits that a later release brought."""


DEADLY = {"repetition_penalty": [1e-9]}
"""What SamplingParams takes and our rules refuse, because the sampler ends in numbers that are none."""


def read(field: str, values: object) -> list[object]:
    """The recorded values, the keys of a bias as the guard sees them."""
    found = [msgspec.msgpack.decode(bytes.fromhex(value)) for value in values]  # type: ignore[attr-defined]
    if field != "logit_bias":
        return found
    return [{int(key) if key.lstrip("-").isdigit() else key: bias for key, bias in one.items()} for one in found]


@pytest.mark.parametrize(("version", "entry"), VALUES, ids=IDS)
def test_nothing_that_sglang_refuses_is_allowed(version: str, entry: dict[str, object]) -> None:
    field = str(entry["field"])
    refused = read(field, entry["refuses"])
    assert refused or (version, field) in STRICTER_LATER
    assert [value for value in refused if RESOLVED[field].allows(value)] == ACROSS_FIELDS.get(field, [])


@pytest.mark.parametrize(("version", "entry"), VALUES, ids=IDS)
def test_everything_that_sglang_takes_is_allowed_unless_it_dies_of_it(version: str, entry: dict[str, object]) -> None:
    field = str(entry["field"])
    newest = next(one for one in VECTORS["0.5.23"]["values"] if one["field"] == field)
    taken = entry if (version, field) not in STRICTER_LATER else newest
    refused = [value for value in read(field, taken["takes"]) if not RESOLVED[field].allows(value)]
    assert refused == DEADLY.get(field, [])


@pytest.mark.parametrize("field", ["stop_token_ids", "logprob_token_ids", "prompt_token_ids"])
def test_token_ids_must_be_in_the_vocabulary(field: str) -> None:
    rule = RESOLVED[field]
    assert rule.allows([0, VOCABULARY - 1])
    for ids in ([VOCABULARY], [-1], [0, 2**40], [True], [1.0], "12", None):
        assert not rule.allows(ids)


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_there_are_no_more_log_probabilities_than_tokens(field: str) -> None:
    assert RESOLVED[field].allows(0) and RESOLVED[field].allows(VOCABULARY)
    assert not RESOLVED[field].allows(VOCABULARY + 1) and not RESOLVED[field].allows(-1)
