"""A small fuzzer of connections: conversations that are mostly right, with something wrong in most of them."""

from __future__ import annotations

import itertools
import random

from tests.abuse.hostile import GENERATE, HEALTH, Hand, Script
from tests.abuse.target import generate
from tests.grpc import raw

PATHS = (GENERATE, HEALTH, "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", "/grpc.health.v1.Health/Watch")
SIZES = (0, 1, 5, 9, 100, 16384, 16385, 65536)
NUMBERS = (0, 1, 2, 3, 100, 65535, (1 << 24) - 1, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)

_seeds = itertools.count(1)


def fuzzed(hand: Hand) -> Script:
    """Each connection has its own seed, in order from 1."""
    some = random.Random(next(_seeds))
    yield _broken(some, raw.PREFACE + raw.settings(window=some.choice(NUMBERS)), 0.05)
    for _ in range(some.randrange(1, 30)):
        yield _broken(some, b"".join(_frame(some, hand) for _ in range(some.randrange(1, 8))), 0.2)
        if some.random() < 0.1:
            yield some.random() / 50


def _frame(some: random.Random, hand: Hand) -> bytes:
    stream = some.choice((0, 1, 3, hand.stream(), some.choice(NUMBERS) & 0x7FFFFFFF))
    number = some.choice(NUMBERS)
    kind = some.randrange(14)
    if kind <= 3:
        return _request(some, hand)
    if kind == 4:
        return raw.frame(raw.DATA, some.choice((0, 1, 8, 9)), stream, _payload(some))
    if kind == 5:
        return raw.frame(raw.HEADERS, some.randrange(64), stream, some.choice((hand.block(), _payload(some))))
    if kind == 6:
        return raw.frame(raw.PRIORITY, 0, stream, some.randbytes(some.choice((4, 5, 6))))
    if kind == 7:
        return raw.reset(stream, number)
    if kind == 8:
        return raw.frame(
            raw.SETTINGS, some.choice((0, 0, 1)), some.choice((0, 0, 1)), some.randbytes(some.choice((6, 5)))
        )
    if kind == 9:
        return raw.frame(raw.PING, some.choice((0, 1)), some.choice((0, 0, 1)), some.randbytes(some.choice((8, 8, 7))))
    if kind == 10:
        return raw.frame(raw.GOAWAY, 0, 0, some.randbytes(some.choice((8, 20, 3))))
    if kind == 11:
        return raw.window_update(stream, number)
    if kind == 12:
        return raw.frame(raw.CONTINUATION, some.choice((0, 4)), stream, _payload(some))
    return raw.frame(some.randrange(256), some.randrange(256), stream, _payload(some))


def _request(some: random.Random, hand: Hand) -> bytes:
    """A request with a header, a length, a compression flag or a protobuf that may be wrong."""
    extra = some.choice(
        (
            (),
            (),
            (("grpc-timeout", some.choice(("1m", "0n", "99999999H", "x", ""))),),
            (("grpc-encoding", some.choice(("gzip", "br", "identity"))),),
            (("x-bin", some.choice(("AA==", "!", "A"))),),
            ((":path", "/twice"),),
            (("connection", "close"),),
        )
    )
    stream, headers = hand.open(some.choice(PATHS), *extra)
    message = generate([some.randrange(40000) for _ in range(some.randrange(4))], some.randrange(3)).SerializeToString()
    if some.random() < 0.5:
        message = _broken(some, message, 1.0)
    body = raw.message(message, some.choice((0, 0, 0, 1, 7)))
    if some.random() < 0.2:
        body = _broken(some, body, 1.0)
    cut = some.randrange(len(body) + 1)
    last = some.choice((1, 1, 1, 0))
    return headers + raw.frame(raw.DATA, 0, stream, body[:cut]) + raw.frame(raw.DATA, last, stream, body[cut:])


def _payload(some: random.Random) -> bytes:
    return some.randbytes(some.choice(SIZES)) if some.random() < 0.1 else some.randbytes(some.randrange(40))


def _broken(some: random.Random, data: bytes, chance: float) -> bytes:
    """`data`, now and then with a bit flipped, a piece missing, or a piece of noise put in."""
    if some.random() > chance or not data:
        return data
    at = some.randrange(len(data))
    match some.randrange(3):
        case 0:
            return data[:at] + bytes([data[at] ^ 1 << some.randrange(8)]) + data[at + 1 :]
        case 1:
            return data[:at] + data[at + some.randrange(1, 20) :]
        case _:
            return data[:at] + some.randbytes(some.randrange(1, 20)) + data[at:]
