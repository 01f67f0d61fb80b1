"""Messages that SMG's plugin made of SGLang's own outputs, read by our codec and by an independent decoder."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from bridge.wire.codec import Finish, Load, Reply
from bridge.wire.errors import WireError
from bridge.wire.sglang.outputs import Batch, BatchTokenIDSlimOutput, scores
from tests.wire.sglang.recorded import STEP_IDS, STEPS, VERSIONS, codec_of, frames_of, oracle, step_named


def test_there_are_vectors_for_the_supported_versions() -> None:
    assert VERSIONS == ["0.5.18", "0.5.20", "0.5.21", "0.5.23"]


@pytest.mark.parametrize(("version", "entry"), STEPS, ids=STEP_IDS)
def test_a_step_says_what_the_lane_said(version: str, entry: dict[str, Any]) -> None:
    codec, says = codec_of(version), entry["says"]
    step = codec.step(frames_of(entry))
    assert step.engine_index == 3 and type(step.message).__name__ == entry["kind"]
    if entry["kind"] == "ControlReplySlim":
        assert step.outputs == () and codec.load(step) is None
        return
    assert codec.load(step) == Load(rank=3, running=5, waiting=6, kv_cache_usage=0.625)
    assert [delta.request_id for delta in step.outputs] == says["rids"]
    assert [delta.finish_reason or "" for delta in step.outputs] == says["finished_reasons"]
    assert [codec.cached_tokens(delta) for delta in step.outputs] == says["cached_tokens"]
    tokens = says.get("output_ids") or [[] for _ in says["rids"]]
    refused = [status is not None for status in says["finished_status"]]
    assert [delta.new_token_ids for delta in step.outputs] == [
        [] if was_refused else ids for ids, was_refused in zip(tokens, refused, strict=True)
    ]


@pytest.mark.parametrize(("version", "entry"), STEPS, ids=STEP_IDS)
def test_a_step_reads_as_an_independent_decoder_reads_it(version: str, entry: dict[str, Any]) -> None:
    tag, *columns = oracle(frames_of(entry)[0])
    message = codec_of(version).step(frames_of(entry)).message
    assert tag == type(message).__name__
    batch = Batch(message)
    for name, column in zip(message.__struct_fields__, columns, strict=True):
        found = getattr(message, name)
        raw = isinstance(found, msgspec.Raw)
        assert (msgspec.msgpack.decode(found) if raw else found) == column, name
        if raw and name not in ("prompt_tokens", "completion_tokens"):
            assert batch.column(name) == column, name


@pytest.mark.parametrize("version", VERSIONS)
def test_every_end_is_told_in_neutral_words(version: str) -> None:
    codec = codec_of(version)
    found = [codec.finish(delta) for delta in step_named("every end", version).outputs]
    assert found == [
        (Finish.STOP, 2, None),
        (Finish.STOP, "Ende", None),
        (Finish.STOP, None, None),
        (Finish.LENGTH, None, None),
        (Finish.ABORT, None, None),
        (Finish.REFUSED, None, "too long"),
        (Finish.OVERLOADED, None, "queue full"),
        (Finish.ERROR, None, "broken"),
        (Finish.ERROR, None, "GrammarRejectedToken: no such token"),
        (Finish.ERROR, None, "the model's output was not a number"),
    ]


@pytest.mark.parametrize("version", VERSIONS)
def test_log_probabilities_are_rows_of_the_token_and_its_likeliest(version: str) -> None:
    codec, step = codec_of(version), step_named("log-probabilities", version)
    first, second = step.outputs
    rows = codec.logprobs(step, first)
    assert rows is not None
    assert rows.rows() == [([11, 11, 4], [-0.5, -0.5, -2.0]), ([12, 5, 12], [-1.25, -1.0, -1.25])]
    prompt = codec.prompt_logprobs(step, first)
    assert prompt is not None
    assert prompt.rows() == [([15043, 15043, 6], [-2.5, -2.5, -3.5])]
    assert scores(first).scored == [([-3.0, -4.0], [7, 8]), ([-5.0, -6.0], [7, 8])]
    assert codec.logprobs(step, second) is None and codec.prompt_logprobs(step, second) is None
    assert scores(second).scored == []


@pytest.mark.parametrize("version", VERSIONS)
def test_a_prompt_that_is_only_scored_has_a_row_and_no_token(version: str) -> None:
    codec, step = codec_of(version), step_named("scores of a prompt", version)
    (delta,) = step.outputs
    assert delta.new_token_ids == [] and codec.logprobs(step, delta) is None
    assert scores(delta).scored == [([-3.0], [7])]


@pytest.mark.parametrize("version", VERSIONS)
def test_reasoning_tokens_and_hidden_states(version: str) -> None:
    first, second = step_named("reasoning and hidden states", version).outputs
    assert scores(first).reasoning_tokens == 2
    assert scores(first).hidden_states == [[0.5, 1.5], [2.5, 3.5], [4.5, 5.5]]
    assert (scores(second).reasoning_tokens, scores(second).hidden_states) == (0, [])


@pytest.mark.parametrize("version", VERSIONS)
def test_embeddings_are_terminals_with_a_vector(version: str) -> None:
    codec, step = codec_of(version), step_named("embeddings", version)
    vectors = [codec.pooled(step, delta) for delta in step.outputs]
    assert [vector.values() for vector in vectors if vector is not None] == [[0.25, -0.5, 1.0], [0.0, 2.0]]
    assert [codec.finish(delta)[0] for delta in step.outputs] == [Finish.STOP] * 2
    refused = step_named("embeddings that were refused", version)
    assert [codec.pooled(refused, delta) for delta in refused.outputs] == [None, None]
    assert codec.finish(refused.outputs[0]) == (Finish.REFUSED, None, "too long")


@pytest.mark.parametrize("version", VERSIONS)
def test_replies_to_control_calls(version: str) -> None:
    codec = codec_of(version)
    assert codec.reply(step_named("reply 7", version)) == Reply(7, None, None)
    assert codec.reply(step_named(f"reply {2**40}", version)) == Reply(2**40, "busy", "busy")
    assert codec.reply(step_named("nothing", version)) is None


LATER = ("finished_status", "output_top_logprobs_val", "output_top_logprobs_idx")
"""The first columns that may be left out."""


def _message(**changed: Any) -> list[bytes]:
    values: dict[str, Any] = {
        "rids": ["a", "b"],
        "output_ids": [[1], [2]],
        "finished_reasons": ["", ""],
        "finished_messages": [None, None],
        "finished_matched": [None, None],
        "prompt_tokens": [1, 1],
        "completion_tokens": [1, 1],
        "cached_tokens": [0, 0],
        "output_token_logprobs_val": [[], []],
        "output_token_logprobs_idx": [[], []],
    }
    fixed = {**values, **dict.fromkeys(("engine_index", "num_running", "num_waiting", "kv_used", "kv_total"), 0)}
    later = {name: changed.get(name) for name in LATER}
    given = {name: changed.get(name, value) for name, value in fixed.items()} | later
    return [msgspec.msgpack.encode(["BatchTokenIDSlimOutput", *given.values()])]


def test_columns_that_a_newer_lane_appends_are_ignored_and_those_an_older_one_lacks_are_empty() -> None:
    codec = codec_of("0.5.23")
    array = oracle(_message()[0])
    rest = [None] * (1 + len(BatchTokenIDSlimOutput.__struct_fields__) - len(array))
    longer = codec.step([msgspec.msgpack.encode([*array, *rest, [["new"], None], 5])])
    shorter = codec.step([msgspec.msgpack.encode(array[:11])])
    for step in (longer, shorter):
        assert [delta.new_token_ids for delta in step.outputs] == [[1], [2]]
        assert scores(step.outputs[0]).reasoning_tokens == 0


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"ENGINE_CORE_DEAD"],
        [msgspec.msgpack.encode(["BatchOfSomethingElse", []])],
        [msgspec.msgpack.encode({"rids": []})],
        _message(output_ids=[[1]]),
        _message(finished_reasons=["", "", ""]),
        _message(finished_reasons=["stop"]),
        _message(finished_reasons=[1, 2]),
        _message(finished_reasons=["abort", "abort"], finished_status=[400]),
        [_message()[0][:-3]],
    ],
)
def test_what_is_no_step_is_a_wire_error(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        codec_of("0.5.23").step(frames)


def test_columns_that_do_not_fit_each_other_are_wire_errors() -> None:
    codec = codec_of("0.5.23")
    step = codec.step(_message(output_token_logprobs_val=[[-1.0, -2.0], []], output_token_logprobs_idx=[[1, 2], []]))
    with pytest.raises(WireError, match="1 tokens came with 2"):
        codec.logprobs(step, step.outputs[0])
    step = codec.step(_message(output_token_logprobs_val=[[-1.0]], output_token_logprobs_idx=[[1], []]))
    with pytest.raises(WireError, match="ends before request 1"):
        codec.logprobs(step, step.outputs[1])
    ragged = {"output_top_logprobs_val": [[[-1.0]], []], "output_top_logprobs_idx": [[[1, 2]], []]}
    values = {"output_token_logprobs_val": [[-1.0], []], "output_token_logprobs_idx": [[1], []]}
    step = codec.step(_message(**values, **ragged))
    with pytest.raises(WireError, match="not the same number"):
        codec.logprobs(step, step.outputs[0])


def test_the_engines_last_word_is_known() -> None:
    codec = codec_of("0.5.23")
    assert codec.is_death([b"ENGINE_CORE_DEAD"])
    assert not codec.is_death(_message())
