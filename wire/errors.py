"""What goes wrong between bytes and structs."""

from __future__ import annotations


class WireError(Exception):
    """A message that does not fit the engine's layout."""


class LayoutError(Exception):
    """The installed engine's layout lacks a field the bridge must send or read; the text names it."""
