"""Messages that vLLM's own packages made, read by our codec and by an independent decoder."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import pytest

from bridge.wire.codec import Finish, Load, Logprobs
from bridge.wire.tensors import Tensor
from bridge.wire.vllm.codec import VllmCodec, from_ready
from tests.wire.vllm.recorded import STEP_IDS, STEPS, VECTORS, VERSIONS, comparable, frames_of, named, oracle

ENDS = {0: Finish.STOP, 1: Finish.LENGTH, 2: Finish.ABORT, 3: Finish.ERROR, 4: Finish.STOP}


def codec_of(version: str) -> VllmCodec:
    return from_ready({"vllm_version": version}, {}, 1)


def same(tensor: Tensor, says: dict[str, Any]) -> bool:
    return (tensor.dtype, list(tensor.shape), tensor.values()) == (says["dtype"], says["shape"], says["values"])


def assert_rows(found: Logprobs, ids: dict[str, Any], values: dict[str, Any], ranks: dict[str, Any]) -> None:
    rows, width = ids["shape"]
    assert (found.width, len(found.ranks)) == (width, rows)
    assert list(found.token_ids) == ids["values"]
    assert list(struct.unpack(f"<{rows * width}f", found.values)) == values["values"]
    assert list(found.ranks) == ranks["values"]


def test_there_are_vectors_for_the_supported_versions() -> None:
    assert VERSIONS == ["0.27.0", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0"]


@pytest.mark.parametrize(("version", "entry"), STEPS, ids=STEP_IDS)
def test_a_step_says_what_the_package_said(version: str, entry: dict[str, Any]) -> None:
    codec = codec_of(version)
    says = entry["says"]
    step = codec.step(frames_of(entry))
    assert step.engine_index == says.get("engine_index", 0)
    assert step.finished_requests == says.get("finished_requests")
    assert step.weight_version == says.get("weight_version")
    assert len(step.outputs) == len(says.get("outputs", []))
    for delta, expected in zip(step.outputs, says.get("outputs", []), strict=True):
        assert delta.request_id == expected["request_id"]
        assert delta.new_token_ids == expected["new_token_ids"]
        assert delta.finish_reason == expected.get("finish_reason")
        assert delta.stop_reason == expected.get("stop_reason")
        assert delta.kv_transfer_params == expected.get("kv_transfer_params")
        assert delta.spec_decode_metrics == expected.get("spec_decode_metrics")
        assert codec.cached_tokens(delta) == expected.get("prefill_stats", {}).get("num_cached_tokens")


@pytest.mark.parametrize(("version", "entry"), STEPS, ids=STEP_IDS)
def test_a_step_reads_as_an_independent_decoder_reads_it(version: str, entry: dict[str, Any]) -> None:
    declared = VECTORS[version]["declared"]
    frames = frames_of(entry)
    message = named(declared["EngineCoreOutputs"], oracle(frames[0]))
    step = codec_of(version).step(frames)
    assert step.engine_index == message["engine_index"]
    assert step.weight_version == message.get("weight_version")
    for delta, array in zip(step.outputs, message["outputs"], strict=True):
        fields = named(declared["EngineCoreOutput"], array)
        for name in set(fields) & set(delta.__struct_fields__):
            value = getattr(delta, name)
            if isinstance(value, msgspec.Raw):
                value = oracle(bytes(value))
            assert comparable(value) == comparable(fields[name]), name


@pytest.mark.parametrize(("version", "entry"), STEPS, ids=STEP_IDS)
def test_tensors_are_those_the_package_sent(version: str, entry: dict[str, Any]) -> None:
    codec = codec_of(version)
    step = codec.step(frames_of(entry))
    for delta, says in zip(step.outputs, entry["says"].get("outputs", []), strict=True):
        expectations = (
            (codec.logprobs(step, delta), says.get("new_logprobs"), "sampled_token_ranks"),
            (codec.prompt_logprobs(step, delta), says.get("new_prompt_logprobs_tensors"), "selected_token_ranks"),
        )
        for found, expected, ranks in expectations:
            assert (found is None) == (expected is None)
            if found is not None and expected is not None:
                assert_rows(found, expected["logprob_token_ids"], expected["logprobs"], expected[ranks])
        pooled = codec.pooled(step, delta)
        assert (pooled is None) == ("pooling_output" not in says)
        assert pooled is None or same(pooled, says["pooling_output"])


@pytest.mark.parametrize("version", VERSIONS)
def test_the_vectors_hold_tensors_inside_the_main_frame_and_in_frames_of_their_own(version: str) -> None:
    counts = {entry["name"]: len(entry["frames"]) for entry in VECTORS[version]["steps"]}
    assert counts["logprobs, inline"] == 1
    assert counts["logprobs, in the frames of two requests"] == 5
    assert counts["logprobs, and prompt logprobs in frames"] == 4


@pytest.mark.parametrize(("version", "entry"), STEPS, ids=STEP_IDS)
def test_every_end_is_told_in_neutral_words(version: str, entry: dict[str, Any]) -> None:
    codec = codec_of(version)
    for delta in codec.step(frames_of(entry)).outputs:
        if delta.finish_reason is None:
            continue
        reason, stop_id, error = codec.finish(delta)
        assert reason is ENDS[delta.finish_reason]
        assert stop_id == (delta.stop_reason if isinstance(delta.stop_reason, int) else None)
        assert error == ("engine_paused: generation is paused" if entry["name"] == "request error" else None)


@pytest.mark.parametrize("version", VERSIONS)
def test_statistics_become_a_load(version: str) -> None:
    codec = codec_of(version)
    loads = {entry["name"]: codec.load(codec.step(frames_of(entry))) for entry in VECTORS[version]["steps"]}
    assert loads["busy"] == Load(rank=3, running=5, waiting=6, kv_cache_usage=0.625)
    assert loads["idle"] == Load()
    assert {name for name, load in loads.items() if load is not None} == {"busy", "idle"}


@pytest.mark.parametrize("version", VERSIONS)
def test_utility_replies_are_read(version: str) -> None:
    codec = codec_of(version)
    replies = {}
    for entry in VECTORS[version]["steps"]:
        reply = codec.reply(codec.step(frames_of(entry)))
        if reply is not None:
            replies[entry["name"].removeprefix("reply: ")] = (reply.call_id, reply.failure, reply.value)
    big = 2**64 - 1
    assert replies == {
        "nothing": (big, None, None),
        "true": (big, None, True),
        "a list": (big, None, ["generate"]),
        "a map": (big, None, {"kind": "full", "block_size": 16, "nested": [1, 2.5, None]}),
        "a number": (big, None, 2**63),
        "failure": (9, "Call to no_such_method method failed: no attribute", None),
        "notice of the engine's own": (-1, None, ["x"]),
    }
