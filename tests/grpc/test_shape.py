"""Messages that are small to send and large to parse are refused before they are parsed."""

from __future__ import annotations

import time

import grpc
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from bridge.grpc.service import Method
from bridge.grpc.shape import MOST_FIELDS, MOST_PACKED_BYTES, has_too_many_pieces
from bridge.varint import VARINT
from tests.grpc.conftest import Starter

GENERATE = pb.GenerateRequest.DESCRIPTOR


def field(number: int, payload: bytes) -> bytes:
    """A length-delimited field."""
    size, length = len(payload), b""
    while size > 127:
        length += bytes([size & 127 | 128])
        size >>= 7
    return VARINT[number << 3 | 2] + length + bytes([size]) + payload


def number(path: str) -> int:
    descriptor = GENERATE
    *parents, last = path.split(".")
    for name in parents:
        descriptor = descriptor.fields_by_name[name].message_type
    return int(descriptor.fields_by_name[last].number)


TOKENIZED, IDS = number("tokenized"), number("tokenized.input_ids")
SAMPLING, STOP = number("sampling_params"), number("sampling_params.stop")

BOMBS = {
    "packed numbers": field(TOKENIZED, field(IDS, b"\5" * (60 << 20))),
    "numbers": field(TOKENIZED, (VARINT[IDS << 3] + b"\5") * (16 << 20)),
    "empty strings": field(SAMPLING, field(STOP, b"") * (16 << 20)),
    "empty messages": field(TOKENIZED, b"") * (16 << 20),
    "unknown fields": field(999, b"") * (8 << 20),
    "groups": (VARINT[999 << 3 | 3] + VARINT[999 << 3 | 4]) * (8 << 20),
    "a mistake after them": field(TOKENIZED, field(IDS, b"\5" * (60 << 20))) + b"\x0f\xff",
    "a mistake within": field(SAMPLING, b"\xff") + field(TOKENIZED, field(IDS, b"\5" * (60 << 20))),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_is_seen_at_once(bomb: str) -> None:
    started = time.process_time()
    assert has_too_many_pieces(BOMBS[bomb], GENERATE)
    assert time.process_time() - started < 0.2


def test_images_and_long_prompts_are_none() -> None:
    image = pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=range(200_000, 1_200_000)))
    image.mm_inputs.pixel_values.inline = bytes(50 << 20)
    image.text = "x" * (4 << 20)
    message = image.SerializeToString()
    assert not has_too_many_pieces(message, GENERATE)


def test_the_limits() -> None:
    strings = pb.GenerateRequest(sampling_params=pb.SamplingParams(stop=["x"] * (MOST_FIELDS - 1)))
    assert not has_too_many_pieces(strings.SerializeToString(), GENERATE)
    strings.sampling_params.stop.append("x")
    assert has_too_many_pieces(strings.SerializeToString(), GENERATE)
    assert not has_too_many_pieces(field(TOKENIZED, field(IDS, b"\5" * MOST_PACKED_BYTES)), GENERATE)
    assert has_too_many_pieces(field(TOKENIZED, field(IDS, b"\5" * (MOST_PACKED_BYTES + 1))), GENERATE)


@given(st.binary(max_size=300))
@example(b"*\x80\x80\x80\x03")
def test_what_is_no_protobuf_is_left_to_the_parser(junk: bytes) -> None:
    assert not has_too_many_pieces(junk, GENERATE)


class Parser:
    """A service that takes a real request type."""

    name = "bridge.test.Parser"

    def methods(self) -> list[Method]:
        return [Method("/bridge.test.Parser/Parse", "unary", pb.GenerateRequest, self.parse)]

    async def parse(self, request: pb.GenerateRequest, call: object) -> bytes:
        return b"%d" % len(request.mm_inputs.pixel_values.inline)


async def test_a_bomb_is_refused_and_an_image_is_not(serve: Starter) -> None:
    server = await serve(services=[Parser()])
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(server.target, options) as channel:
        parse = channel.unary_unary("/bridge.test.Parser/Parse")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await parse(BOMBS["empty strings"], timeout=10, compression=grpc.Compression.Gzip)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert caught.value.details() == "GenerateRequest has too many fields or numbers"
        image = pb.GenerateRequest()
        image.mm_inputs.pixel_values.inline = bytes(20 << 20)
        assert await parse(image.SerializeToString(), timeout=10) == b"%d" % (20 << 20)
