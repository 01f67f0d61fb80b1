"""Attacks on memory: requests that are large, claim to be, or become so. Each is what one connection sends."""

from __future__ import annotations

import random
import zlib

from tests.abuse.floods import HELLO
from tests.abuse.hostile import GENERATE, Attack, Hand, Script
from tests.grpc import raw

MIB = 1 << 20
FRAME = 16384
LIMIT_MIB = 8
"""The largest message that the attacked server takes."""
PACKED_MIB = 4
"""The most packed numbers that it parses."""
REFLECTION = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
GZIP = ("grpc-encoding", "gzip")
TOKENIZED_IDS = (2, 2)
"""Field numbers of GenerateRequest.tokenized and of TokenizedInput.input_ids."""


def half_messages(hand: Hand) -> Script:
    """One message after the other that is complete but for its last megabyte."""
    yield HELLO
    half = raw.message(bytes((LIMIT_MIB - 1) * MIB))[: (LIMIT_MIB - 2) * MIB]
    while True:
        stream, headers = hand.open()
        yield headers
        for position in range(0, len(half), FRAME):
            yield raw.frame(raw.DATA, 0, stream, half[position : position + FRAME])


def claims_of_four_gigabytes(hand: Hand) -> Script:
    yield HELLO
    while True:
        opened = [hand.open() for _ in range(100)]
        yield b"".join(headers + raw.frame(raw.DATA, 0, stream, b"\0\xff\xff\xff\xff") for stream, headers in opened)


def oversized_messages(hand: Hand) -> Script:
    """A prefix that is within the limit, and a body that is not."""
    yield HELLO
    stream, headers = hand.open()
    yield headers + raw.frame(raw.DATA, 0, stream, b"\0\0\0\0\5")
    for _ in range(2 * LIMIT_MIB * MIB // FRAME):
        yield raw.frame(raw.DATA, 0, stream, bytes(FRAME))


def gzip_bombs(hand: Hand) -> Script:
    """A gigabyte in a megabyte."""
    yield HELLO
    bomb = _gzip(bytes(1 << 24)) * 64
    while True:
        yield _compressed(hand, bomb)


def gzip_bombs_within_the_limit(hand: Hand) -> Script:
    """As many token ids as are parsed, in four kilobytes."""
    yield HELLO
    bomb = _gzip(_ids(PACKED_MIB * MIB - 100))
    while True:
        yield b"".join(_compressed(hand, bomb) for _ in range(4))


def token_ids_by_the_million(hand: Hand) -> Script:
    """The same without gzip."""
    yield HELLO
    body = raw.message(_ids(PACKED_MIB * MIB - 100))
    while True:
        stream, headers = hand.open()
        yield headers
        for position in range(0, len(body), FRAME):
            last = raw.END_STREAM if position + FRAME >= len(body) else 0
            yield raw.frame(raw.DATA, last, stream, body[position : position + FRAME])


def gzip_that_is_none_smaller(hand: Hand) -> Script:
    """Large complete requests that wait for one of the few inflating threads."""
    yield HELLO
    packed = _gzip(random.Random(1).randbytes(3 * MIB))
    while True:
        yield _compressed(hand, packed)


def corrupt_gzip(hand: Hand) -> Script:
    yield HELLO
    packed = bytearray(_gzip(bytes(range(256)) * 4000))
    packed[len(packed) // 2] ^= 0x55
    while True:
        yield b"".join(_compressed(hand, bytes(packed)) for _ in range(50))


def metadata(hand: Hand) -> Script:
    """15 kB of metadata for five bytes each time, in calls that do not end."""
    yield HELLO
    copies = [("x", "y" * 3000)] * 5
    while True:
        yield b"".join(hand.open(GENERATE, *copies)[1] for _ in range(200))


def unanswered_questions(hand: Hand) -> Script:
    """Messages on one client-streaming call, and no window for the answers."""
    yield raw.PREFACE + raw.settings(window=0)
    stream, headers = hand.open(REFLECTION)
    yield headers
    question = raw.message(b"\x3a\xff\x7f" + b"x" * 16383)
    while True:
        yield raw.frame(raw.DATA, 0, stream, question[:FRAME]) + raw.frame(raw.DATA, 0, stream, question[FRAME:])


HEAVY = (
    Attack(half_messages),
    Attack(claims_of_four_gigabytes),
    Attack(oversized_messages),
    Attack(gzip_bombs),
    Attack(gzip_bombs_within_the_limit),
    Attack(token_ids_by_the_million),
    Attack(gzip_that_is_none_smaller),
    Attack(corrupt_gzip),
    Attack(metadata),
    Attack(unanswered_questions),
)


def _gzip(data: bytes) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    return packer.compress(data) + packer.flush()


def _compressed(hand: Hand, packed: bytes) -> bytes:
    stream, headers = hand.open(GENERATE, GZIP)
    body = raw.message(packed, flag=1)
    parts = [body[position : position + FRAME] for position in range(0, len(body), FRAME)]
    out = headers + b"".join(raw.frame(raw.DATA, 0, stream, part) for part in parts[:-1])
    return out + raw.frame(raw.DATA, raw.END_STREAM, stream, parts[-1])


def _ids(count: int) -> bytes:
    """A GenerateRequest whose prompt is `count` small token ids."""
    message = bytes(count)
    for number in reversed(TOKENIZED_IDS):
        size, length = len(message), b""
        while size > 127:
            length += bytes([size & 127 | 128])
            size >>= 7
        message = bytes([number << 3 | 2]) + length + bytes([size]) + message
    return message
