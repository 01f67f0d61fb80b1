"""Messages of the contracts whose protos are our own: `message("vllm.GenerateRequest")` is a protobuf class.

The build step (`build.py`) compiles them; nothing generated is under version control.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2

COMPILED = Path(__file__).with_name("contracts.binpb")
IMPORTED = (struct_pb2,)
"""Modules with the files that ours import, which must be in the pool before them."""


def _add_files() -> None:
    try:
        data = COMPILED.read_bytes()
    except FileNotFoundError:
        raise ImportError(
            f"{COMPILED} is missing: the build makes it, so install the project (pip install -e .)"
        ) from None
    pool = descriptor_pool.Default()
    for file in descriptor_pb2.FileDescriptorSet.FromString(data).file:
        pool.AddSerializedFile(file.SerializeToString())


_add_files()


def message(name: str) -> Any:
    """The class of a message by its full name; KeyError when no file has it."""
    return message_factory.GetMessageClass(descriptor_pool.Default().FindMessageTypeByName(name))


def enum(name: str) -> dict[str, int]:
    """The numbers of an enum's values, by their names; KeyError when no file has it."""
    found = descriptor_pool.Default().FindEnumTypeByName(name)
    return {value.name: value.number for value in found.values}


def methods(service: str) -> Iterable[tuple[str, Any, Any]]:
    """(name, request class, reply class) of each method of a service, by its full name; KeyError when there is none."""
    for method in descriptor_pool.Default().FindServiceByName(service).methods:
        yield method.name, message(method.input_type.full_name), message(method.output_type.full_name)
