"""The golden vectors, as `make_vectors.py` wrote them, and the codec of each version."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgpack

from bridge.wire.sglang.codec import SglangCodec, from_ready

VECTORS = {path.stem: json.loads(path.read_text()) for path in (Path(__file__).parent / "vectors").glob("*.json")}
VERSIONS = sorted(VECTORS)

STEPS = [(version, entry) for version in VERSIONS for entry in VECTORS[version]["steps"]]
STEP_IDS = [f"{version}: {entry['name']}" for version, entry in STEPS]
CALLS = [(version, entry) for version in VERSIONS for entry in VECTORS[version]["calls"]]
CALL_IDS = [f"{version}: {entry['name']}" for version, entry in CALLS]


def ready_of(version: str, **changed: Any) -> dict[str, Any]:
    return {"vllm_version": f"sglang-{version}", "positional_layouts": VECTORS[version]["declared"], **changed}


def codec_of(version: str) -> SglangCodec:
    return from_ready(ready_of(version), {}, 0)


def frames_of(entry: dict[str, Any], key: str = "frames") -> list[bytes]:
    return [bytes.fromhex(frame) for frame in entry[key]]


def oracle(frame: bytes) -> Any:
    """What the `msgpack` package reads."""
    return msgpack.unpackb(frame, strict_map_key=False)


def step_named(name: str, version: str = "0.5.23") -> Any:
    """A recorded message, decoded."""
    entry = next(one for one in VECTORS[version]["steps"] if one["name"] == name)
    return codec_of(version).step(frames_of(entry))
