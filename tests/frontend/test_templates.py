"""Chunks made of templates read the same as those that protobuf makes, for every contract that has them."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from smg_grpc_proto.generated import sglang_scheduler_pb2 as sglang_pb
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm_pb

from bridge.contracts import sglang_render, vllm_inference_render, vllm_render
from bridge.contracts.proto import message
from bridge.requests import chunk
from bridge.template import Template
from bridge.varint import PADDED_BYTES, VARINT, padded

IDS = st.integers(0, 2**21 - 1) | st.sampled_from((0, 127, 128, 2**14 - 1, 2**14, 2**18 - 1, 2**18, 2**21 - 1))
COUNTS = st.integers(2, 2**20) | st.sampled_from((127, 128, 2**14 - 1, 2**14, 2**18, 2**20))
PROMPTS = st.integers(0, 2**31 - 1)
CACHED = st.integers(0, 2**31 - 1) | st.just(0)
NAMES = st.text(max_size=40) | st.integers(0, 5000).map(lambda size: "n" * size)


class Out:
    """The call of a sink, which keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def send(self, sent: bytes) -> None:
        self.sent.append(sent)


class Sequence:
    """What sinks read of a sequence when they render a chunk."""

    rich = None
    finish = None
    index = 0

    def __init__(self, tokens: int, cached: int = 0) -> None:
        self.output_ids = array("I", bytes(4)) * tokens
        self.sent = tokens
        self.cached_tokens = cached


def message_of(template: Template, token: int, count: int) -> bytes:
    """The message in the chunk that follows from `template`; asserts that its sizes are what they say."""
    id_, counted = padded((token, count))
    framed = chunk(template.lead, id_, template.link, counted)
    assert len(framed) == template.size, "not the size that flights are counted with"
    assert framed[:1] == b"\0" and int.from_bytes(framed[1:5], "big") == len(framed) - 5, "gRPC's prefix is wrong"
    return framed[5:]


@given(IDS, COUNTS, PROMPTS, CACHED)
def test_vllm_engine(token: int, count: int, prompt: int, cached: int) -> None:
    out: Any = Out()
    sink = vllm_render.PlainSink(out, prompt)
    assert sink.template is None
    first: Any = Sequence(1, cached)
    sink.chunk(first, [9])
    assert sink.template is not None
    expected = vllm_pb.GenerateResponse(
        chunk=vllm_pb.GenerateStreamChunk(
            token_ids=[token], prompt_tokens=prompt, completion_tokens=count, cached_tokens=cached
        )
    )
    found = vllm_pb.GenerateResponse.FromString(message_of(sink.template, token, count))
    assert found == expected
    assert found.SerializeToString() == expected.SerializeToString(), "it has unknown fields"
    later: Any = Sequence(count if count < 5000 else 5000, cached)
    sink.chunk(later, [token])
    expected.chunk.completion_tokens = later.sent
    assert vllm_pb.GenerateResponse.FromString(out.sent[1]) == expected


@given(IDS, COUNTS, PROMPTS, CACHED, NAMES)
def test_sglang(token: int, count: int, prompt: int, cached: int, name: str) -> None:
    out: Any = Out()
    sink = sglang_render.PlainSink(out, name, prompt)
    assert sink.template is None
    first: Any = Sequence(1, cached)
    sink.chunk(first, [9])
    assert sink.template is not None
    expected = sglang_pb.GenerateResponse(
        request_id=name,
        chunk=sglang_pb.GenerateStreamChunk(
            token_ids=[token], prompt_tokens=prompt, completion_tokens=count, cached_tokens=cached
        ),
    )
    found = sglang_pb.GenerateResponse.FromString(message_of(sink.template, token, count))
    assert found == expected
    assert found.SerializeToString() == expected.SerializeToString(), "it has unknown fields"
    later: Any = Sequence(count if count < 5000 else 5000, cached)
    sink.chunk(later, [token])
    expected.chunk.completion_tokens = later.sent
    assert sglang_pb.GenerateResponse.FromString(out.sent[1]) == expected


@given(IDS, COUNTS)
def test_vllm_inference(token: int, count: int) -> None:
    template = vllm_inference_render.PLAIN
    expected = message("vllm.GenerateResponse")()
    expected.outputs.num_tokens = 1
    expected.outputs.token_ids.append(token)
    found = type(expected).FromString(message_of(template, token, count))
    assert template.link is None
    assert found == expected
    assert found.SerializeToString() == expected.SerializeToString(), "it has unknown fields"


@given(st.lists(st.integers(0, 2**21 - 1), max_size=20))
def test_padded_varints_are_the_plain_ones_with_zeros_on_top(numbers: list[int]) -> None:
    for number, bytes_ in zip(numbers, padded(numbers), strict=True):
        plain = VARINT[number]
        assert len(bytes_) == PADDED_BYTES
        assert bytes_[2] < 0x80 and bytes_[0] >= 0x80 and bytes_[1] >= 0x80
        assert sum((byte & 0x7F) << 7 * at for at, byte in enumerate(bytes_)) == number
        assert plain[-1] == bytes_[len(plain) - 1] & 0x7F
    assert padded(numbers) == padded(iter(numbers))


@pytest.mark.parametrize("number", [2**21, 2**31, 2**63])
def test_a_number_that_does_not_fit_is_an_error(number: int) -> None:
    with pytest.raises(OverflowError) as raised:
        padded([5, number, 6])
    assert str(number) in str(raised.value)
