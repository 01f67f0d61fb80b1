"""Who goes the express way in a step, who leaves it, and that windows hold whatever else the step does."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from bridge.contracts.vllm_inference_render import PLAIN
from bridge.contracts.vllm_render import PlainSink
from bridge.grpc.framing import frame
from bridge.grpc.outflow import NOTHING, Outflow
from bridge.grpc.status import Code
from bridge.requests import FEW, Request, RequestTable, Rich, Sequence
from bridge.wire.codec import GenerateCall, Sampling
from tests.frontend.test_requests import LENGTH, RANK, Bench

STOP_ID = 99


class Call:
    """A call whose headers are out."""

    method = ""
    framed = True

    def __init__(self, stream_id: int, outflow: Outflow, credit: int) -> None:
        self.stream_id = stream_id
        self.outflow = outflow
        self.credit = credit
        self.blocked = False
        self.unsent = NOTHING
        self.finished = False
        self.hold: Any = None

    def send(self, message: bytes) -> None:
        self.outflow.send(self, frame(message))  # type: ignore[arg-type]

    def finish(self, *status: Any) -> None:
        self.finished = True

    def block(self) -> None:
        if not self.blocked:
            self.blocked = True
            self.hold()

    def emptied(self) -> bool:
        return False


class Stops:
    """Finds a stop string in one token."""

    pieces = None

    def feed(self, tokens: list[int]) -> tuple[int, str] | None:
        return (1, "Z") if STOP_ID in tokens else None


class Bare(PlainSink):
    """Its chunks after the first count nothing."""

    __slots__ = ()

    def chunk(self, sequence: Sequence, tokens: list[int]) -> None:
        super().chunk(sequence, tokens)
        self.template = PLAIN


class Stage:
    """Streams over one outflow or several, without connections."""

    def __init__(self, connections: int = 1) -> None:
        self.bench = Bench(max_in_flight=1000)
        self.outflows = [Outflow(lambda: None) for _ in range(connections)]
        self.calls: dict[str, Call] = {}
        self.frames: dict[tuple[int, int], list[bytes]] = {}

    @property
    def table(self) -> RequestTable:
        return self.bench.table

    def stream(
        self, connection: int = 0, *, credit: int = 65535, searched: bool = False, sink: type[PlainSink] = PlainSink
    ) -> str:
        """A new stream's wire id."""
        call: Any = Call(2 * len(self.calls) + 1, self.outflows[connection], credit)
        request = Request("", [1, 2], call, sink(call, 2), stream=True, arrived=0.0)
        call.hold = partial(self.table.hold, request)

        def rich() -> Rich:
            made = Rich()
            made.stops = Stops()  # type: ignore[assignment]
            return made

        asked = GenerateCall(wire_id="", prompt_token_ids=[1, 2], sampling=Sampling(max_tokens=100), arrival_time=0.0)
        self.table.admit(request, RANK, [asked], rich if searched else None)
        (sequence,) = request.sequences
        self.calls[sequence.wire_id] = call
        return sequence.wire_id

    def step(self, tokens: dict[str, int], finish: int | None = None) -> None:
        self.bench.deliver(*((wire_id, [token], finish) for wire_id, token in tokens.items()))

    def flush(self) -> None:
        """Write what was sent, as far as windows reach."""
        for connection, outflow in enumerate(self.outflows):
            outflow.pump()
            data = b"".join(outflow.take())
            while data:
                end = 9 + int.from_bytes(data[:3], "big")
                self.frames.setdefault((connection, int.from_bytes(data[5:9], "big")), []).append(data[9:end])
                data = data[end:]

    def replies(self, wire_id: str) -> list[Any]:
        """The messages of a stream so far."""
        call = self.calls[wire_id]
        body, found = b"".join(self.frames.get((self.outflows.index(call.outflow), call.stream_id), [])), []
        while body:
            end = 5 + int.from_bytes(body[1:5], "big")
            found.append(body[5:end])
            body = body[end:]
        return found

    def chunks(self, wire_id: str) -> list[tuple[list[int], int]]:
        """The tokens and the count of each chunk so far."""
        read = [pb.GenerateResponse.FromString(one).chunk for one in self.replies(wire_id)]
        return [(list(one.token_ids), one.completion_tokens) for one in read]

    @property
    def flying(self) -> set[str]:
        return {*self.table._express, *self.table._watched}


