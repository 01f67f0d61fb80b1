"""Structs built from a field order and the fields we know."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from bridge.wire.errors import LayoutError
from bridge.wire.layout import COMPANION, Field, Layouts, decoder_struct, encoder_struct, table_source

FIELDS = (Field("id", str), Field("tokens", list[int]), Field("finish", int | None, None), Field("late", str, "none"))


def layouts(order: Any, source: str = COMPANION) -> Layouts:
    return Layouts({"Output": order}, source)


def decode(order: list[str], message: list[Any]) -> Any:
    struct = decoder_struct(layouts(order), "Output", FIELDS)
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=struct)


def test_fields_are_read_where_the_layout_has_them() -> None:
    read = decode(["finish", "other", "tokens", "id"], [1, {"a": [1]}, [5, 6], "x"])
    assert (read.id, read.tokens, read.finish, read.other) == ("x", [5, 6], 1, {"a": [1]})


def test_a_field_that_this_version_lacks_reads_as_its_default() -> None:
    read = decode(["id", "tokens"], ["x", [1], "appended later"])
    assert (read.finish, read.late) == (None, "none")


def test_a_built_struct_is_built_once() -> None:
    order = ["id", "tokens", "finish"]
    assert decoder_struct(layouts(order), "Output", FIELDS) is decoder_struct(layouts(order), "Output", FIELDS)


def test_what_is_sent_ends_at_the_last_field_we_know() -> None:
    struct = encoder_struct(layouts(["id", "unknown", "tokens", "new", "newer"]), "Output", FIELDS[:2])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(struct(id="x", tokens=[1]))) == ["x", None, [1]]


def test_a_missing_field_or_struct_is_a_named_error() -> None:
    with pytest.raises(
        LayoutError, match=r"the engine's Output \(table 1\.2\.0\) has no field tokens; it has: id, finish"
    ):
        decoder_struct(layouts(["id", "finish"], table_source("1.2.0")), "Output", FIELDS)
    with pytest.raises(LayoutError, match=r"no layout of Input is known; known \(companion\): Output"):
        layouts(["id"]).order("Input")
    with pytest.raises(LayoutError, match=r"Output \(companion\) has no field a, b"):
        layouts(["id"]).positions("Output", ("a", "id", "b"))


@pytest.mark.parametrize(
    "order", [[], "id", None, {"id": 1}, ["id", "id"], ["id", 5], ["a b"], ["class"], ["__slots__"], [""]]
)
def test_an_order_that_is_no_list_of_field_names_is_refused(order: Any) -> None:
    with pytest.raises(LayoutError, match="Output"):
        layouts(order)


def test_layouts_over_others_keep_each_struct_s_source() -> None:
    merged = layouts(["id"]).over(Layouts({"Output": ["tokens"], "Input": ["x"]}, table_source("1.2.0")))
    assert merged.order("Output") == ("id",)
    assert (merged.source_of("Output"), merged.source_of("Input")) == ("companion", "table 1.2.0")
    assert merged.structs == ["Output", "Input"]
