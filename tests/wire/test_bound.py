"""A slot's sockets, against libzmq's PUSH and DEALER: what an engine has in its process."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import zmq

from bridge.wire.bound import BoundSocket, PullSocket, RouterSocket
from bridge.wire.zmtp import GREETING, ready

WAIT_S = 10.0
PUSH_READY = ready(b"PUSH")


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "o")


@pytest.fixture
def pull(path: str) -> Iterator[PullSocket]:
    made = PullSocket(path)
    yield made
    made.close()


Push = Callable[..., "zmq.Socket[bytes]"]
Deal = Callable[..., "zmq.Socket[bytes]"]


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(0)


@pytest.fixture
def connected(context: zmq.Context[zmq.Socket[bytes]], path: str) -> Iterator[Callable[..., zmq.Socket[bytes]]]:
    """Connects sockets of a type, with options by name."""
    made = []

    def connect(kind: int, **options: int | bytes) -> zmq.Socket[bytes]:
        one = context.socket(kind)
        made.append(one)
        for name, value in options.items():
            one.setsockopt(getattr(zmq, name), value)
        one.connect(f"ipc://{path}")
        return one

    yield connect
    for one in made:
        if not one.closed:
            one.disable_monitor()


@pytest.fixture
def push_to(connected: Callable[..., zmq.Socket[bytes]]) -> Push:
    return partial(connected, zmq.PUSH)


@pytest.fixture
def deal_to(connected: Callable[..., zmq.Socket[bytes]]) -> Deal:
    def connect(identity: bytes, **options: int) -> zmq.Socket[bytes]:
        return connected(zmq.DEALER, IDENTITY=identity, **options)

    return connect


@pytest.fixture
def router(path: str) -> Iterator[RouterSocket]:
    made = RouterSocket(path)
    yield made
    made.close()


def receive(pull: PullSocket, count: int = 1) -> list[list[bytes]]:
    """`count` messages, waiting on the descriptor as an event loop does."""
    messages: list[list[bytes]] = []
    until = time.monotonic() + WAIT_S
    while len(messages) < count:
        assert time.monotonic() < until, f"{len(messages)} of {count} messages came"
        select.select([pull.fd], [], [], 0.5)
        while (message := pull.receive()) is not None:
            messages.append(message)
    return messages


def settle(pull: PullSocket, seconds: float = 0.3) -> list[list[bytes]]:
    """What comes in that time."""
    messages = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if select.select([pull.fd], [], [], 0.02)[0]:
            while (message := pull.receive()) is not None:
                messages.append(message)
    return messages


def test_messages_arrive_whole_and_in_order(pull: PullSocket, push_to: Push) -> None:
    push = push_to()
    sizes = [0, 1, 255, 256, 8191, 8192, 300_000, 3, 5_000_000, 7]
    sent = [bytes([number]) * size for number, size in enumerate(sizes)]
    for message in sent:
        push.send(message)
    assert receive(pull, len(sent)) == [[message] for message in sent]


def test_frames_of_a_message_stay_together(pull: PullSocket, push_to: Push) -> None:
    push = push_to()
    sent = [[b"a"], [b"b", b"", b"c" * 70_000], [b"", b""]]
    for frames in sent:
        push.send_multipart(frames)
    assert receive(pull, 3) == sent


def test_a_backlog_larger_than_any_buffer_is_drained(pull: PullSocket, push_to: Push) -> None:
    push = push_to(SNDHWM=0)
    sent = [number.to_bytes(4, "big") * (1 + number % 977) for number in range(20_000)]
    for message in sent:
        push.send(message)
    assert [frames[0] for frames in receive(pull, len(sent))] == sent


def test_several_peers_are_read_each_in_its_order(pull: PullSocket, push_to: Push) -> None:
    pushes = [push_to() for _ in range(3)]
    for number in range(100):
        for index, push in enumerate(pushes):
            push.send(bytes((index, number)))
    messages = [frames[0] for frames in receive(pull, 300)]
    for index in range(3):
        assert [message[1] for message in messages if message[0] == index] == list(range(100))


def test_a_peer_that_comes_back_is_read_again(pull: PullSocket, push_to: Push) -> None:
    for number in range(3):
        push = push_to(LINGER=1000)
        push.send(b"%d" % number)
        assert receive(pull) == [[b"%d" % number]]
        push.close()
        assert settle(pull, 0.1) == []


def test_a_push_that_waited_for_us_is_heard(path: str, push_to: Push) -> None:
    push = push_to(RECONNECT_IVL=20)
    push.send(b"early")
    time.sleep(0.1)
    pull = PullSocket(path)
    try:
        assert receive(pull) == [[b"early"]]
    finally:
        pull.close()


def test_heartbeats_are_answered(pull: PullSocket, push_to: Push) -> None:
    push = push_to(HEARTBEAT_IVL=30, HEARTBEAT_TIMEOUT=200)
    push.send(b"one")
    assert receive(pull) == [[b"one"]]
    with push.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
        assert settle(pull, 0.8) == []
        assert not monitor.poll(0), "the peer gave the connection up for want of a PONG"
    push.send(b"two")
    assert receive(pull) == [[b"two"]]


def test_bytes_that_trickle_make_the_same_messages(pull: PullSocket, path: str) -> None:
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(path)
        for byte in GREETING + PUSH_READY + b"\1\1a\0\1b" + b"\2\0\0\0\0\0\0\0\3xyz":
            peer.send(bytes((byte,)))
            settle(pull, 0.0)
            pull.receive()
        peer.send(b"\0\4last")
        assert receive(pull, 1)[-1] == [b"last"]


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n" + bytes(64),
        GREETING.replace(b"NULL", b"PLAI"),
        GREETING + ready(b"PULL"),
        GREETING + b"\0\1x",
        GREETING + PUSH_READY + b"\2\xff\xff\xff\xff\xff\xff\xff\xff",
        GREETING + PUSH_READY + b"\x40\1x",
        GREETING + b"\4\x09\5ERROR\2no",
        GREETING + b"\4\x0c\5READY\x0bSocke",
    ],
    ids=["HTTP", "mechanism", "PULL", "message before READY", "frame size", "flags", "ERROR", "cut property"],
)
def test_a_stranger_is_shown_the_door_and_others_are_still_read(
    pull: PullSocket, path: str, push_to: Push, data: bytes
) -> None:
    push = push_to()
    push.send(b"before")
    assert receive(pull) == [[b"before"]]
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(WAIT_S)
        stranger.connect(path)
        stranger.sendall(data)
        assert settle(pull, 0.1) == []
        received = stranger.recv(1024)
        while received:
            received = stranger.recv(1024)
    push.send(b"after")
    assert receive(pull) == [[b"after"]]


def until(router: RouterSocket, condition: Callable[[], object]) -> None:
    """Service the socket as an event loop does, until `condition` holds."""
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end
        if select.select([router.fd], [], [], 0.02)[0]:
            router.service()


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
        assert dealer.poll(WAIT_S * 1000)
        assert dealer.recv_multipart() == [*frames, identity]


def test_an_identity_that_nobody_has_is_not_sent_to(router: RouterSocket, deal_to: Deal) -> None:
    assert not router.send(b"\0\0", [b"x"])
    deal_to(b"\1\0").send(b"here")
    until(router, lambda: router.messages)
    assert not router.send(b"\0\0", [b"x"])


def test_a_dealer_that_does_not_read_holds_nobody_up(router: RouterSocket, deal_to: Deal) -> None:
    slow, quick = deal_to(b"s", RCVHWM=1), deal_to(b"q")
    for dealer in (slow, quick):
        dealer.send(b"here")
    until(router, lambda: len(router.messages) == 2)
    sent = [number.to_bytes(4, "big") * 25_000 for number in range(40)]
    for message in sent:
        assert router.send(b"s", [b"\0", message])
        assert router.send(b"q", [b"\0", message[:10]])
    for message in sent:
        assert quick.recv_multipart() == [b"\0", message[:10]]
    got: list[bytes] = []

    def read() -> bool:
        while slow.poll(0):
            got.append(slow.recv_multipart()[1])
        return len(got) == len(sent)

    until(router, read)
    assert got == sent


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
    assert second.recv_multipart() == [b"hello"]


def test_a_dealer_that_returns_before_its_end_was_read_keeps_its_identity(router: RouterSocket, deal_to: Deal) -> None:
    first = deal_to(b"\0\0")
    first.send(b"one")
    until(router, lambda: router.messages)
    first.close(0)
    second = deal_to(b"\0\0")
    second.send(b"two")
    until(router, lambda: len(router.messages) == 2)
    assert router.send(b"\0\0", [b"hello"])
    assert second.recv_multipart() == [b"hello"]


@pytest.mark.parametrize("kind", [PullSocket, RouterSocket])
def test_a_path_that_is_taken_is_an_error_and_leaks_nothing(path: str, kind: type[BoundSocket]) -> None:
    first = kind(path)
    with pytest.raises(OSError, match="in use"):
        kind(path)
    first.close()
