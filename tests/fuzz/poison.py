"""What wedges or kills vLLM 0.32, or what its front end refuses, as bytes; ways to hide it; and bytes that are no request.

A poison edits a valid request and returns bytes that follow it: in protobuf the last value of a field wins, repeated
fields grow, and messages merge. Whatever is before, after or around it, a request with a poison in it must be refused.
"""

from __future__ import annotations

import gzip
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from random import Random

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from tests.fuzz import encoding
from tests.fuzz.fields import DENORMAL, FLOAT_MAX, INT32_MAX, UINT32_MAX, Model, deep_schema, float32_after

Poison = Callable[[pb.GenerateRequest, Random, Model], bytes]

TOKENIZED, TEXT, PARAMS, MM_INPUTS, RANK, MEDIA_REFS = 2, 3, 4, 7, 9, 10
"""Field numbers of GenerateRequest."""

INPUT_IDS = 2
"""Field number in TokenizedInput."""

_NUMBERS = {field.name: field.number for field in pb.SamplingParams.DESCRIPTOR.fields}


def in_params(content: bytes) -> bytes:
    return encoding.data(PARAMS, content)


def float_of(name: str, *values: float) -> Poison:
    return lambda request, random, model: in_params(encoding.float32(_NUMBERS[name], random.choice(values)))


def int_of(name: str, *values: int) -> Poison:
    return lambda request, random, model: in_params(encoding.integer(_NUMBERS[name], random.choice(values)))


def text_of(name: str, *values: str) -> Poison:
    return lambda request, random, model: in_params(encoding.data(_NUMBERS[name], random.choice(values).encode()))


def wrong_id(random: Random, model: Model) -> int:
    """A token id that is none, as an unsigned 32-bit field reads it; negative ones are ten-byte varints."""
    return random.choice(
        (model.vocab_size, model.vocab_size + 1, 2**20, INT32_MAX, 2**31, UINT32_MAX, -1, -(2**31), 2**32 - 7)
    )


def _beyond(function: Callable[[float], float]) -> tuple[float, ...]:
    return (function(math.inf), math.inf, math.nan, -math.nan)


def _outside(limit: float) -> tuple[float, ...]:
    return (
        float32_after(limit, math.inf),
        float32_after(-limit, -math.inf),
        FLOAT_MAX,
        -FLOAT_MAX,
        math.inf,
        -math.inf,
        math.nan,
    )


def _no_prompt(request: pb.GenerateRequest, random: Random, model: Model) -> bytes:
    request.ClearField("input")
    return random.choice(
        (b"", encoding.data(TOKENIZED, b""), encoding.data(TEXT, b"x") + encoding.data(TOKENIZED, b""))
    )


def _wrong_prompt(request: pb.GenerateRequest, random: Random, model: Model) -> bytes:
    if random.random() < 0.5:
        request.ClearField("input")
    _, ids = request.sampling_params.ClearField("truncate_prompt_tokens"), wrong_id(random, model)
    packed = random.random() < 0.5
    return encoding.data(TOKENIZED, encoding.packed(INPUT_IDS, [ids]) if packed else encoding.integer(INPUT_IDS, ids))


def _long_prompt(request: pb.GenerateRequest, random: Random, model: Model) -> bytes:
    request.sampling_params.ClearField("truncate_prompt_tokens")
    request.ClearField("input")
    length = model.max_model_len + random.choice((0, 1, 2, 1000, 150_000))
    return encoding.data(TOKENIZED, encoding.packed(INPUT_IDS, [random.randrange(model.vocab_size)] * length))


def _min_above_max(request: pb.GenerateRequest, random: Random, model: Model) -> bytes:
    fields = encoding.integer(_NUMBERS["max_tokens"], 2) + encoding.integer(
        _NUMBERS["min_tokens"], random.choice((3, UINT32_MAX))
    )
    return in_params(fields)


def _greedy_many(request: pb.GenerateRequest, random: Random, model: Model) -> bytes:
    fields = encoding.float32(_NUMBERS["temperature"], random.choice((0.0, -0.0)))
    return in_params(fields + encoding.integer(_NUMBERS["n"], random.choice((2, 16384))))


