"""The supervisor's slots are bound before the engine dials, drained for ever, and load figures are thinned out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from bridge.supervisor import engine_link
from bridge.supervisor.control import RankLoad
from bridge.supervisor.engine_link import FRONT_END_SLOT, EngineLink, LoadFeed
from bridge.supervisor.engines import Launch
from bridge.supervisor.errors import UsageError
from bridge.supervisor.listeners import bind_tcp
from bridge.supervisor.state import StateFolder
from bridge.wire.codec import Load
from bridge.wire.engines import codec_for
from bridge.wire.handshake import Phase, identity_of
from bridge.wire.link import LinkError, Slot


@pytest.fixture
def state(tmp_path: Path) -> Iterator[StateFolder]:
    folder = StateFolder.open(tmp_path / "s")
    yield folder
    folder.close()


class Told:
    """What a link reported."""

    def __init__(self, state: StateFolder, port: int = 0) -> None:
        self.phases: list[Phase] = []
        self.deaths: list[str] = []
        self.link = EngineLink(
            state, port=port, on_phase=self.phases.append, on_load=lambda load: None, on_death=self.deaths.append
        )


class Rank:
    """One dialling rank: the engine's side of the sockets, in raw ZMQ."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, rank: int = 0) -> None:
        self.context = context
        self.rank = rank
        self.handshake = self._socket(zmq.DEALER, address)
        self.sockets: list[zmq.Socket[bytes]] = [self.handshake]

    def _socket(self, kind: int, address: str) -> zmq.Socket[bytes]:
        socket = self.context.socket(kind)
        if kind == zmq.DEALER:
            socket.setsockopt(zmq.IDENTITY, identity_of(self.rank))
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        return socket

    def say(self, status: str) -> None:
        self.handshake.send(msgspec.msgpack.encode({"status": status, "local": False, "headless": True}))

    async def init(self) -> dict[str, list[str]]:
        async with asyncio.timeout(5):
            while not self.handshake.poll(0):
                await asyncio.sleep(0.01)
        addresses: dict[str, list[str]] = msgspec.msgpack.decode(self.handshake.recv())["addresses"]
        return addresses

    def dial_slots(self, addresses: dict[str, list[str]]) -> list[zmq.Socket[bytes]]:
        """Connect everything and send the ready map on every input; the output sockets."""
        for address in addresses["inputs"]:
            self.sockets.append(self._socket(zmq.DEALER, address))
            self.sockets[-1].send(msgspec.msgpack.encode({"vllm_version": "0.32.0", "rank": self.rank}))
        outputs = [self._socket(zmq.PUSH, address) for address in addresses["outputs"]]
        self.sockets += outputs
        return outputs

    def close(self) -> None:
        for socket in self.sockets:
            socket.close(0)


Dial = Callable[..., Rank]


