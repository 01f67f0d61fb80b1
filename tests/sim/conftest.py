"""A simulated engine and the raw front end it dialled, for one test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.sim.front_end import FrontEnd

Start = Callable[..., FrontEnd]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path, because ipc addresses have 107 bytes."""
    with TemporaryDirectory(prefix="sim-") as path:
        yield Path(path)


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """Call it with the engine's flags (and `pairs`, `index`, `shake`) for a running engine; stopped after the test.

    Steps take 2 ms unless a flag says otherwise.
    """
    with ExitStack() as stack:
        count = 0

        def begin(*flags: str, pairs: int = 1, index: int = 0, shake: bool = True) -> FrontEnd:
            nonlocal count
            count += 1
            place = folder / str(count)
            place.mkdir()
            if "--step-ms" not in flags:
                flags = ("--step-ms", "2", "--per-request-ms", "0", *flags)
            front = stack.enter_context(FrontEnd(place, *flags, pairs=pairs, index=index))
            if shake:
                front.shake()
            return front

        yield begin
