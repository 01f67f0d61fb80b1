"""Fixtures of the abuse suite."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.abuse.arena import Arena


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A short path, because ipc addresses have 107 bytes."""
    with TemporaryDirectory(prefix="abuse-") as path:
        yield Path(path)


@pytest.fixture(scope="module")
def arena(folder: Path) -> Iterator[Arena]:
    """A server with the default limits, with 64 good streams."""
    with Arena(folder) as made:
        yield made