@pytest.fixture
def dial() -> Iterator[Dial]:
    """Makes ranks, `dial(address, number)`."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    ranks: list[Rank] = []

    def make(address: str, number: int = 0) -> Rank:
        ranks.append(Rank(context, address, number))
        return ranks[-1]

    yield make
    for rank in ranks:
        rank.close()
    context.term()


async def until(condition: Callable[[], object], within_s: float = 5.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.01)


async def test_all_ranks_come_up_in_either_order(state: StateFolder, dial: Dial) -> None:
    told = Told(state)
    told.link.expect(Launch([], first_rank=0, rank_count=2))
    ranks = [dial(told.link.address, number) for number in (0, 1)]
    for rank in ranks:
        rank.say("HELLO")
    offers = [await rank.init() for rank in ranks]
    assert [len(offer["inputs"]) for offer in offers] == [3, 3] and not told.link.done
    ranks[0].say("READY")
    ranks[0].dial_slots(offers[0])
    ranks[1].dial_slots(offers[1])
    await asyncio.sleep(0.1)
    assert not told.link.done
    ranks[1].say("READY")
    await until(lambda: told.link.done)
    assert [(rank.identity, rank.ready["rank"]) for rank in told.link.ranks()] == [(b"\0\0", 0), (b"\1\0", 1)]
    assert told.phases[-1] is Phase.READY and told.deaths == []
    told.link.close()


async def test_a_rank_that_starts_anew_is_a_death(state: StateFolder, dial: Dial) -> None:
    told = Told(state)
    told.link.expect(Launch([]))
    rank = dial(told.link.address)
    rank.say("HELLO")
    rank.dial_slots(await rank.init())
    rank.say("READY")
    await until(lambda: told.link.done)
    rank.say("HELLO")
    await until(lambda: told.deaths)
    assert told.deaths == ["a rank started anew, so its work is lost"] and not told.link.done
    told.link.close()


async def test_strangers_on_the_handshake_are_ignored(
    state: StateFolder, dial: Dial, caplog: pytest.LogCaptureFixture
) -> None:
    told = Told(state)
    told.link.expect(Launch([]))
    dial(told.link.address, 7).say("HELLO")
    rank = dial(told.link.address)
    rank.say("HELLO")
    await rank.init()
    await until(lambda: "rank 7 is not among the 1" in caplog.text)
    assert told.phases == [Phase.LOADING]
    told.link.close()


async def test_the_free_slot_is_drained_and_the_front_ends_is_left_to_it(
    state: StateFolder, dial: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_link, "MESSAGES_PER_WAKEUP", 4)
    told = Told(state)
    told.link.expect(Launch([]))
    slot = Slot(FRONT_END_SLOT, *state.slot(FRONT_END_SLOT))
    rank = dial(told.link.address)
    rank.say("HELLO")
    outputs = rank.dial_slots(await rank.init())
    outputs[FRONT_END_SLOT].send(b"mine")
    outputs[2].setsockopt(zmq.SNDTIMEO, 2000)
    for number in range(5000):  # over the default high-water marks of both ends
        outputs[2].send(b"x")
        if number % 500 == 0:
            await asyncio.sleep(0.01)
    received: list[list[bytes]] = []

    def receive() -> bool:
        frames = slot.receive()
        if frames is not None:
            received.append(frames)
        return bool(received)

    await until(receive)
    assert received == [[b"mine"]]
    slot.close()
    told.link.close()


async def test_a_handshake_port_in_use_is_one_line(state: StateFolder) -> None:
    taken = bind_tcp("127.0.0.1", 0)
    with pytest.raises(UsageError, match=rf"handshake port {taken.port} is already in use.*--handshake-port"):
        Told(state, taken.port or 0)
    taken.close()


async def test_a_slot_held_by_another_process_is_one_line(state: StateFolder) -> None:
    slot = Slot(0, *state.slot(0))
    with pytest.raises(UsageError, match="another process serves the slot"):
        Told(state)
    slot.close()


async def test_loads_go_out_at_once_then_thinned_and_the_last_one_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_link, "LOAD_INTERVAL_S", 0.05)
    sent: list[RankLoad] = []
    feed = LoadFeed(sent.append)
    for running in range(100):
        feed.put(Load(rank=0, running=running))
        feed.put(Load(rank=1, running=-running))
        await asyncio.sleep(0.002)
    await asyncio.sleep(0.12)
    first = [load.running for load in sent if load.rank == 0]
    assert first[0] == 0 and first[-1] == 99 and len(first) <= 12
    assert [load.running for load in sent if load.rank == 1][-1] == -99
    quiet = len(sent)
    await asyncio.sleep(0.12)
    assert len(sent) == quiet
    feed.put(Load(rank=0, running=7))
    assert sent[-1].running == 7
    feed.close()


def up(told: Told) -> None:
    """Read slot 0 as of an engine that is up."""
    told.link.use(codec_for("vllm", {"vllm_version": "0.32.0"}, {}, engine_link.OWN_SLOT))


def step(*wire_ids: str) -> bytes:
    """A step with one token for each."""
    return msgspec.msgpack.encode([0, [[wire_id, [7]] for wire_id in wire_ids], None, 0.0])


def aborted(rank: Rank) -> list[str]:
    """Wire ids that the rank was told to abort on slot 0, since the last time."""
    found: list[str] = []
    socket = rank.sockets[1]
    while socket.poll(0):
        kind, payload = socket.recv_multipart()
        assert kind == b"\1"
        found += msgspec.msgpack.decode(payload)
    return found


async def brought_up(told: Told, dial: Dial) -> tuple[Rank, list[zmq.Socket[bytes]]]:
    told.link.expect(Launch([]))
    rank = dial(told.link.address)
    rank.say("HELLO")
    outputs = rank.dial_slots(await rank.init())
    rank.say("READY")
    await until(lambda: told.link.done)
    up(told)
    return rank, outputs


async def test_what_runs_for_a_slot_without_a_front_end_is_aborted_once(state: StateFolder, dial: Dial) -> None:
    told = Told(state)
    rank, outputs = await brought_up(told, dial)
    for _ in range(3):
        outputs[2].send(step("2.1.5", "2.1.6"))
    found: list[str] = []
    await until(lambda: found.extend(aborted(rank)) or len(found) >= 2)
    await asyncio.sleep(0.1)
    assert [*found, *aborted(rank)] == ["2.1.5", "2.1.6"]
    told.link.close()


async def test_a_slot_is_lent_and_reclaimed(state: StateFolder, dial: Dial) -> None:
    told = Told(state)
    rank, outputs = await brought_up(told, dial)
    told.link.lend(2)
    slot = Slot(2, *state.slot(2))
    with pytest.raises(LinkError, match="another process serves the slot"):
        told.link.reclaim(2)
    slot.close()
    told.link.reclaim(2)
    outputs[2].send(step("2.1.9"))
    found: list[str] = []
    await until(lambda: found.extend(aborted(rank)) or found)
    assert found == ["2.1.9"]
    told.link.close()


async def test_three_messages_that_cannot_be_read_are_a_death_and_two_are_not(state: StateFolder, dial: Dial) -> None:
    told = Told(state)
    _, outputs = await brought_up(told, dial)
    for _ in range(2):
        outputs[0].send(b"\xc1")
        outputs[0].send(b"\xc1")
        outputs[0].send(step())
    await asyncio.sleep(0.1)
    assert told.deaths == []
    for _ in range(3):
        outputs[0].send(b"\xc1")
    await until(lambda: told.deaths)
    assert told.deaths[0].startswith("3 messages in a row could not be decoded")
    told.link.close()


async def test_another_engine_takes_the_place_of_one_that_is_gone(state: StateFolder, dial: Dial) -> None:
    told = Told(state)
    rank, outputs = await brought_up(told, dial)
    outputs[0].send(b"ENGINE_CORE_DEAD")
    await until(lambda: told.deaths == ["it said that it died"])
    rank.close()
    await asyncio.sleep(0.1)
    rank, outputs = await brought_up(told, dial)
    told.link.abort(["1.1.1"])
    found: list[str] = []
    await until(lambda: found.extend(aborted(rank)) or found)
    assert found == ["1.1.1"] and len(told.deaths) == 1
    told.link.close()
