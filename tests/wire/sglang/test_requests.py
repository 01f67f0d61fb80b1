"""What we send: proved by SGLang's own decoder when the vectors were made, and field by field by an independent one."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from bridge.wire.codec import Constraint, GenerateCall, Sampling
from tests.wire.sglang import cases
from tests.wire.sglang.recorded import CALL_IDS, CALLS, VECTORS, VERSIONS, codec_of, frames_of, oracle


@pytest.mark.parametrize("version", VERSIONS)
def test_every_case_is_in_the_vectors(version: str) -> None:
    assert [entry["name"] for entry in VECTORS[version]["calls"]] == list(cases.CALLS)
    assert [entry["name"] for entry in VECTORS[version]["embeds"]] == list(cases.EMBEDS)


@pytest.mark.parametrize(("version", "entry"), CALLS, ids=CALL_IDS)
def test_a_request_is_the_one_that_sglang_read(version: str, entry: dict[str, Any]) -> None:
    """These bytes are those SGLang's decoder was given, and it read in them what the request is in its own words."""
    assert codec_of(version).add(cases.CALLS[entry["name"]]) == frames_of(entry, "ours")
    assert entry["own_words_differ_in"] == []


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", cases.EMBEDS)
def test_an_embedding_is_the_one_that_sglang_read(version: str, name: str) -> None:
    entry = next(one for one in VECTORS[version]["embeds"] if one["name"] == name)
    assert codec_of(version).add_embed(cases.EMBEDS[name]) == frames_of(entry, "ours")
    assert entry["own_words_differ_in"] == []


@pytest.mark.parametrize(("version", "entry"), CALLS, ids=CALL_IDS)
def test_each_field_lands_in_its_place(version: str, entry: dict[str, Any]) -> None:
    call = cases.CALLS[entry["name"]]
    frames = codec_of(version).add(call)
    tag, *values = oracle(frames[1])
    declared = VECTORS[version]["declared"]
    assert tag == "TokenizedGenerateReqInput" and len(values) <= len(declared[tag])
    sent = dict(zip(declared[tag], values, strict=False))
    params = dict(zip(declared["SamplingParams"], sent["sampling_params"], strict=False))
    assert (sent["rid"], sent["input_ids"], sent["stream"]) == (call.wire_id, call.prompt_token_ids, call.stream)
    assert sent["cache_salt"] == call.cache_salt
    for ours, theirs in (("max_tokens", "max_new_tokens"), ("min_tokens", "min_new_tokens"), ("top_p", "top_p")):
        assert params[theirs] == getattr(call.sampling, ours), theirs
    assert params["n"] == 1 and params["top_k"] != 0
    assert len(frames) == (3 if call.trace_headers else 2)
    if call.trace_headers:
        assert oracle(frames[2]) == {"trace_headers": call.trace_headers}


def test_a_constraint_without_a_field_is_not_sent() -> None:
    constraint = Constraint(kind="choice", value=["a"], backend="")
    call = GenerateCall(wire_id="w", prompt_token_ids=[1], sampling=Sampling(constraint=constraint), arrival_time=0.0)
    with pytest.raises(ValueError, match="choice"):
        codec_of("0.5.23").add(call)


def test_aborts_and_control_calls() -> None:
    codec = codec_of("0.5.23")
    assert codec.abort(("1.0.1", "1.0.2")) == [b"\x01", msgspec.msgpack.encode(["1.0.1", "1.0.2"])]
    kind, body = codec.utility(2**63, "flush_cache", (2.5,))
    assert kind == b"\x02" and oracle(body) == [2**63, "flush_cache", [2.5]]
