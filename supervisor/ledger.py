"""What a front end has in flight, in memory that outlives it: after a SIGKILL the supervisor reads there what to abort.

One ledger a front end, made by the supervisor and inherited as a descriptor: eight bytes of format, then cells of eight
bytes, each 0 or the counter of a live wire id. The process writes its own cells; nobody locks, nobody waits.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import tempfile

FORMAT = b"hbledg1\0"
"""Of the whole ledger. A front end of another version writes its own; what cannot be read counts as empty."""
HEADER = len(FORMAT)
HELD = 1 << 63
"""Set in a cell whose abort has to wait: another engine may still write this request's KV cache."""

_cell = struct.Struct("<Q")


def create(cells: int) -> int:
    """A descriptor of zeroed memory for that many live wire ids; raises OSError."""
    if sys.platform == "linux":
        fd = os.memfd_create("headless-bridge-ledger", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.truncate(fd, HEADER + cells * _cell.size)
    return fd


def read(fd: int) -> tuple[list[int], list[int]] | None:
    """The counters to abort now and those to abort later; None when the format is not ours. Leaves the descriptor open."""
    size = os.fstat(fd).st_size
    data = os.pread(fd, size, 0)
    if data[:HEADER] != FORMAT:
        return None if data[:HEADER].strip(b"\0") else ([], [])
    now, later = [], []
    for (value,) in _cell.iter_unpack(data[HEADER : HEADER + (size - HEADER) // _cell.size * _cell.size]):
        if value & HELD:
            later.append(value & ~HELD)
        elif value:
            now.append(value)
    return now, later


class Ledger:
    """The front end's side. Entering costs a free cell and eight bytes, leaving eight bytes."""

    def __init__(self, fd: int) -> None:
        """Map the descriptor, which may be closed afterwards."""
        self._map = mmap.mmap(fd, 0)
        self._map[:HEADER] = FORMAT
        cells = (len(self._map) - HEADER) // _cell.size
        self._free = list(range(HEADER + (cells - 1) * _cell.size, HEADER - 1, -_cell.size))

    def enter(self, counter: int, *, held: bool = False) -> int:
        """Note a wire id before it is sent; returns its cell, 0 when none is free: aborts that wait keep theirs."""
        if not self._free:
            return 0
        cell = self._free.pop()
        _cell.pack_into(self._map, cell, counter | HELD if held else counter)
        return cell

    def leave(self, cell: int) -> None:
        """The engine is done with it, or was told to be."""
        if not cell:
            return
        _cell.pack_into(self._map, cell, 0)
        self._free.append(cell)
