"""The input socket, against libzmq's DEALER: what an engine has in its process."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from bridge.wire.router import RouterSocket
from bridge.wire.zmtp import GREETING, ready

WAIT_S = 10.0
Deal = Callable[..., "zmq.Socket[bytes]"]


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "i")


@pytest.fixture
def router(path: str) -> Iterator[RouterSocket]:
    made = RouterSocket(path)
    yield made
    made.close()


@pytest.fixture
def deal_to(path: str) -> Iterator[Deal]:
    """Connects DEALER sockets that call themselves what is asked, with options by name."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made = []

    def connect(identity: bytes, **options: int) -> zmq.Socket[bytes]:
        dealer = context.socket(zmq.DEALER)
        made.append(dealer)
        dealer.setsockopt(zmq.IDENTITY, identity)
        for name, value in options.items():
            dealer.setsockopt(getattr(zmq, name), value)
        dealer.connect(f"ipc://{path}")
        return dealer

    yield connect
    context.destroy(0)


def until(router: RouterSocket, condition: Callable[[], object]) -> None:
    """Service the socket as an event loop does, until `condition` holds."""
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end
        if select.select([router.fd], [], [], 0.02)[0]:
            router.service()


def received(dealer: zmq.Socket[bytes]) -> list[bytes]:
    assert dealer.poll(WAIT_S * 1000), "nothing came"
    return dealer.recv_multipart()


def test_a_dealer_is_known_by_its_identity_and_what_it_sent(router: RouterSocket, deal_to: Deal) -> None:
    for identity in (b"\0\0", b"\1\0"):
        deal_to(identity).send_multipart([b"map", b"of " + identity])
    until(router, lambda: len(router.messages) == 2)
    assert sorted(router.messages) == [(one, [b"map", b"of " + one]) for one in (b"\0\0", b"\1\0")]


def test_messages_go_to_the_dealer_they_are_for(router: RouterSocket, deal_to: Deal) -> None:
    dealers = {identity: deal_to(identity) for identity in (b"\0\0", b"\1\0")}
    for dealer in dealers.values():
        dealer.send(b"here")
    until(router, lambda: len(router.messages) == 2)
    frames = [b"\0", b"x" * 255, b"y" * 256, b"", b"z" * 100_000]
    for identity in dealers:
        assert router.send(identity, [*frames, identity])
    for identity, dealer in dealers.items():
        assert received(dealer) == [*frames, identity]


def test_a_message_may_have_more_frames_than_one_system_call_takes(router: RouterSocket, deal_to: Deal) -> None:
    frames = [b"%d" % number for number in range(3000)]
    dealer = deal_to(b"\0\0")
    dealer.send(b"map")
    until(router, lambda: router.messages)
    assert router.send(b"\0\0", frames)
    assert received(dealer) == frames


def test_an_identity_that_nobody_has_is_not_sent_to(router: RouterSocket, deal_to: Deal) -> None:
    assert not router.send(b"\0\0", [b"x"])
    deal_to(b"\1\0").send(b"here")
    until(router, lambda: router.messages)
    assert not router.send(b"\0\0", [b"x"])


def test_a_dealer_that_does_not_read_holds_nobody_up_and_loses_nothing(router: RouterSocket, deal_to: Deal) -> None:
    slow, quick = deal_to(b"s", RCVHWM=1), deal_to(b"q")
    for dealer in (slow, quick):
        dealer.send(b"here")
    until(router, lambda: len(router.messages) == 2)
    sent = [number.to_bytes(4, "big") * 25_000 for number in range(40)]
    for message in sent:
        assert router.send(b"s", [b"\0", message])
        assert router.send(b"q", [b"\0", message[:10]])
    for message in sent:
        assert received(quick) == [b"\0", message[:10]]
    got: list[bytes] = []

    def read() -> bool:
        while slow.poll(0):
            got.append(slow.recv_multipart()[1])
        return len(got) == len(sent)

    until(router, read)
    assert got == sent
    assert not select.select([router.fd], [], [], 0.1)[0], "it asks to write what it has not"


def test_the_end_of_a_dealer_is_told_and_its_successor_takes_over(router: RouterSocket, deal_to: Deal) -> None:
    first = deal_to(b"\0\0")
    first.send(b"one")
    until(router, lambda: router.messages)
    first.close(0)
    until(router, lambda: router.gone)
    assert list(router.gone) == [b"\0\0"]
    assert not router.send(b"\0\0", [b"x"])
    second = deal_to(b"\0\0")
    second.send(b"two")
    until(router, lambda: len(router.messages) == 2)
    assert router.send(b"\0\0", [b"hello"])
    assert received(second) == [b"hello"]


def test_a_message_to_a_dealer_that_just_left_is_refused_and_its_end_is_still_told(
    router: RouterSocket, path: str
) -> None:
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(path)
        peer.send(GREETING + ready(b"DEALER"))
        until(router, lambda: router.send(b"", [b"x"]))
    end = time.monotonic() + WAIT_S
    while router.send(b"", [b"x"]):
        assert time.monotonic() < end
    until(router, lambda: router.gone)
    assert list(router.gone) == [b""]


def test_a_dealer_that_returns_before_its_end_was_read_keeps_its_identity(router: RouterSocket, deal_to: Deal) -> None:
    first = deal_to(b"\0\0")
    first.send(b"one")
    until(router, lambda: router.messages)
    first.close(0)
    second = deal_to(b"\0\0")
    second.send(b"two")
    until(router, lambda: len(router.messages) == 2)
    assert router.send(b"\0\0", [b"hello"])
    assert received(second) == [b"hello"]


@pytest.mark.parametrize(
    "data",
    [GREETING + ready(b"PUSH"), GREETING + b"\0\1x", GREETING + b"\4\x0a\5READY\x0bSoc"],
    ids=["PUSH", "message before READY", "READY cut short"],
)
def test_a_stranger_is_shown_the_door(router: RouterSocket, path: str, data: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(WAIT_S)
        stranger.connect(path)
        stranger.sendall(data)
        stranger.setblocking(False)

        def closed() -> bool:
            try:
                return stranger.recv(1024) == b""
            except BlockingIOError:
                return False

        until(router, closed)
    assert not router.gone and not router.messages


def test_a_path_that_is_taken_is_an_error(path: str, router: RouterSocket) -> None:
    with pytest.raises(OSError, match="in use"):
        RouterSocket(path)