@pytest.mark.parametrize("streams", [3, FEW + 8])
def test_a_stream_flies_from_its_second_token_on(streams: int) -> None:
    stage = Stage()
    ids = [stage.stream() for _ in range(streams)]
    stage.step(dict.fromkeys(ids, 5))
    assert stage.flying == set(ids)
    for token in range(10, 20):
        stage.step(dict.fromkeys(ids, token))
    stage.flush()
    expected = [([5], 1), *(([token], token - 8) for token in range(10, 20))]
    assert all(stage.chunks(one) == expected for one in ids)
    assert stage.outflows[0].window == 65535 - sum(len(b"".join(sent)) for sent in stage.frames.values())


@pytest.mark.parametrize("streams", [3, FEW + 8])
def test_an_end_by_a_stop_string_leaves_the_others_their_window(streams: int) -> None:
    """What the end takes of the connection's window is taken behind the chunks of its step, never before."""
    stage = Stage()
    (outflow,) = stage.outflows
    ids = [stage.stream(searched=True) for _ in range(streams)]
    for token in (5, 6):
        stage.step(dict.fromkeys(ids, token))
    assert stage.table._watched.keys() == set(ids)
    outflow.window = outflow.step_bytes
    stage.step({one: STOP_ID if at == 1 else 7 for at, one in enumerate(ids)})
    assert outflow.window >= 0
    stage.flush()
    assert outflow.window == 0 or not outflow.waiting
    outflow.window = 10_000
    stage.flush()
    assert [len(stage.chunks(one)) for one in ids] == [3, 4, *[3] * (streams - 2)]
    ended = pb.GenerateResponse.FromString(stage.replies(ids[1])[-1]).complete
    assert (ended.finish_reason, ended.matched_stop_str) == ("stop", "Z")
    assert list(ended.output_ids) == [5, 6, STOP_ID]
    assert stage.flying == set(ids) - {ids[1]}


@pytest.mark.parametrize("streams", [3, FEW + 8])
def test_an_id_that_is_too_large_sends_only_its_own_stream_on_foot(streams: int) -> None:
    stage = Stage()
    ids = [stage.stream() for _ in range(streams)]
    stage.step(dict.fromkeys(ids, 5))
    flights = dict(stage.table._express)
    large = (2**18, 2**21 - 1, 2**21, 2**32 - 1)
    for token in large:
        stage.step({one: token if at == 1 else 6 for at, one in enumerate(ids)})
    assert {one for one in ids if stage.table._express[one] is not flights[one]} == {ids[1]}
    stage.flush()
    assert stage.chunks(ids[1]) == [([5], 1), *(([token], at) for at, token in enumerate(large, start=2))]
    assert stage.chunks(ids[0]) == [([5], 1), *(([6], at) for at in range(2, 6))]


def test_a_full_connection_does_not_send_another_ones_streams_on_foot() -> None:
    stage = Stage(connections=2)
    ids = [stage.stream(at % 2) for at in range(2 * FEW)]
    stage.step(dict.fromkeys(ids, 5))
    flights = dict(stage.table._express)
    stage.outflows[1].window = 10
    stage.step(dict.fromkeys(ids, 6))
    assert all(stage.table._express.get(one) is flights[one] for one in ids[::2])
    assert not any(one in stage.table._express for one in ids[1::2])
    stage.flush()
    assert stage.outflows[1].window == 0
    stage.step(dict.fromkeys(ids, 7))
    stage.outflows[1].window = 100_000
    stage.flush()
    for call in stage.calls.values():
        call.blocked = False
    for sequence in list(stage.table._live.values()):
        stage.table.resume(sequence.request)
    stage.flush()
    assert all(stage.chunks(one) == [([5], 1), ([6], 2), ([7], 3)] for one in ids)


