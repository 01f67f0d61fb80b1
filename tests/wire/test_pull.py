"""The output socket, against libzmq's PUSH: what an engine has in its process."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from bridge.wire.pull import PullSocket
from bridge.wire.zmtp import GREETING, ready

WAIT_S = 10.0
PUSH_READY, PULL_READY = ready(b"PUSH"), ready(b"PULL")


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "o")


@pytest.fixture
def pull(path: str) -> Iterator[PullSocket]:
    made = PullSocket(path)
    yield made
    made.close()


Push = Callable[..., "zmq.Socket[bytes]"]


@pytest.fixture
def push_to(path: str) -> Iterator[Push]:
    """Connects PUSH sockets, with options by name."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made = []

    def connect(**options: int) -> zmq.Socket[bytes]:
        push = context.socket(zmq.PUSH)
        made.append(push)
        for name, value in options.items():
            push.setsockopt(getattr(zmq, name), value)
        push.connect(f"ipc://{path}")
        return push

    yield connect
    for push in made:
        if not push.closed:
            push.disable_monitor()
    context.destroy(0)


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
        GREETING + PULL_READY,
        GREETING + b"\0\1x",
        GREETING + PUSH_READY + b"\2\xff\xff\xff\xff\xff\xff\xff\xff",
        GREETING + PUSH_READY + b"\x40\1x",
        GREETING + b"\4\x09\5ERROR\2no",
    ],
    ids=["HTTP", "mechanism", "PULL", "message before READY", "frame size", "flags", "ERROR"],
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
