"""Layouts: the field order of an engine's positional (`array_like`) structs, as data.

A layout is a list of field names. An encoder or decoder struct is built from the layout of the engine that answered and
the fields we know: our fields land where that engine version has them, fields we do not know are sent as nil and
ignored when read, and a field we cannot do without is a `LayoutError` at start-up that names it.
"""

from __future__ import annotations

import functools
import keyword
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from bridge.wire.errors import LayoutError

log = logging.getLogger(__name__)

READY_MESSAGE = "ready message"
COMPANION = "companion"


def table_source(version: str) -> str:
    """The source name of a layout that came from a table of ours."""
    return f"table {version}"


@dataclass(frozen=True, slots=True)
class Field:
    """A field we send or read, and its Python type. A layout without it is a `LayoutError` when it has no default."""

    name: str
    type: Any
    default: Any = msgspec.NODEFAULT


class Layouts:
    """Struct name → field order, with the source of each: `ready message`, `companion` or `table X.Y.Z`.

    Raises `LayoutError` when an order is not a list of distinct names.
    """

    __slots__ = ("_orders", "_sources")

    def __init__(self, orders: Mapping[str, Sequence[str]], source: str) -> None:
        self._orders = {struct: _checked(struct, order, source) for struct, order in orders.items()}
        self._sources = dict.fromkeys(self._orders, source)

    def over(self, base: Layouts) -> Layouts:
        """These layouts, and those of `base` for the structs that are missing here."""
        merged = Layouts({}, "")
        merged._orders = {**base._orders, **self._orders}
        merged._sources = {**base._sources, **self._sources}
        return merged

    @property
    def structs(self) -> list[str]:
        return list(self._orders)

    @property
    def source(self) -> str:
        """Where the layouts came from, for people: one source, or several joined by ` + `."""
        return " + ".join(dict.fromkeys(self._sources.values()))

    def source_of(self, struct: str) -> str:
        return self._sources[struct]

    def order(self, struct: str) -> tuple[str, ...]:
        """The field names of `struct` in wire order; raises `LayoutError` when no source has that struct."""
        order = self._orders.get(struct)
        if order is None:
            raise LayoutError(f"no layout of {struct} is known; known ({self.source}): {', '.join(self._orders)}")
        return order

    def positions(self, struct: str, fields: Sequence[str]) -> tuple[int, ...]:
        """Index of each field in the array; raises `LayoutError` when this version lacks one."""
        order = self.order(struct)
        missing = ", ".join(field for field in fields if field not in order)
        if missing:
            raise LayoutError(f"the engine's {struct} ({self.source_of(struct)}) has no field {missing}")
        return tuple(order.index(field) for field in fields)


def encoder_struct(
    layouts: Layouts, struct: str, fields: Sequence[Field], *, tagged: bool = False
) -> type[msgspec.Struct]:
    """A struct that encodes to `struct` of this layout; construct it with keywords.

    The array ends at the last field we know, so what a newer engine appended takes the engine's default. A field in
    between that we do not know is nil, which is logged: the engine may refuse it. `tagged` puts the struct's name in
    front, which no layout counts.
    """
    built = _build(struct, layouts.order(struct), tuple(fields), layouts.source_of(struct), tagged)
    known = {field.name for field in fields}
    unknown = ", ".join(name for name in built.__struct_fields__ if name not in known)
    if unknown:
        log.warning("%s (%s) has fields that are sent as nil: %s", struct, layouts.source_of(struct), unknown)
    return built


def decoder_struct(layouts: Layouts, struct: str, fields: Sequence[Field]) -> type[msgspec.Struct]:
    """A struct that decodes `struct` of this layout; every name in `fields` is an attribute.

    A field that this layout lacks reads as its default. Fields that are not read, and elements past the last one that
    is, are ignored; a tail that the engine left out reads as defaults.
    """
    return _build(struct, layouts.order(struct), tuple(fields), layouts.source_of(struct), False)


@functools.cache
def _build(
    struct: str, order: tuple[str, ...], fields: tuple[Field, ...], source: str, tagged: bool
) -> type[msgspec.Struct]:
    known = {field.name: field for field in fields}
    required = [field.name for field in fields if field.default is msgspec.NODEFAULT]
    missing = ", ".join(name for name in required if name not in order)
    if missing:
        raise LayoutError(f"the engine's {struct} ({source}) has no field {missing}; it has: {', '.join(order)}")
    length = max((index for index, name in enumerate(order) if name in known), default=-1) + 1
    specs: list[tuple[str, Any] | tuple[str, Any, Any]] = []
    for name in order[:length]:
        field = known.get(name)
        if field is None:
            specs.append((name, Any, None))
        elif field.default is msgspec.NODEFAULT:
            specs.append((name, field.type))
        else:
            specs.append((name, field.type, field.default))
    absent = {field.name: field.default for field in fields if field.name not in order}
    return msgspec.defstruct(
        struct,
        specs,
        namespace=absent,
        tag=struct if tagged else None,
        array_like=True,
        gc=False,
        kw_only=True,
        module=__name__,
    )


def _checked(struct: str, order: Any, source: str) -> tuple[str, ...]:
    if not isinstance(order, (list, tuple)) or not order or len(set(map(str, order))) != len(order):
        raise LayoutError(f"the layout of {struct} ({source}) is not a list of distinct field names: {order!r}")
    for name in order:
        if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name) or name.startswith("__"):
            raise LayoutError(f"the layout of {struct} ({source}) has {name!r} where a field name should be")
    return tuple(order)
