"""Requests of any RPC, made by walking its descriptor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from random import Random
from typing import Any

from google.protobuf.descriptor import Descriptor, MethodDescriptor
from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from tests.fuzz import encoding
from tests.fuzz.fields import Model, name_of, near_values, valid_value, values_of

SERVICE = pb.DESCRIPTOR.services_by_name["VllmEngine"]
METHODS: Mapping[str, MethodDescriptor] = SERVICE.methods_by_name
GENERATE = "Generate"

DEEPEST = 5
"""Messages inside each other that are filled or looked into; the contract's own nesting is less."""

Path = tuple[Field, ...]
"""From a field of the request down to the one that is meant; all but the last are single messages."""


def path_of(method: str) -> str:
    return f"/{SERVICE.full_name}/{method}"


def empty(method: str) -> Message:
    return GetMessageClass(METHODS[method].input_type)()


def parsed(method: str, body: bytes) -> Message | None:
    """The request as protobuf's own parser reads it; None when it refuses."""
    message = empty(method)
    try:
        message.ParseFromString(body)
    except DecodeError:
        return None
    return message


def valid(method: str, random: Random, model: Model) -> Message:
    """A request that the worker must accept, if it has the features."""
    message = empty(method)
    _fill(message, random, model, 1)
    if isinstance(message, pb.GenerateRequest):
        _agree(message, random, model)
    return message


def _fill(message: Message, random: Random, model: Model, depth: int) -> None:
    for oneof in message.DESCRIPTOR.oneofs:
        if len(oneof.fields) > 1:
            _fill_oneof(message, oneof.fields, random, model, depth)
    for field in message.DESCRIPTOR.fields:
        alone = field.containing_oneof is None or len(field.containing_oneof.fields) == 1
        if alone and random.random() < _chance(field) and name_of(field) not in model.without:
            _set(message, field, random, model, depth)


def _fill_oneof(message: Message, fields: Sequence[Field], random: Random, model: Model, depth: int) -> None:
    draw = random.random()
    for field in fields:
        draw -= _chance(field)
        if draw < 0:
            _set(message, field, random, model, depth)
            return


def asks_for_what_lacks(message: Message, model: Model) -> bool:
    """Whether a field of `model.without` is set, at any depth of single messages."""
    if not model.without:
        return False
    return any(
        name_of(field) in model.without
        or (field.type == Field.TYPE_MESSAGE and not field.is_repeated and asks_for_what_lacks(value, model))
        for field, value in message.ListFields()
    )


def _chance(field: Field) -> float:
    values = values_of(field)
    return 0.3 if values is None else values.chance


def _set(message: Message, field: Field, random: Random, model: Model, depth: int) -> None:
    if field.type == Field.TYPE_MESSAGE and not _is_map(field):
        if depth >= DEEPEST:
            return
        if field.is_repeated:
            for _ in range(random.randint(0, 2)):
                _fill(getattr(message, field.name).add(), random, model, depth + 1)
        else:
            child = getattr(message, field.name)
            child.SetInParent()
            _fill(child, random, model, depth + 1)
    elif _is_map(field):
        if field.message_type.fields_by_name["value"].type != Field.TYPE_MESSAGE:
            getattr(message, field.name).update(valid_value(field, random, model))
    elif field.is_repeated:
        getattr(message, field.name).extend(valid_value(field, random, model))
    else:
        setattr(message, field.name, valid_value(field, random, model))


def _is_map(field: Field) -> bool:
    return field.type == Field.TYPE_MESSAGE and bool(field.message_type.GetOptions().map_entry)