def _wrong_stop_id(request: pb.GenerateRequest, random: Random, model: Model) -> bytes:
    return in_params(encoding.packed(_NUMBERS["stop_token_ids"], [1, wrong_id(random, model)]))


def _wrong_bias(request: pb.GenerateRequest, random: Random, model: Model) -> bytes:
    token = random.choice((model.vocab_size, INT32_MAX, -1, -(2**31)))
    return in_params(encoding.data(_NUMBERS["logit_bias"], encoding.integer(1, token) + encoding.float32(2, 1.0)))


def _many_logprobs(name: str) -> Poison:
    def poison(request: pb.GenerateRequest, random: Random, model: Model) -> bytes:
        value = random.choice((-2, -(2**31), INT32_MAX, model.vocab_size + 1))
        return in_params(encoding.integer(_NUMBERS[name], value))

    return poison


def _no_choices(request: pb.GenerateRequest, random: Random, model: Model) -> bytes:
    request.sampling_params.ClearField("constraint")
    return in_params(encoding.data(_NUMBERS["choice"], b""))


def _no_such_rank(request: pb.GenerateRequest, random: Random, model: Model) -> bytes:
    return encoding.integer(RANK, random.choice((model.ranks, -1, INT32_MAX, -(2**31))))


def _media(request: pb.GenerateRequest, random: Random, model: Model) -> bytes:
    url = random.choice(("http://127.0.0.1:1/a.png", "file:///etc/passwd", "data:image/png;base64,AAAA", ""))
    item = encoding.data(1, encoding.integer(1, 1) + encoding.data(2, url.encode()))
    return random.choice((encoding.data(MEDIA_REFS, item), encoding.data(MM_INPUTS, b""), encoding.data(11, b"")))


POISONS: Mapping[str, Poison] = {
    "temperature": float_of(
        "temperature", -DENORMAL, -1.0, *_beyond(lambda up: float32_after(2.0, up)), -math.inf, FLOAT_MAX
    ),
    "top_p": float_of("top_p", -DENORMAL, -1.0, *_beyond(lambda up: float32_after(1.0, up)), -math.inf),
    "min_p": float_of("min_p", -DENORMAL, -1.0, *_beyond(lambda up: float32_after(1.0, up)), -math.inf),
    "frequency_penalty": float_of("frequency_penalty", *_outside(2.0)),
    "presence_penalty": float_of("presence_penalty", *_outside(2.0)),
    "repetition_penalty": float_of("repetition_penalty", -DENORMAL, -1.0, math.inf, -math.inf, math.nan),
    "max_tokens": int_of("max_tokens", 0),
    "min_tokens": _min_above_max,
    "n": int_of("n", 16385, INT32_MAX, UINT32_MAX, -1),
    "n ": _greedy_many,
    "logprobs": _many_logprobs("logprobs"),
    "prompt_logprobs": _many_logprobs("prompt_logprobs"),
    "stop": text_of("stop", ""),
    "stop_token_ids": _wrong_stop_id,
    "logit_bias": _wrong_bias,
    "input": _no_prompt,
    "input_ids": _wrong_prompt,
    "input_ids ": _long_prompt,
    "data_parallel_rank": _no_such_rank,
    "json_object": int_of("json_object", 0),
    "json_schema": text_of("json_schema", "", " ", "{", deep_schema(70), "[" * 3000),
    "regex": text_of("regex", "a\0b", "(", "[a"),
    "grammar": text_of("grammar", "", "\n"),
    "structural_tag": text_of("structural_tag", "", " ", "["),
    "choice": _no_choices,
    "media": _media,
}
"""Field that the refusal names (spaces aside) → the poison."""

NAMES: Mapping[str, tuple[str, ...]] = {
    "input": ("input",),
    "min_tokens": ("min_tokens", "max_tokens"),
    "n ": ("n ", "temperature"),
    "media": ("mm_inputs", "media_refs"),
}
"""Poison → words of which the refusal holds one, where its own name is not the only one."""


def named_by(poison: str) -> tuple[str, ...]:
    return NAMES.get(poison, (poison.strip(),))


# -- ways to hide it ---------------------------------------------------------------------------------------------------


