"""Bytes that are not quite, or not at all, what a vLLM engine sends."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.wire.errors import WireError
from bridge.wire.vllm.codec import VllmCodec, from_ready
from bridge.wire.vllm.control import DEATH, read_ready
from tests.wire.vllm.recorded import STEPS, VECTORS, VERSIONS, frames_of

CODECS = {version: from_ready({"vllm_version": version}, {}, 0) for version in VERSIONS}
NEWEST = CODECS[VERSIONS[-1]]

encode = msgspec.msgpack.encode


def surprises(codec: VllmCodec, frames: list[bytes]) -> list[Exception]:
    """What everything that a front end may ask of a message raises, wire errors aside."""
    raised: list[Exception] = []

    def ask(question: Any, *arguments: Any) -> Any:
        try:
            return question(*arguments)
        except WireError:
            return None
        except Exception as error:
            raised.append(error)
            return None

    step = None if ask(codec.is_death, frames) else ask(codec.step, frames)
    if step is not None:
        for read in (codec.load, codec.reply):
            ask(read, step)
        for delta in step.outputs:
            for read in (codec.cached_tokens, codec.finish):
                ask(read, delta)
            for read in (codec.logprobs, codec.prompt_logprobs, codec.pooled):
                ask(read, step, delta)
    return raised


@pytest.mark.parametrize("version", VERSIONS)
def test_elements_that_a_later_release_appends_are_ignored(version: str) -> None:
    for entry in VECTORS[version]["steps"]:
        frames = frames_of(entry)
        message = msgspec.msgpack.decode(frames[0], ext_hook=msgspec.msgpack.Ext)
        message[1] = [[*output, "new", {"more": [1]}] for output in message[1]]
        longer = [encode([*message, None, [1, 2], {"a": b"b"}]), *frames[1:]]
        before, after = CODECS[version].step(frames), CODECS[version].step(longer)
        assert [o.request_id for o in after.outputs] == [o.request_id for o in before.outputs]
        assert [o.finish_reason for o in after.outputs] == [o.finish_reason for o in before.outputs]


def test_a_tail_that_is_left_out_reads_as_defaults() -> None:
    step = NEWEST.step([encode([3, [["a", [1]], ["b", [2], None, None, None, 1]]])])
    assert step.engine_index == 3
    assert [(o.request_id, o.new_token_ids, o.finish_reason) for o in step.outputs] == [("a", [1], None), ("b", [2], 1)]
    assert NEWEST.load(step) is None
    assert NEWEST.reply(step) is None
    assert len(NEWEST.step([encode([])]).outputs) == 0


def test_an_older_engine_read_with_a_newer_layout_and_the_other_way_round() -> None:
    """From 0.27 to 0.33 releases only appended, so a wrong guess at the version loses nothing that both have."""
    for version, entry in STEPS:
        frames = frames_of(entry)
        expected = CODECS[version].step(frames).outputs
        for other in VERSIONS:
            assert [o.new_token_ids for o in CODECS[other].step(frames).outputs] == [o.new_token_ids for o in expected]


def test_unknown_keys_in_statistics_are_ignored() -> None:
    step = NEWEST.step([encode([1, [], {"num_running_reqs": 2, "brand_new": {"x": [1]}}])])
    load = NEWEST.load(step)
    assert load is not None
    assert (load.rank, load.running, load.waiting, load.kv_cache_usage) == (1, 2, 0, 0.0)


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"\xc1"],
        [b"\xff" * 40],
        [DEATH],
        [encode({"engine_index": 0})],
        [encode([0, [["a"]]])],
        [encode([0, [[7, [1]]]])],
        [encode([0, [["a", [1.5]]]])],
        [encode([0, [["a", ["1"]]]])],
        [encode([0, [["a", [1], None, None, None, "stop"]]])],
        [encode([0, 7])],
        [b"\x92\x00" + b"\x91" * 100_000],
    ],
    ids=range(13),
)
def test_a_message_that_is_no_step_is_a_wire_error(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        NEWEST.step(frames)


@pytest.mark.parametrize("code", [1, 2, 4, 127])
def test_a_pickle_is_never_read(code: int) -> None:
    """Ext types 1 and 2 are vLLM's pickles."""
    pickled = msgspec.msgpack.Ext(code, b"\x80\x04K\x01.")
    with pytest.raises(WireError, match=f"ext type {code}"):
        NEWEST.step([encode([0, [["a", [1], None, None, pickled]]])])
    step = NEWEST.step([encode([0, [], None, 0.0, [5, None, [None, pickled]]])])
    with pytest.raises(WireError, match=f"ext type {code}"):
        NEWEST.reply(step)


