"""The control channel carries messages over a real socketpair, however the bytes are cut."""

from __future__ import annotations

import asyncio
import socket

import msgspec
import pytest

from bridge.supervisor.channel import (
    ControlChannel,
    compatible,
    front_end_end,
    supervisor_end,
)
from bridge.supervisor.control import (
    CONTROL_VERSION,
    Drain,
    EngineUp,
    Listener,
    Loading,
    Rank,
    RankLoad,
    Start,
    Started,
    ToFrontEnd,
    ToSupervisor,
)
from bridge.wire.companion import Facts

FACTS = Facts(
    engine="e", engine_version="1", bridge_version="1", model_path="m", tokenizer_path="m", served_model_name="m"
)
START = Start(
    engine="e",
    served_model_name="m",
    slot=1,
    incarnation=3,
    input_address="ipc://i",
    output_address="ipc://o",
    listeners=[Listener(fd=5, kind="grpc", address="127.0.0.1:1")],
    contracts=["c"],
    options={"max_in_flight": 7},
)


@pytest.mark.parametrize(("front_end", "runs"), [(-1, False), (0, True), (1, True), (2, False)])
def test_a_supervisor_runs_front_ends_of_its_version_and_the_next(front_end: int, runs: bool) -> None:
    assert compatible(CONTROL_VERSION, CONTROL_VERSION + front_end) is runs


async def ends() -> tuple[ControlChannel[ToSupervisor], ControlChannel[ToFrontEnd], socket.socket]:
    """Both ends, and a duplicate of the front end's socket to write raw bytes with."""
    ours, theirs = socket.socketpair()
    raw = theirs.dup()
    return await supervisor_end(ours), await front_end_end(theirs), raw


async def test_every_message_arrives_whole_and_in_order() -> None:
    supervisor, front_end, raw = await ends()
    raw.close()
    up = EngineUp(ranks=[Rank(b"\0\0", {"vllm_version": "1", "layouts": {"A": ["a"]}})], facts=FACTS)
    load = RankLoad(rank=0, running=1, waiting=2, kv_cache_usage=0.5)
    messages = [START, Loading(phase="p", elapsed_s=1.5), up, load, Drain(grace_s=2.0)]
    for message in messages:
        supervisor.send(message)
    assert [await front_end.receive() for _ in messages] == messages
    front_end.send(Started(pid=4))
    assert await supervisor.receive() == Started(pid=4)
    supervisor.close()
    front_end.close()


async def test_a_closed_end_is_none_for_ever_and_sends_are_dropped() -> None:
    supervisor, front_end, raw = await ends()
    raw.close()
    front_end.send(Started(pid=1))
    front_end.close()
    assert await asyncio.wait_for(supervisor.receive(), 5) == Started(pid=1)
    assert await asyncio.wait_for(supervisor.receive(), 5) is None
    supervisor.send(Drain(grace_s=0))
    assert await supervisor.receive() is None
    supervisor.close()


async def test_a_message_of_the_next_version_is_dropped_and_the_rest_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    supervisor, front_end, raw = await ends()
    body = msgspec.msgpack.encode({"type": "from_the_future", "x": 1})
    raw.sendall(len(body).to_bytes(4, "big") + body)
    raw.close()
    front_end.send(Started(pid=2))
    assert await asyncio.wait_for(supervisor.receive(), 5) == Started(pid=2)
    assert "from_the_future" in caplog.text
    supervisor.close()
    front_end.close()


async def test_bytes_that_are_no_message_close_the_channel(caplog: pytest.LogCaptureFixture) -> None:
    supervisor, front_end, raw = await ends()
    raw.sendall(b"\xff\xff\xff\xff")
    assert await asyncio.wait_for(supervisor.receive(), 5) is None
    assert "over the limit" in caplog.text
    raw.close()
    front_end.close()
