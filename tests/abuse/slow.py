"""Clients that are slow, or stop, at each thing a client has to do. Each is what one connection does, for ever."""

from __future__ import annotations

import contextlib
import ssl

from tests.abuse.floods import HELLO
from tests.abuse.hostile import GENERATE, HEALTH, Hand, Script
from tests.abuse.target import generate
from tests.grpc import raw

BEAT_S = 0.2
REFLECTION = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
SERVICE = b"vllm.grpc.engine.VllmEngine"
LONG = generate([5, 6, 7], 20_000, stream=False).SerializeToString()


def says_nothing(hand: Hand) -> Script:
    while True:
        yield BEAT_S


def slow_preface(hand: Hand) -> Script:
    for position in range(len(HELLO)):
        yield HELLO[position : position + 1]
        yield BEAT_S


def preface_without_settings(hand: Hand) -> Script:
    yield raw.PREFACE
    while True:
        yield BEAT_S


def slow_headers(hand: Hand) -> Script:
    """Slowloris: a HEADERS frame, byte by byte."""
    yield HELLO
    _, headers = hand.open(GENERATE, ("padding", "x" * 200))
    for position in range(len(headers)):
        yield headers[position : position + 1]
        yield BEAT_S


def slow_continuation(hand: Hand) -> Script:
    """Whole frames of a header block that does not end."""
    yield HELLO
    stream = hand.stream()
    yield raw.frame(raw.HEADERS, 0, stream, hand.block())
    while True:
        yield BEAT_S
        yield raw.frame(raw.CONTINUATION, 0, stream)


def slow_body(hand: Hand) -> Script:
    """A request message, a byte in each DATA frame."""
    yield HELLO
    stream, headers = hand.open()
    yield headers + raw.frame(raw.DATA, 0, stream, raw.message(bytes(1000))[:5])
    while True:
        yield raw.frame(raw.DATA, 0, stream, b"\0")
        yield BEAT_S


def no_body(hand: Hand) -> Script:
    """Calls that are opened and nothing more, and PINGs that show a living client."""
    yield HELLO
    yield b"".join(hand.open()[1] for _ in range(50))
    while True:
        yield raw.frame(raw.PING, 0, 0, b"pingping")
        yield BEAT_S


def half_a_frame(hand: Hand) -> Script:
    """A DATA frame that stops in its middle."""
    yield HELLO
    stream, headers = hand.open()
    yield headers + raw.frame(raw.DATA, 0, stream, bytes(1000))[:500]
    while True:
        yield BEAT_S


def deaf(hand: Hand) -> Script:
    """A client that is gone without a FIN: it answers no PING while its long unary call runs."""
    yield HELLO + hand.request(LONG)[1]
    while True:
        yield BEAT_S


def takes_no_answers(hand: Hand) -> Script:
    """Nothing is read, with all windows open, of answers that are a thousand times as long as their questions."""
    yield raw.PREFACE + raw.settings(window=(1 << 31) - 1) + raw.window_update(0, (1 << 31) - 65536)
    question = b"\x22" + bytes([len(SERVICE)]) + SERVICE
    while True:
        yield b"".join(hand.request(question, REFLECTION)[1] for _ in range(20))
        yield 0.01


def takes_no_end(hand: Hand) -> Script:
    """Calls are finished, but their last bytes find no window."""
    yield raw.PREFACE + raw.settings(window=1)
    yield b"".join(hand.request(b"", HEALTH)[1] for _ in range(50))
    while True:
        yield raw.frame(raw.PING, 0, 0, b"pingping")
        yield BEAT_S


def half_a_handshake(hand: Hand) -> Script:
    """The beginning of TLS's ClientHello."""
    yield _client_hello()[:200]
    while True:
        yield BEAT_S


def half_of_the_handshake(hand: Hand) -> Script:
    """A whole ClientHello, and nothing after the server's answer."""
    yield _client_hello()
    while True:
        yield BEAT_S


def holds_on(hand: Hand) -> Script:
    """A connection for the sake of having one."""
    yield HELLO
    while True:
        yield raw.frame(raw.PING, 0, 0, b"pingping")
        yield 1.0


def _client_hello() -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname="localhost").do_handshake()
    return outgoing.read()
