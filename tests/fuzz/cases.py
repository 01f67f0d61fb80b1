"""Cases: numbered, and the same for the same seed, classes and model, whichever others were made before."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from tests.fuzz import encoding, poison
from tests.fuzz.fields import DENORMAL, Model
from tests.fuzz.make import GENERATE, METHODS, asks_for_what_lacks, damaged, near, parsed, path_of, valid

VALID, NEAR, HOSTILE = "valid", "near", "hostile"
CLASSES = (VALID, NEAR, HOSTILE)

CYCLE = (VALID, NEAR, VALID, HOSTILE)
"""Classes of successive batches."""

FLUSH = "FlushCache"

ENDLESS = "SubscribeKvEvents"
"""A stream that only its client ends."""

Headers = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call, and what is known of it beforehand."""

    number: int
    kind: str
    """`valid`, `near` or `hostile`."""
    name: str
    method: str
    body: bytes
    """What follows the headers, gRPC's message prefix included."""
    message: bytes | None = None
    """The request in it; None when there is none that protobuf's parser takes."""
    path: str = ""
    headers: Headers = field(default_factory=dict)
    """Header fields to add to those of a gRPC call or to put in their place; "" leaves one out."""
    says: tuple[str, ...] = ()
    """Words of which the refusal must hold one."""
    alone: bool = False
    """Wants a connection of its own: the server may end it."""
    cancel_after: int | None = None
    """The client resets the call after this many messages."""

    @property
    def request(self) -> pb.GenerateRequest | None:
        """The generation it asks for, if it is one."""
        if self.method != GENERATE or self.message is None:
            return None
        return pb.GenerateRequest.FromString(self.message)


def kind_of(batch: int, kinds: Sequence[str]) -> str:
    cycle = [kind for kind in CYCLE if kind in kinds]
    return cycle[batch % len(cycle)]


def batches(seed: int, count: int, size: int, kinds: Sequence[str], model: Model) -> Iterator[list[Case]]:
    """`count` cases in batches of `size` and of one kind each."""
    for batch, start in enumerate(range(0, count, size)):
        kind = kind_of(batch, kinds)
        yield [case(seed, number, kind, model) for number in range(start, min(count, start + size))]


def case(seed: int, number: int, kind: str, model: Model) -> Case:
    random = Random(f"{seed}/{number}/{kind}")
    method = GENERATE if random.random() < 0.85 else random.choice([*METHODS])
    if kind == VALID:
        return _valid(number, method, random, model)
    if kind == NEAR:
        return _near(number, method, random, model)
    return _hostile(number, method, random, model)


def _whole(kind: str, number: int, name: str, method: str, message: bytes, random: Random) -> Case:
    patience = 0 if method == ENDLESS else random.choice((1, 3)) if random.random() < 0.02 else None
    body = poison.framed(message)
    return Case(number=number, kind=kind, name=name, method=method, body=body, message=message, cancel_after=patience)


def _valid(number: int, method: str, random: Random, model: Model) -> Case:
    message = valid(method, random, model)
    if isinstance(message, pb.GenerateRequest) and random.random() < 0.5:
        message.request_id = f"{number}-{random.getrandbits(32):x}"
    return _whole(VALID, number, method, method, message.SerializeToString(), random)


def _near(number: int, method: str, random: Random, model: Model) -> Case:
    is_damaged = random.random() < 0.2
    while True:
        if is_damaged:
            message = damaged(valid(method, random, model).SerializeToString(), random)
        else:
            message = near(method, random, model)
            if random.random() < 0.1:
                message = poison.unknown_fields(random) + message + poison.unknown_fields(random)
        read = parsed(method, message)
        if read is not None and not asks_for_what_lacks(read, model):
            return _whole(
                NEAR, number, f"{method}, {'damaged' if is_damaged else 'at a limit'}", method, message, random
            )


