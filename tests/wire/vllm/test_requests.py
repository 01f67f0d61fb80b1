"""What we send: proved by vLLM's own decoder when the vectors were made, and field by field by an independent one."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from bridge.wire.codec import Adapter, GenerateCall, Sampling
from bridge.wire.vllm.codec import VllmCodec, from_ready
from tests.wire.vllm import cases
from tests.wire.vllm.recorded import CALL_IDS, CALLS, VECTORS, VERSIONS, frames_of, named, oracle


def codec_of(version: str) -> VllmCodec:
    return from_ready({"vllm_version": version}, {}, cases.CLIENT_INDEX)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_case_is_in_the_vectors(version: str) -> None:
    assert [entry["name"] for entry in VECTORS[version]["calls"]] == list(cases.CALLS)


@pytest.mark.parametrize(("version", "entry"), CALLS, ids=CALL_IDS)
def test_a_request_is_the_one_that_vllm_read(version: str, entry: dict[str, Any]) -> None:
    """These bytes are those vLLM's decoder was given, and it read in them what its own front end would have said."""
    frames = codec_of(version).add(cases.CALLS[entry["name"]])
    assert frames == [b"\x00", *frames_of(entry, "ours")]
    assert entry["front_end_differs_in"] == []


@pytest.mark.parametrize(("version", "entry"), CALLS, ids=CALL_IDS)
def test_each_field_lands_in_its_place(version: str, entry: dict[str, Any]) -> None:
    call = cases.CALLS[entry["name"]]
    frames = codec_of(version).add(call)
    fields = named(VECTORS[version]["declared"]["EngineCoreRequest"], oracle(frames[1]))
    sent = {name: value for name, value in fields.items() if value not in (None, False, 0)}
    sampling = sent.pop("sampling_params")
    expected = {
        "request_id": call.wire_id,
        "prompt_token_ids": call.prompt_token_ids,
        "arrival_time": call.arrival_time,
        "client_index": cases.CLIENT_INDEX,
        "priority": call.priority,
        "trace_headers": call.trace_headers,
    }
    assert sent == {name: value for name, value in expected.items() if value not in (None, 0)}
    asked = call.sampling
    for name in ("top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"):
        assert sampling[name] == getattr(asked, name), name
    for name in ("max_tokens", "min_tokens", "ignore_eos"):
        assert sampling[name] == getattr(asked, name), name
    assert sampling.get("seed") == asked.seed
    assert sampling["output_kind"] == 1
    assert sampling["detokenize"] is False


@pytest.mark.parametrize("version", VERSIONS)
def test_vllm_knows_every_sampling_key_that_is_sent(version: str) -> None:
    keys: set[str] = set()
    for call in cases.CALLS.values():
        fields = named(VECTORS[version]["declared"]["EngineCoreRequest"], oracle(codec_of(version).add(call)[1]))
        keys |= set(fields["sampling_params"])
    assert keys <= set(VECTORS[version]["maps"]["SamplingParams"])


@pytest.mark.parametrize("version", VERSIONS)
def test_positional_structs_of_the_package_have_the_declared_order(version: str) -> None:
    vectors = VECTORS[version]
    for entry in vectors["structs"]:
        fields = named(vectors["declared"][entry["struct"]], oracle(frames_of(entry)[0]))
        nested = {"pooling_params", "lora_request", "late_interaction_params"}
        for name, value in entry["says"].items():
            if name not in nested:
                assert fields[name] == value, name


def sampling_of(sampling: Sampling) -> dict[str, Any]:
    call = GenerateCall(wire_id="w", prompt_token_ids=[1], sampling=sampling, arrival_time=0.0)
    fields: dict[str, Any] = oracle(codec_of("0.32.0").add(call)[1])[3]
    return fields


def test_eos_ids_stop_the_engine_and_are_held_back_until_min_tokens() -> None:
    sent = sampling_of(Sampling(eos_token_ids=[2, 3, 4], stop_token_ids=[9, 3]))
    assert sent["_eos_token_id"] == 2
    assert sent["stop_token_ids"] == [9, 3, 4]
    assert sent["_all_stop_token_ids"] == [9, 3, 2, 4]


def test_ignored_eos_ids_do_not_stop_but_are_still_held_back() -> None:
    sent = sampling_of(Sampling(eos_token_ids=[2, 3], stop_token_ids=[9], ignore_eos=True))
    assert "_eos_token_id" not in sent
    assert sent["stop_token_ids"] == [9]
    assert sent["_all_stop_token_ids"] == [9, 2, 3]


def test_a_request_does_not_change_the_lists_it_is_made_from() -> None:
    sampling = Sampling(eos_token_ids=[2, 3], stop_token_ids=[9])
    sampling_of(sampling)
    assert (sampling.eos_token_ids, sampling.stop_token_ids) == ([2, 3], [9])


def test_aborts_and_utility_calls() -> None:
    codec = codec_of("0.32.0")
    assert codec.abort(("1.0.1", "1.0.2")) == [b"\x01", msgspec.msgpack.encode(["1.0.1", "1.0.2"])]
    kind, body = codec.utility(2**63, "profile", (True, None))
    assert kind == b"\x03"
    assert oracle(body) == [cases.CLIENT_INDEX, 2**63, "profile", [True, None]]


@pytest.mark.parametrize("version", ["0.27.0", "0.32.0", "0.33.0"])
def test_an_adapter_goes_with_a_request_and_with_a_utility_call(version: str) -> None:
    codec = from_ready({"vllm_version": version}, {}, 1)
    adapter = Adapter(7, "mine", "/adapters/mine")
    call = GenerateCall(
        wire_id="1", prompt_token_ids=[5], sampling=Sampling(max_tokens=2), arrival_time=0.0, adapter=adapter
    )
    added = msgspec.msgpack.decode(codec.add(call)[1])
    asked = msgspec.msgpack.decode(codec.utility(3, "add_lora", [adapter])[1])
    for form in (added[6], asked[3][0]):
        assert form[:3] == ["mine", 7, "/adapters/mine"] and not any(form[3:])