def _agree(message: pb.GenerateRequest, random: Random, model: Model) -> None:
    """Make the fields of a valid request agree with each other."""
    if message.WhichOneof("input") is None:
        message.tokenized.input_ids.extend((5, 6, 7))
    params = message.sampling_params
    cap = model.max_output
    if cap is not None and not params.HasField("max_tokens"):
        params.max_tokens = random.randint(1, cap)
    if params.HasField("max_tokens") and params.min_tokens > params.max_tokens:
        params.min_tokens = params.max_tokens
    if params.n > 1 and params.HasField("temperature") and params.temperature == 0:
        params.temperature = 0.5
    if params.WhichOneof("constraint") is not None:
        for ends in ("min_tokens", "ignore_eos", "stop_token_ids"):  # what vLLM lets contradict a grammar
            params.ClearField(ends)
    if message.HasField("kv_transfer_params") and message.HasField("kv_transfer_params_json"):
        message.ClearField("kv_transfer_params")


# -- at the limits -----------------------------------------------------------------------------------------------------


@cache
def leaves(descriptor: Descriptor) -> tuple[Path, ...]:
    """Every field that holds no single message, with the way to it."""
    return tuple(_leaves(descriptor, ()))


def _leaves(descriptor: Descriptor, above: Path) -> Iterator[Path]:
    for field in descriptor.fields:
        if field.type == Field.TYPE_MESSAGE and not field.is_repeated and len(above) < DEEPEST:
            yield from _leaves(field.message_type, (*above, field))
        else:
            yield (*above, field)


def near(method: str, random: Random, model: Model) -> bytes:
    """A valid request of which one to three fields are put at or past a limit."""
    message = valid(method, random, model)
    paths = leaves(message.DESCRIPTOR)
    if not paths:
        return message.SerializeToString()
    used = [path for path in paths if len(path) <= 2]
    suffix = b""
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        path = random.choice(paths if random.random() < 0.1 else used)
        values = list(near_values(path[-1], model))
        value = random.choice(values)
        if path[-1].is_repeated:
            clear(message, path)
        suffix += at(path, encoded(path[-1], value))
    return message.SerializeToString() + suffix


def clear(message: Any, path: Path) -> None:
    for field in path[:-1]:
        if not message.HasField(field.name):
            return
        message = getattr(message, field.name)
    message.ClearField(path[-1].name)


def at(path: Path, content: bytes) -> bytes:
    """`content`, fields of the message that holds the last of `path`, as bytes of the request."""
    for field in reversed(path[:-1]):
        content = encoding.data(field.number, content)
    return content


def encoded(field: Field, value: Any) -> bytes:
    """One value of a field; a list is a repeated field's, a dict a map's, and an empty one of either is no bytes."""
    if isinstance(value, dict):
        entry = field.message_type.fields_by_name
        pairs = (encoded(entry["key"], key) + encoded(entry["value"], item) for key, item in value.items())
        return b"".join(encoding.data(field.number, pair) for pair in pairs)
    if isinstance(value, list):
        if field.type in _VARINTS:
            return encoding.packed(field.number, value) if value else b""
        return b"".join(encoded(field, item) for item in value)
    if field.type == Field.TYPE_FLOAT:
        return encoding.float32(field.number, value)
    if field.type == Field.TYPE_DOUBLE:
        return encoding.float64(field.number, value)
    if field.type in _VARINTS:
        return encoding.integer(field.number, int(value))
    return encoding.data(field.number, value.encode() if isinstance(value, str) else value)


_VARINTS = frozenset(
    (Field.TYPE_INT32, Field.TYPE_INT64, Field.TYPE_UINT32, Field.TYPE_UINT64, Field.TYPE_BOOL, Field.TYPE_ENUM)
)


def damaged(body: bytes, random: Random) -> bytes:
    """`body` with a few bytes changed, cut out, put in or repeated."""
    out = bytearray(body) or bytearray(b"\0")
    for _ in range(random.choice((1, 1, 2, 4, 8))):
        place = random.randrange(len(out) + 1)
        match random.randrange(5):
            case 0 if out:
                out[place % len(out)] ^= 1 << random.randrange(8)
            case 1:
                del out[place : place + random.randint(1, 8)]
            case 2:
                out[place:place] = random.randbytes(random.randint(1, 8))
            case 3:
                out[place:place] = out[place : place + random.randint(1, 32)]
            case _:
                del out[place:]
    return bytes(out)