def unknown_field(random: Random) -> bytes:
    """A field that no message of the contract has."""
    number = random.randint(1000, 2**29 - 1)
    match random.randrange(5):
        case 0:
            return encoding.integer(number, random.getrandbits(64), random.choice((0, 10)))
        case 1:
            return encoding.tag(number, encoding.FIXED64) + random.randbytes(8)
        case 2:
            return encoding.data(number, random.randbytes(random.choice((0, 1, 300))))
        case 3:
            return encoding.group(number, encoding.integer(3, 1) * random.randint(0, 3))
        case _:
            return encoding.tag(number, encoding.FIXED32) + random.randbytes(4)


def unknown_fields(random: Random) -> bytes:
    return b"".join(unknown_field(random) for _ in range(random.randint(1, 5)))


def hidden(base: bytes, poison: bytes, random: Random) -> bytes:
    """`base` and then `poison`, which stays the last word, dressed up."""
    match random.randrange(5):
        case 0:
            return base + poison
        case 1:
            return unknown_fields(random) + base + unknown_fields(random) + poison + unknown_fields(random)
        case 2:
            return base + poison * random.choice((1, 3))
        case 3:
            return base + in_params(unknown_fields(random)) + poison + in_params(b"")
        case _:
            return base + poison + encoding.data(1, b"another id")


# -- bytes that are no request -----------------------------------------------------------------------------------------


def not_a_message(base: bytes, random: Random) -> bytes:
    """Bytes that protobuf's rules refuse, most of them after a good beginning."""
    deep = random.choice((101, 5000))
    broken: Sequence[bytes] = (
        encoding.data(1, b"\xff\xfe"),
        encoding.data(TEXT, b"\xed\xa0\x80"),
        in_params(encoding.data(_NUMBERS["stop"], b"\xc3(")),
        encoding.data(TOKENIZED, encoding.data(1, b"\x80")),
        encoding.tag(1000, 6),
        encoding.tag(1000, 7) + b"\0",
        encoding.tag(0, encoding.VARINT) + b"\1",
        encoding.tag(1000, encoding.GROUP),
        encoding.tag(1000, encoding.END_GROUP),
        encoding.tag(1000, encoding.GROUP) + encoding.tag(1001, encoding.END_GROUP),
        encoding.tag(1000, encoding.GROUP) * deep + encoding.tag(1000, encoding.END_GROUP) * deep,
        encoding.tag(1000, encoding.VARINT) + b"\xff" * 11,
        encoding.tag(1000, encoding.BYTES) + encoding.varint(2**31),
        encoding.tag(PARAMS, encoding.BYTES) + encoding.varint(UINT32_MAX) + b"\x09",
        encoding.tag(1000, encoding.FIXED64) + b"\0" * 7,
        in_params(encoding.tag(1, encoding.FIXED32) + b"\0"),
        encoding.data(TOKENIZED, encoding.data(INPUT_IDS, b"\x80")),
        random.randbytes(random.randint(1, 64)),
    )
    return base + random.choice(broken)


BOMB = gzip.compress(b"\x07" * 3_000_000, 9, mtime=0)
"""Inflates a thousandfold, and is no message then."""


def framed(body: bytes, flag: int = 0) -> bytes:
    """`body` as one gRPC message."""
    return struct.pack(">BI", flag, len(body)) + body


def badly_framed(body: bytes, random: Random) -> tuple[bytes, dict[str, str]]:
    """Bytes of a call that hold no one gRPC message, and headers that go with them."""
    gzipped = {"grpc-encoding": "gzip"}
    packed = gzip.compress(body, 1, mtime=0)
    calls: Sequence[tuple[bytes, dict[str, str]]] = (
        (b"", {}),
        (b"\0", {}),
        (framed(body)[:-1] if body else b"\0\0\0", {}),
        (framed(body) + b"\0", {}),
        (framed(body) * 2, {}),
        (struct.pack(">BI", 0, UINT32_MAX) + body, {}),
        (struct.pack(">BI", 0, len(body) + 1) + body, {}),
        (framed(body, 1), {}),
        (framed(body, random.randint(2, 255)), {}),
        (framed(body, 1), gzipped),
        (framed(packed[:-9], 1), gzipped),
        (framed(packed + b"tail", 1), gzipped),
        (framed(BOMB, 1), gzipped),
        (framed(packed, 1), {"grpc-encoding": "zstd"}),
    )
    return random.choice(calls)
