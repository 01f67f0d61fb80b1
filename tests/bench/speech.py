"""The two contracts the load client speaks: how a request is written and what a response says.

Messages are cut out of DATA frames after a run.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from tests.bench.http2 import Stream


@dataclass(frozen=True)
class Message:
    """One response message: when its last byte came, and the new tokens in it."""

    at_ns: int
    tokens: list[int]


class Speech(Protocol):
    """One contract."""

    path: str

    def request(self, name: str, prompt: bytes, max_tokens: int) -> bytes:
        """The framed request of one stream of `max_tokens` tokens, greedy, EOS ignored; `prompt` as `prompt` makes it."""
        ...

    def tokens(self, message: bytes) -> list[int]:
        """The new tokens in a response message."""
        ...


def prompt(first: int, length: int) -> bytes:
    """`length` ids as a packed field; the first tells the engine which tokens to answer with."""
    return varint(first) + b"".join([varint(200 + index % 5000) for index in range(length - 1)])


def framed(message: bytes) -> bytes:
    return b"\0" + len(message).to_bytes(4, "big") + message


def messages(stream: Stream, speech: Speech) -> Iterator[Message]:
    """The response messages of a stream that ended, with their times."""
    rest = b""
    for at_ns, payload in stream.frames:
        rest += payload
        position = 0
        while len(rest) - position >= 5:
            end = position + 5 + int.from_bytes(rest[position + 1 : position + 5], "big")
            if end > len(rest):
                break
            yield Message(at_ns, speech.tokens(rest[position + 5 : end]))
            position = end
        rest = rest[position:]
    if rest:
        raise ValueError(f"stream {stream.name} ends in {len(rest)} bytes of a message")


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def field(number: int, content: bytes) -> bytes:
    """A length-delimited field."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def fields(message: bytes) -> Iterator[tuple[int, bytes | int]]:
    """(number, content) of each field; varint fields as int."""
    position, size = 0, len(message)
    while position < size:
        key, position = _read_varint(message, position)
        kind = key & 7
        if kind == 0:
            value, position = _read_varint(message, position)
            yield key >> 3, value
        elif kind == 2:
            length, position = _read_varint(message, position)
            yield key >> 3, message[position : position + length]
            position += length
        else:
            position += 8 if kind == 1 else 4


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7


def packed(ids: bytes) -> list[int]:
    out, position = [], 0
    while position < len(ids):
        value, position = _read_varint(ids, position)
        out.append(value)
    return out


class VllmEngine:
    """vllm.grpc.engine.VllmEngine/Generate: chunks, then a `complete` that repeats every token."""

    path = "/vllm.grpc.engine.VllmEngine/Generate"

    def __init__(self, logprobs: int | None = None, stop: str = "") -> None:
        self._params = pb.SamplingParams(temperature=0.0, ignore_eos=True, logprobs=logprobs)
        if stop:
            self._params.stop.append(stop)

    def request(self, name: str, prompt: bytes, max_tokens: int) -> bytes:
        message = pb.GenerateRequest(request_id=name, stream=True, sampling_params=self._params)
        message.sampling_params.max_tokens = max_tokens
        return framed(message.SerializeToString() + field(2, field(2, prompt)))

    def tokens(self, message: bytes) -> list[int]:
        if message[0] != 0x0A:
            return []
        for _, chunk in fields(message):
            for number, content in fields(chunk):  # type: ignore[arg-type]
                if number == 1:
                    return packed(content)  # type: ignore[arg-type]
        return []


class VllmInference:
    """vllm.Inference/GenerateStream as vllm-router 0.1.17 asks: token ids, and text only with a stop string."""

    path = "/vllm.Inference/GenerateStream"

    def __init__(self, logprobs: int | None = None, stop: str = "") -> None:
        if logprobs is not None:
            raise ValueError("logprobs are asked for over vllm.grpc.engine only")
        self._stop = stop.encode()

    def request(self, name: str, prompt: bytes, max_tokens: int) -> bytes:
        message = field(1, name.encode()) + field(4, field(1, prompt)) + b"\x2d" + struct.pack("<f", 0.0)
        stopping = b"\x08" + varint(max_tokens) + (field(4, self._stop) if self._stop else b"") + b"\x30\x01"
        shown = b"\x20\x01\x28\x01\x40\x01" if self._stop else b"\x20\x00\x28\x01\x40\x01"
        return framed(message + field(8, stopping) + field(9, shown))

    def tokens(self, message: bytes) -> list[int]:
        out = []
        for number, content in fields(message):
            if number == 2:
                for inner, ids in fields(content):  # type: ignore[arg-type]
                    if inner == 4:
                        out += packed(ids) if isinstance(ids, bytes) else [ids]
        return out


SPEECHES: dict[str, type[VllmEngine] | type[VllmInference]] = {"engine": VllmEngine, "inference": VllmInference}
