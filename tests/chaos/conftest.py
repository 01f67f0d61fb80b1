"""The table that this folder's tests fill, written to docs/reliability.md when BRIDGE_WRITE_TABLE asks for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.table import Table
from tests.conftest import ROOT


@pytest.fixture(scope="session")
def table(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Table]:
    table = Table()
    yield table
    asked = os.environ.get("BRIDGE_WRITE_TABLE")
    table.write(ROOT / "docs/reliability.md" if asked else Path(tmp_path_factory.getbasetemp()) / "reliability.md")
