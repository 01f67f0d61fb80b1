"""Companions under test: a toy one without an engine, and the real one in vLLM's environment."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Protocol

import pytest

from bridge.companion import CompanionGrammar, Latch
from tests.conftest import ROOT
from tests.running import Running


class Connect(Protocol):
    """Makes a client of a companion, with a latch of its own that may hold a backend already."""

    def __call__(self, path: Path, backend: str = "") -> CompanionGrammar: ...


@contextlib.contextmanager
def toy_at(path: Path, code: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """A toy companion that listens at `path`; `code` runs before it starts."""
    program = f"import sys\n{code}\nfrom tests.companion import toy\ntoy.main(sys.argv[1])"
    command = [sys.executable, "-c", program, str(path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline()
            yield process
        finally:
            process.kill()


@pytest.fixture
def toy(tmp_path: Path) -> Iterator[Path]:
    """The socket of a running toy companion."""
    with toy_at(tmp_path / "c"):
        yield tmp_path / "c"


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """Clients are closed at the end."""
    made: list[CompanionGrammar] = []

    def make(path: Path, backend: str = "") -> CompanionGrammar:
        latch = Latch()
        if backend:
            latch.take(backend)
        made.append(CompanionGrammar(str(path), latch, lambda waited_s: None))
        return made[-1]

    yield make
    for one in made:
        one.close()
    await asyncio.sleep(0)


@pytest.fixture(scope="session")
def vllm_companion(vllm_python: Path, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The socket of vLLM's companion for SmolLM2, which has the vocabulary of a real model (49152)."""
    folder = tmp_path_factory.mktemp("companion")
    path = folder / "c"
    command = [vllm_python, "-m", "bridge.plugins.vllm.companion", "serve", path, "--", smollm2]
    with Running(command, folder / "log") as running:
        running.wait_for('"engine":"vllm"', 180)
        yield path
