"""Fixtures of the abuse suite."""

from __future__ import annotations

import subprocess
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


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for localhost with its key, in one file."""
    folder = tmp_path_factory.mktemp("certificate")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=localhost", "-keyout", "key.pem", "-out", "cert.pem"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    both = folder / "both.pem"
    both.write_bytes((folder / "key.pem").read_bytes() + (folder / "cert.pem").read_bytes())
    return both