def test_a_flight_that_lands_for_its_window_boards_again() -> None:
    stage = Stage()
    short, long = stage.stream(credit=200), stage.stream()
    stage.step({short: 5, long: 5})
    steps = 0
    while short in stage.flying:
        stage.step({short: 6, long: 6})
        steps += 1
        assert steps < 20
    assert stage.flying == {long} and steps >= 4
    assert 0 <= stage.calls[short].credit < 200
    stage.step({short: 7, long: 7})
    stage.step({short: 8, long: 8})
    assert stage.calls[short].blocked
    stage.calls[short].credit += 500
    stage.calls[short].blocked = False
    stage.table.resume(stage.table._live[short].request)
    stage.flush()
    stage.step({short: 9, long: 9})
    assert stage.flying == {short, long}
    stage.step({short: 10, long: 10})
    stage.flush()
    read = stage.chunks(short)
    assert [token for tokens, _ in read for token in tokens] == [5, *[6] * steps, 7, 8, 9, 10]
    assert [count for _, count in read] == sorted(count for _, count in read) and read[-1][1] == steps + 5


def test_steps_that_waited_together_land_a_flight_and_it_boards_again() -> None:
    stage = Stage()
    one = stage.stream()
    for token in (5, 6):
        stage.step({one: token})
    assert stage.flying == {one}
    bench = stage.bench
    bench.table.deliver([bench.step((one, [token], None)) for token in (7, 8, 9)])
    assert stage.flying == set()
    for token in (10, 11):
        stage.step({one: token})
    assert stage.flying == {one}
    stage.flush()
    assert stage.chunks(one) == [([5], 1), ([6], 2), ([7, 8, 9], 5), ([10], 6), ([11], 7)]
    assert stage.calls[one].outflow.credit(stage.calls[one]) == stage.outflows[0].window  # type: ignore[arg-type]


@pytest.mark.parametrize("streams", [4, FEW + 8])
def test_streams_that_count_and_those_that_do_not_share_a_step(streams: int) -> None:
    stage = Stage(connections=2)
    kinds = [(PlainSink, Bare)[at % 2] for at in range(streams)]
    ids = [stage.stream(at // 2 % 2, sink=kind) for at, kind in enumerate(kinds)]
    for token in (5, 6, 7):
        stage.step({one: token + at for at, one in enumerate(ids)})
    assert stage.flying == set(ids)
    stage.flush()
    for at, one in enumerate(ids[::2]):
        assert stage.chunks(one) == [([5 + 2 * at], 1), ([6 + 2 * at], 2), ([7 + 2 * at], 3)]
    bare = [len(stage.replies(one)) for one in ids[1::2]]
    assert bare == [3] * (streams // 2)
    assert all(
        one[-3:] == bytes((7 + at | 0x80, 0x80, 0))
        for at, wire_id in list(enumerate(ids))[1::2]
        for one in stage.replies(wire_id)[-1:]
    )


@pytest.mark.parametrize("how", ["end", "abort", "cancel", "fail", "all gone"])
def test_nothing_flies_behind_its_end(how: str) -> None:
    stage = Stage()
    ids = [stage.stream(searched=at == 2) for at in range(3)]
    for token in (5, 6):
        stage.step(dict.fromkeys(ids, token))
    assert stage.flying == set(ids)
    table = stage.table
    requests = [table._live[one].request for one in ids]
    if how == "end":
        stage.step(dict.fromkeys(ids, 7), LENGTH)
    elif how == "cancel":
        for request in requests:
            table.cancel(request)
    elif how == "abort":
        assert table.abort_all() == 3
    elif how == "fail":
        table.fail_running(Code.INTERNAL, "lost")
    else:
        table.fail_all(Code.UNAVAILABLE, "gone")
    assert stage.flying == set()
    assert not stage.outflows[0]._flights and stage.outflows[0].step_bytes == 0
    assert stage.outflows[0].window == 65535 - sum(65535 - call.credit for call in stage.calls.values())
    stage.step(dict.fromkeys(ids, 8))
    assert stage.flying == set()