@pytest.mark.parametrize(
    ("stats", "reply"),
    [({"num_running_reqs": "2"}, [1, None, 5]), ([1], ["x"]), (7, [1, None, [None]]), ("x", {"call_id": 1})],
)
def test_bad_statistics_and_replies_do_not_spoil_the_tokens_beside_them(stats: Any, reply: Any) -> None:
    step = NEWEST.step([encode([0, [["a", [1]]], stats, 0.0, reply])])
    assert step.outputs[0].new_token_ids == [1]
    with pytest.raises(WireError):
        NEWEST.load(step)
    with pytest.raises(WireError):
        NEWEST.reply(step)


@pytest.mark.parametrize(
    "logprobs",
    [
        7,
        [],
        [["<i4", [1, 1], 1]],
        [["<i4", [1, 2], 1], ["<f4", [1, 1], 1], ["<i4", [1], 1]],
        [["<i4", [1, 1], 1], ["<f4", [1, 1], 1], ["<i4", [1, 1], 1]],
        [["<i4", [1], 1], ["<f4", [1], 1], ["<i4", [1], 1]],
        [["<i4", [2, 1], 2], ["<f4", [2, 1], 2], ["<i4", [2], 2]],
    ],
)
def test_logprobs_that_do_not_fit_each_other_or_the_tokens_are_refused(logprobs: Any) -> None:
    step = NEWEST.step([encode([0, [["a", [1], logprobs]]]), b"\0" * 4, b"\0" * 8])
    with pytest.raises(WireError):
        NEWEST.logprobs(step, step.outputs[0])


def test_an_unknown_finish_code_ends_the_request_as_an_error() -> None:
    step = NEWEST.step([encode([0, [["a", [], None, None, None, 17]]])])
    assert NEWEST.finish(step.outputs[0])[2] == "the engine ended the request with the unknown finish code 17"


def test_only_the_death_frame_alone_is_death() -> None:
    assert NEWEST.is_death([DEATH])
    assert NEWEST.is_death([memoryview(DEATH)])
    for frames in ([], [b""], [DEATH, DEATH], [DEATH[:-1]], [DEATH + b"!"], [encode([])]):
        assert not NEWEST.is_death(frames)


def test_a_ready_map_of_any_version_is_read() -> None:
    ready = read_ready({"vllm_version": "0.27.0", "max_model_len": 4096, "brand_new": [1], "kv_events_config": None})
    assert (ready.vllm_version, ready.max_model_len, ready.supports_lora) == ("0.27.0", 4096, False)
    with pytest.raises(WireError, match=r"max_model_len"):
        read_ready({"max_model_len": "4096"})


@settings(max_examples=150, deadline=None)
@given(index=st.integers(0, len(STEPS) - 1), seed=st.integers(0, 2**32))
def test_broken_messages_raise_nothing_but_wire_errors(index: int, seed: int) -> None:
    version, entry = STEPS[index]
    chance = random.Random(seed)
    frames = [bytearray(frame) for frame in frames_of(entry)]
    for _ in range(chance.randint(1, 6)):
        frame = chance.choice(frames)
        at = chance.randrange(len(frame) + 1)
        kind = chance.randrange(4)
        if kind == 0:
            frame[at : at + 1] = bytes([chance.randrange(256)])
        elif kind == 1:
            del frame[at : at + chance.randint(1, 8)]
        elif kind == 2:
            frame[at:at] = chance.randbytes(chance.randint(1, 4))
        elif len(frames) > 1:
            frames.remove(chance.choice(frames[1:]))
    assert surprises(CODECS[version], [bytes(frame) for frame in frames]) == []


@settings(max_examples=150, deadline=None)
@given(st.lists(st.binary(max_size=64), max_size=3))
def test_noise_raises_nothing_but_wire_errors(frames: list[bytes]) -> None:
    assert surprises(NEWEST, frames) == []
