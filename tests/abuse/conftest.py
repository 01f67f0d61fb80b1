"""Fixtures of the abuse suite."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.abuse.arena import Arena
from tests.apart import is_left_out


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """`make test-abuse` runs these tests: they measure, and want the machine for themselves."""
    return is_left_out(Path(__file__).parent, config)


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
