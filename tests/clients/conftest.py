"""Fixtures of the clients' tests: a served simulated engine, and each client connected to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.abuse.target import Target
from tests.apart import is_left_out
from tests.clients.asking import Client, Connect
from tests.clients.certificates import Authority
from tests.clients.grpc_js import GrpcJsClient
from tests.clients.grpcio_aio import GrpcioAioClient
from tests.clients.grpcio_sync import GrpcioClient
from tests.clients.python_h2 import H2Client

CLIENTS: dict[str, Callable[[Connect], Client]] = {
    "grpcio": GrpcioClient,
    "grpcio-aio": GrpcioAioClient,
    "grpc-js": GrpcJsClient,
    "h2": H2Client,
}
FLAGS = ("--step-ms", 5, "--per-request-ms", 0, "--prefill-tps", 0, "--max-model-len", 200_000)
"""200 steps a second, free prompts, and room for one of 100,000 tokens."""
FAST = (*FLAGS, "--max-num-seqs", 128, "--tokens-per-step", 16)
WIDE = (*FLAGS, "--max-num-seqs", 16, "--tokens-per-step", 512)

Opener = Callable[..., Client]


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """`make test-clients` installs what these tests need, and runs them."""
    return is_left_out(Path(__file__).parent, config)


@pytest.fixture(scope="session")
def place() -> Iterator[Path]:
    """A short path, because ipc addresses have 107 bytes."""
    with TemporaryDirectory(prefix="clients-") as path:
        yield Path(path)


@pytest.fixture(scope="session")
def target(place: Path) -> Iterator[Target]:
    """A served engine that makes 3,200 tokens a second for each request."""
    folder = place / "plain"
    folder.mkdir()
    with Target(folder, *FAST) as running:
        yield running.wait_until_serving()


@pytest.fixture(scope="session")
def wide(place: Path) -> Iterator[Target]:
    """A served engine that makes a request's 100,000 tokens in a second."""
    folder = place / "wide"
    folder.mkdir()
    with Target(folder, *WIDE) as running:
        yield running.wait_until_serving()


@pytest.fixture(scope="session")
def authority(place: Path) -> Authority:
    folder = place / "certificates"
    folder.mkdir()
    return Authority(folder)


@pytest.fixture
def connected() -> Iterator[Opener]:
    """Makes clients that are closed after the test."""
    with ExitStack() as stack:

        def make(name: str, where: Connect) -> Client:
            client = CLIENTS[name](where)
            stack.callback(client.close)
            return client

        yield make


@pytest.fixture(params=CLIENTS)
def name(request: pytest.FixtureRequest) -> str:
    """Each client's name in turn."""
    assert isinstance(request.param, str)
    return request.param


@pytest.fixture
def client(name: str, connected: Opener, target: Target) -> Client:
    """Each client in turn, connected."""
    return connected(name, Connect(target.address))