def _hostile(number: int, method: str, random: Random, model: Model) -> Case:
    draw = random.random()
    if method == FLUSH and draw < 0.5:
        message = encoding.float32(1, random.choice((math.nan, -math.nan, -DENORMAL, -math.inf)))
        return _poisoned(number, method, "timeout_s", message, ("timeout_s",))
    if method != GENERATE or draw < 0.2:
        return _no_message(number, method, random, model)
    request = valid(method, random, model)
    assert isinstance(request, pb.GenerateRequest)
    name = random.choice([*poison.POISONS])
    bytes_of_it = poison.POISONS[name](request, random, model)
    message = poison.hidden(request.SerializeToString(), bytes_of_it, random)
    if draw < 0.9:
        return _poisoned(number, method, name.strip(), message, poison.named_by(name))
    path, headers = _bad_headers(random, path_of(method))
    body = poison.framed(message)
    return Case(
        number=number,
        kind=HOSTILE,
        name=f"{method}, headers",
        method=method,
        body=body,
        path=path,
        headers=headers,
        alone=True,
    )


def _poisoned(number: int, method: str, name: str, message: bytes, says: tuple[str, ...]) -> Case:
    body = poison.framed(message)
    return Case(
        number=number, kind=HOSTILE, name=f"{method}, {name}", method=method, body=body, message=message, says=says
    )


def _no_message(number: int, method: str, random: Random, model: Model) -> Case:
    base = valid(method, random, model).SerializeToString()
    if random.random() < 0.4:
        body, headers = poison.badly_framed(base, random)
        return Case(
            number=number,
            kind=HOSTILE,
            name=f"{method}, framing",
            method=method,
            body=body,
            headers=headers,
            alone=True,
        )
    while True:
        message = damaged(base, random) if random.random() < 0.3 else poison.not_a_message(base, random)
        if parsed(method, message) is None:
            body = poison.framed(message)
            return Case(number=number, kind=HOSTILE, name=f"{method}, no message", method=method, body=body)


_HEADERS: Sequence[Headers] = (
    {"content-type": "text/html"},
    {"content-type": "application/grpc-web+proto"},
    {"content-type": "application/json"},
    {"content-type": ""},
    {"te": ""},
    {"te": "gzip"},
    {":method": "GET"},
    {":method": "DELETE"},
    {":scheme": "ftp"},
    {":authority": ""},
    {"grpc-timeout": "-1S"},
    {"grpc-timeout": "1"},
    {"grpc-timeout": "999999999999H"},
    {"grpc-timeout": "0n"},
    {"grpc-timeout": "99999999H"},
    {"grpc-encoding": "br"},
    {"grpc-encoding": "\0"},
    {"grpc-accept-encoding": "," * 3000},
    {"content-length": "-1"},
    {"content-length": "99999999999"},
    {"connection": "close"},
    {"transfer-encoding": "chunked"},
    {"Upper-Case": "x"},
    {"x-bin": "%%%"},
    {"x": "\r\n\r\n"},
    {"x": "a" * 20_000},
    {"x": "a" * 80_000},
    {f"x-{number}": "y" for number in range(200)},
    {"grpc-trace-bin": "AAAA"},
    {"traceparent": "00-" + "f" * 32 + "-" + "0" * 16 + "-zz"},
    {"user-agent": "\x7f"},
    {":status": "200"},
    {":path": ""},
)

_PATHS = (
    "/",
    "//",
    "*",
    "/vllm.grpc.engine.VllmEngine",
    "/vllm.grpc.engine.VllmEngine/",
    "/vllm.grpc.engine.VllmEngine/generate",
    "/vllm.grpc.engine.VllmEngine/Generate/",
    "/vllm.grpc.engine.VllmEngine/Generate?x=1",
    "/vllm.grpc.engine.VllmEngine/%47enerate",
    "//vllm.grpc.engine.VllmEngine/Generate",
    "/vllm.grpc.engine.VllmEngine/Sleep",
    "/vllm.grpc.engine.vllmEngine/Generate",
    "/vllm.Inference/Generate",
    "/sglang.grpc.scheduler.SglangScheduler/Generate",
    "/grpc.health.v1.Health/Nope",
    "/" + "a" * 7000,
    "http://localhost/vllm.grpc.engine.VllmEngine/Generate",
    "/vllm.grpc.engine.VllmEngine/Generate\x00",
    "/../../etc/passwd",
)


def _bad_headers(random: Random, path: str) -> tuple[str, Headers]:
    """(path, header fields) of a call that is not quite one. Its request is poisoned, so nothing may pass anyhow."""
    if random.random() < 0.4:
        return random.choice(_PATHS), {}
    return path, random.choice(_HEADERS)
