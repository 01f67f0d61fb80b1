"""Real SGLang schedulers on the CPU, shared as widely as their tests allow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sglang.peer import Peer


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="session")
def lane(sglang_python: Path, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    """The lane of one rank with a tiny Llama, three slots offered."""
    with Peer(tmp_path_factory.mktemp("lane"), slots=3) as peer:
        yield peer.up(sglang_python, tiny_llama, "--enable-return-hidden-states")
