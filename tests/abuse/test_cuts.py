"""A connection that is cut at every byte of a request and of a response leaves nothing, in the engine or here."""

from __future__ import annotations

import ssl
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
import pytest

from tests.abuse.cuts import Ending, conversation, cut_request, cut_response, cut_tls
from tests.abuse.target import Target

AT_ONCE = 32
"""Cuts between two looks at what is left."""
LONG, SHORT = conversation(20_000), conversation(4)
STREAMED_BYTES = 700
"""Of a long answer: SETTINGS, headers and some ten chunks."""
SOON_S = 0.5
"""By which the requests of half of the cuts are gone; a busy machine may take longer now and then."""
FLAGS = ("--step-ms", 2, "--per-request-ms", 0, "--prefill-tps", 0)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with TemporaryDirectory(prefix="cuts-") as path:
        yield Path(path)


@pytest.fixture(scope="module")
def target(folder: Path) -> Iterator[Target]:
    with Target(folder, *FLAGS) as running:
        yield running.wait_until_serving()


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(AT_ONCE) as made:
        yield made


def at_every_byte(target: Target, pool: ThreadPoolExecutor, sizes: range, cut: Callable[[int], object]) -> None:
    """Cut at each of `sizes`. After every few no request is left, soon; in the end no descriptor either."""
    target.must_forget()
    descriptors = target.front_end.num_fds()
    took_s: list[float] = []
    for first in range(sizes.start, sizes.stop, AT_ONCE):
        list(pool.map(cut, sizes[first - sizes.start : first - sizes.start + AT_ONCE]))
        took_s.append(target.must_forget())
    assert statistics.median(took_s) < SOON_S
    target.must_close(descriptors)
    target.must_answer()


@pytest.mark.parametrize("ending", Ending)
def test_of_a_request(target: Target, pool: ThreadPoolExecutor, ending: Ending) -> None:
    sizes = range(len(LONG) + 1)
    at_every_byte(target, pool, sizes, lambda size: cut_request(target.port, LONG, size, ending))
    target.must_forget()
    assert target.requests() == {"running": 0, "waiting": 0, "table": 0}


def test_the_last_byte_of_a_request_is_what_brings_it_to_the_engine(target: Target) -> None:
    for size in (len(LONG) - 1, len(LONG)):
        before = target.sim.state()["aborted"]
        cut_request(target.port, LONG, size, Ending.HALF_CLOSE)
        target.must_forget()
        assert target.sim.state()["aborted"] == before + (size == len(LONG))


@pytest.mark.parametrize("ending", Ending)
def test_of_a_response_that_goes_on(target: Target, pool: ThreadPoolExecutor, ending: Ending) -> None:
    before = target.sim.state()["aborted"]
    sizes = range(STREAMED_BYTES)
    at_every_byte(target, pool, sizes, lambda size: cut_response(target.port, LONG, size, ending))
    assert target.sim.state()["aborted"] >= before + STREAMED_BYTES - 100


@pytest.mark.parametrize("ending", Ending)
def test_of_a_whole_response(target: Target, pool: ThreadPoolExecutor, ending: Ending) -> None:
    whole = cut_response(target.port, SHORT, STREAMED_BYTES, Ending.CLOSE)
    assert len(whole) < STREAMED_BYTES
    sizes = range(len(whole) + 1)
    at_every_byte(target, pool, sizes, lambda size: cut_response(target.port, SHORT, size, ending))


@pytest.fixture(scope="module")
def tls_target(certificate: Path) -> Iterator[Target]:
    credentials = grpc.ssl_channel_credentials(certificate.read_bytes())
    with (
        TemporaryDirectory(prefix="cuts-") as path,
        Target(Path(path), *FLAGS, "--tls-cert", certificate, tls=credentials) as running,
    ):
        yield running.wait_until_serving()


@pytest.mark.parametrize("ending", Ending)
def test_of_a_tls_connection(tls_target: Target, pool: ThreadPoolExecutor, certificate: Path, ending: Ending) -> None:
    context = ssl.create_default_context(cafile=str(certificate))
    context.set_alpn_protocols(["h2"])
    whole = cut_tls(tls_target.port, context, LONG, 1 << 20, Ending.HALF_CLOSE)
    assert whole > 500 + len(LONG)
    sizes = range(whole + 1)
    at_every_byte(tls_target, pool, sizes, lambda size: cut_tls(tls_target.port, context, LONG, size, ending))
