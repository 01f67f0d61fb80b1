"""The golden vectors, as `make_vectors.py` wrote them, and the independent decoder they are compared with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgpack

VECTORS = {path.stem: json.loads(path.read_text()) for path in (Path(__file__).parent / "vectors").glob("*.json")}
VERSIONS = sorted(VECTORS)

STEPS = [(version, entry) for version in VERSIONS for entry in VECTORS[version]["steps"]]
STEP_IDS = [f"{version}: {entry['name']}" for version, entry in STEPS]
CALLS = [(version, entry) for version in VERSIONS for entry in VECTORS[version]["calls"]]
CALL_IDS = [f"{version}: {entry['name']}" for version, entry in CALLS]


def frames_of(entry: dict[str, Any], key: str = "frames") -> list[bytes]:
    return [bytes.fromhex(frame) for frame in entry[key]]


def oracle(frame: bytes) -> Any:
    """What the `msgpack` package reads; extension types stay `ExtType`."""
    return msgpack.unpackb(frame, strict_map_key=False)


def named(order: list[str], array: list[Any]) -> dict[str, Any]:
    """A positional struct by field name."""
    assert len(array) == len(order)
    return dict(zip(order, array, strict=True))


def comparable(value: Any) -> Any:
    """Raw tensor bytes look the same from both decoders."""
    if isinstance(value, msgpack.ExtType):
        return value.data
    if isinstance(value, memoryview):
        return value.tobytes()
    if isinstance(value, (list, tuple)):
        return [comparable(item) for item in value]
    return value
