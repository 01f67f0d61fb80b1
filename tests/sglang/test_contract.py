"""`sglang.grpc.scheduler` on the lane, with a scheduler that says what each test needs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from google.protobuf import struct_pb2
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb

from tests.sglang.scripted import CONTEXT, FACTS, VOCABULARY, Stage, stage

Code = grpc.StatusCode


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Stage]:
    async with stage(tmp_path, supports_lora=True) as made:
        yield made


async def failure(call: Any) -> grpc.aio.AioRpcError:
    """The error that a call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    return caught.value


async def test_chunks_are_incremental_and_the_terminal_repeats_them(served: Stage) -> None:
    call = served.generate([5, 6, 7], request_id="mine", sampling={"max_new_tokens": 9})
    asked = await served.engine.request()
    rid = asked["rid"]
    assert asked["input_ids"] == [5, 6, 7] and asked["stream"] is True and rid != "mine"
    sent = [[300], [1], [VOCABULARY - 1], [127], [128, 16384, 2097151]]
    replies = []
    for number, ids in enumerate(sent):
        await served.engine.say({"rid": rid, "ids": ids, "cached_tokens": 2})
        replies.append(await call.read())
        chunk = replies[-1].chunk
        assert replies[-1].request_id == "mine" and list(chunk.token_ids) == ids
        assert (chunk.prompt_tokens, chunk.cached_tokens) == (3, 2)
        assert chunk.completion_tokens == len([one for some in sent[: number + 1] for one in some])
    await served.engine.say({"rid": rid, "ids": [2], "reason": "stop", "matched": 2, "cached_tokens": 2})
    last = await call.read()
    assert list(last.chunk.token_ids) == [2]
    complete = (await call.read()).complete
    assert list(complete.output_ids) == [*(one for some in sent for one in some), 2]
    assert (complete.finish_reason, complete.prompt_tokens, complete.completion_tokens) == ("stop", 3, 8)
    assert complete.cached_tokens == 2 and complete.WhichOneof("matched_stop") is None
    assert await call.read() is grpc.aio.EOF and await call.code() is Code.OK


@pytest.mark.parametrize("request_id", ["", "r", "é" * 60, "x" * 1000])
async def test_chunks_of_one_token_read_the_same_with_any_request_id(served: Stage, request_id: str) -> None:
    """Each chunk after the first goes through the byte templates."""
    call = served.generate(request_id=request_id)
    rid = (await served.engine.request())["rid"]
    for count, token in enumerate([0, 127, 128, 16383, 16384, VOCABULARY - 1], start=1):
        await served.engine.say({"rid": rid, "ids": [token]})
        reply = await call.read()
        assert reply == pb.GenerateResponse(
            request_id=request_id,
            chunk=pb.GenerateStreamChunk(token_ids=[token], prompt_tokens=3, completion_tokens=count),
        )
    call.cancel()
    assert await served.engine.aborted() == [rid]


async def test_a_request_that_does_not_stream_gets_one_reply(served: Stage) -> None:
    call = served.generate(stream=False)
    asked = await served.engine.request()
    assert asked["stream"] is False
    await served.engine.say({"rid": asked["rid"], "ids": list(range(50))})
    await served.engine.say({"rid": asked["rid"], "ids": [50], "reason": "length"})
    replies = [reply async for reply in call]
    assert len(replies) == 1 and list(replies[0].complete.output_ids) == list(range(51))
    assert replies[0].complete.finish_reason == "length"


async def test_zeros_mean_what_the_table_says(served: Stage) -> None:
    served.generate()
    asked = await served.engine.request()
    params = asked["sampling_params"]
    expected = {
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
        "n": 1,
        "max_new_tokens": CONTEXT - 3,
        "stop": None,
        "stop_token_ids": None,
        "stream_interval": None,
        "logit_bias": None,
        "custom_params": None,
        "skip_special_tokens": False,
    }
    assert {name: params[name] for name in expected} == expected
    assert (asked["return_logprob"], asked["logprob_start_len"], asked["top_logprobs_num"]) == (False, -1, 0)
    assert (asked["bootstrap_host"], asked["bootstrap_port"], asked["bootstrap_room"]) == (None, None, None)
    served.generate(return_logprob=True, sampling={"max_new_tokens": 0})
    asked = await served.engine.request()
    assert (asked["return_logprob"], asked["logprob_start_len"]) == (True, 0)
    assert asked["sampling_params"]["max_new_tokens"] == 0


async def test_every_value_reaches_the_scheduler(served: Stage) -> None:
    custom = struct_pb2.Struct()
    custom.update({"token_id": 5, "scale": 0.5, "tags": ["a", 1], "map": {"x": None}})
    served.generate(
        sampling={
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 40,
            "min_p": 0.05,
            "frequency_penalty": 0.25,
            "presence_penalty": -0.5,
            "repetition_penalty": 1.5,
            "max_new_tokens": 20,
            "min_new_tokens": 3,
            "stop": ["Ende"],
            "stop_token_ids": [13, 15],
            "skip_special_tokens": True,
            "spaces_between_special_tokens": True,
            "no_stop_trim": True,
            "ignore_eos": True,
            "stream_interval": 4,
            "logit_bias": {"5": -3.5, "7": 200.0, "9": 3e38},
            "custom_params": custom,
            "ebnf_grammar": 'root ::= "a"',
        },
        return_logprob=True,
        logprob_start_len=2,
        top_logprobs_num=3,
        token_ids_logprob=[8, 9],
        return_hidden_states=True,
        require_reasoning=True,
        lora_id="ad1",
    )
    asked = await served.engine.request()
    params = asked["sampling_params"]
    expected: dict[str, Any] = {
        "top_k": 40,
        "max_new_tokens": 20,
        "min_new_tokens": 3,
        "stop": ["Ende"],
        "stop_token_ids": [13, 15],
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "no_stop_trim": True,
        "ignore_eos": True,
        "stream_interval": 4,
        "logit_bias": {"5": -3.5, "7": 200.0, "9": 10000.0},
        "custom_params": {"token_id": 5, "scale": 0.5, "tags": ["a", 1], "map": {"x": None}},
        "ebnf": 'root ::= "a"',
        "frequency_penalty": 0.25,
        "presence_penalty": -0.5,
        "repetition_penalty": 1.5,
    }
    assert {name: params[name] for name in expected} == expected
    assert params["temperature"] == pytest.approx(0.7) and params["min_p"] == pytest.approx(0.05)
    assert isinstance(params["custom_params"]["token_id"], int)
    assert {name: asked[name] for name in ("return_logprob", "logprob_start_len", "top_logprobs_num")} == {
        "return_logprob": True,
        "logprob_start_len": 2,
        "top_logprobs_num": 3,
    }
    assert asked["token_ids_logprob"] == [8, 9] and asked["return_hidden_states"] is True
    assert asked["require_reasoning"] is True and asked["lora_id"] == "ad1"


@pytest.mark.parametrize(
    ("field", "sent", "text"),
    [
        ("regex", "regex", "[a-z]+"),
        ("json_schema", "json_schema", '{"type":"object"}'),
        ("json_schema", "json_schema", "$$ANY$$"),
        ("structural_tag", "structural_tag", '{"structures":[]}'),
        ("regex", None, ""),
    ],
)
async def test_constraints_are_sent_as_they_are(served: Stage, field: str, sent: str | None, text: str) -> None:
    served.generate(sampling={field: text})
    params = (await served.engine.request())["sampling_params"]
    given = {name: params[name] for name in ("regex", "json_schema", "ebnf", "structural_tag") if params[name]}
    assert given == ({sent: text} if sent else {})


@pytest.mark.parametrize(
    ("request_fields", "sampling", "code", "words"),
    [
        ({}, {"temperature": -1.0}, Code.INVALID_ARGUMENT, "temperature is -1.0"),
        ({}, {"temperature": float("nan")}, Code.INVALID_ARGUMENT, "temperature is nan"),
        ({}, {"top_p": 1.5}, Code.INVALID_ARGUMENT, "top_p is 1.5"),
        ({}, {"top_k": -2}, Code.INVALID_ARGUMENT, "top_k is -2"),
        ({}, {"repetition_penalty": 2.5}, Code.INVALID_ARGUMENT, "repetition_penalty is 2.5"),
        ({}, {"repetition_penalty": 1e-30}, Code.INVALID_ARGUMENT, "repetition_penalty is"),
        ({}, {"min_new_tokens": 6, "max_new_tokens": 5}, Code.INVALID_ARGUMENT, "min_new_tokens is 6"),
        ({}, {"stop_token_ids": [VOCABULARY]}, Code.INVALID_ARGUMENT, "stop_token_ids"),
        ({}, {"stop": [""]}, Code.INVALID_ARGUMENT, "stop is"),
        ({}, {"stop": ["a"] * 33}, Code.INVALID_ARGUMENT, "stop is"),
        ({}, {"n": 20000}, Code.INVALID_ARGUMENT, "n is 20000"),
        ({}, {"logit_bias": {"x": 1.0}}, Code.INVALID_ARGUMENT, "logit_bias is 'x'"),
        ({}, {"logit_bias": {str(VOCABULARY): 1.0}}, Code.INVALID_ARGUMENT, "logit_bias"),
        ({}, {"logit_bias": {"1": float("inf")}}, Code.INVALID_ARGUMENT, "logit_bias"),
        ({}, {"stream_interval": 0}, Code.INVALID_ARGUMENT, "stream_interval is 0"),
        ({}, {"json_schema": "{"}, Code.INVALID_ARGUMENT, "json_schema is '{'"),
        ({}, {"json_schema": "[" * 5000}, Code.INVALID_ARGUMENT, "json_schema is"),
        ({}, {"structural_tag": "no"}, Code.INVALID_ARGUMENT, "structural_tag is"),
        ({"tokenized": {"input_ids": []}}, {}, Code.INVALID_ARGUMENT, "input_ids is empty"),
        ({"tokenized": {"input_ids": [VOCABULARY]}}, {}, Code.INVALID_ARGUMENT, "input_ids[0]"),
        ({"tokenized": {"input_ids": [1] * CONTEXT}}, {}, Code.INVALID_ARGUMENT, f"input_ids has {CONTEXT} tokens"),
        ({"return_logprob": True, "logprob_start_len": 4}, {}, Code.INVALID_ARGUMENT, "logprob_start_len is 4"),
        ({"return_logprob": True, "logprob_start_len": -2}, {}, Code.INVALID_ARGUMENT, "logprob_start_len is -2"),
        ({"return_logprob": True, "top_logprobs_num": -1}, {}, Code.INVALID_ARGUMENT, "top_logprobs_num is -1"),
        ({"top_logprobs_num": 2}, {}, Code.INVALID_ARGUMENT, "top_logprobs_num is 2; it must be unset without"),
        ({"token_ids_logprob": [2]}, {}, Code.INVALID_ARGUMENT, "token_ids_logprob is"),
        (
            {"return_logprob": True, "token_ids_logprob": [VOCABULARY]},
            {},
            Code.INVALID_ARGUMENT,
            "token_ids_logprob is",
        ),
        ({"data_parallel_rank": 1}, {}, Code.INVALID_ARGUMENT, "data_parallel_rank is 1"),
        ({"request_id": "x" * 1025}, {}, Code.INVALID_ARGUMENT, "request_id"),
        ({"mm_inputs": {}}, {}, Code.UNIMPLEMENTED, "mm_inputs is 'set'"),
        ({"input_embeds": [0.5]}, {}, Code.UNIMPLEMENTED, "input_embeds"),
        ({"custom_logit_processor": "{}"}, {}, Code.FAILED_PRECONDITION, "--enable-custom-logit-processor"),
        ({"disaggregated_params": {"bootstrap_room": 1}}, {}, Code.FAILED_PRECONDITION, "--disaggregation-mode"),
    ],
)
async def test_what_the_scheduler_would_not_take_is_refused_by_name(
    served: Stage, request_fields: dict[str, Any], sampling: dict[str, Any], code: grpc.StatusCode, words: str
) -> None:
    given = dict(request_fields)
    ids = given.pop("tokenized", {"input_ids": [1, 2, 3]})["input_ids"]
    error = await failure(served.generate(ids, sampling=sampling, **given))
    assert error.code() is code and words in (error.details() or "")
    served.generate([9], request_id="next")
    assert (await served.engine.request())["input_ids"] == [9], "the refused one was not sent"


async def test_custom_params_deeper_than_sglang_reads_are_refused(served: Stage) -> None:
    custom = struct_pb2.Struct()
    custom.update({"a": {"b": {"c": 1}}})
    error = await failure(served.generate(sampling={"custom_params": custom}))
    assert error.code() is Code.INVALID_ARGUMENT and "custom_params['a']" in (error.details() or "")


async def test_what_an_engine_was_started_with_decides(tmp_path: Path) -> None:
    arguments = {"model_path": "m", "enable_custom_logit_processor": True, "disaggregation_mode": "decode"}
    facts = msgspec.structs.replace(FACTS, server_args=arguments)
    async with stage(tmp_path, facts=facts) as served:
        for field, words in (({"return_hidden_states": True}, "--enable-return"), ({"lora_id": "x"}, "--enable-lora")):
            error = await failure(served.generate(**field))
            assert error.code() is Code.FAILED_PRECONDITION and words in (error.details() or "")
        error = await failure(served.generate(custom_logit_processor='{"callable": "zz"}'))
        assert error.code() is Code.INVALID_ARGUMENT and "to_str" in (error.details() or "")
        pair = {"bootstrap_host": "10.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 0}
        call = served.generate(custom_logit_processor='{"callable": "00ff"}', disaggregated_params=pair)
        asked = await served.engine.request()
        assert asked["custom_logit_processor"] == '{"callable": "00ff"}'
        assert [asked[f"bootstrap_{name}"] for name in ("host", "port", "room")] == ["10.0.0.1", 8998, 0]
        call.cancel()
        await asyncio.sleep(0.1)
        await served.engine.say({"rid": asked["rid"], "ids": [1]})
        assert await served.engine.aborted() == [asked["rid"]], "held back until the transfer is over"


async def test_log_probabilities_of_every_kind(served: Stage) -> None:
    call = served.generate(
        [5, 6, 7], return_logprob=True, logprob_start_len=1, top_logprobs_num=2, token_ids_logprob=[8, 9]
    )
    rid = (await served.engine.request())["rid"]
    row = {
        "output_token_logprobs_val": [-0.5],
        "output_token_logprobs_idx": [11],
        "output_top_logprobs_val": [[-0.5, -2.0]],
        "output_top_logprobs_idx": [[11, 4]],
        "output_token_ids_logprobs_val": [[-3.0, -4.0]],
        "output_token_ids_logprobs_idx": [[8, 9]],
    }
    prompt = {
        "input_token_logprobs_val": [None, -2.5],
        "input_token_logprobs_idx": [6, 7],
        "input_top_logprobs_val": [[], [-2.5, -3.5]],
        "input_top_logprobs_idx": [[], [7, 6]],
    }
    await served.engine.say({"rid": rid, "ids": [11], **row, **prompt})
    first = (await call.read()).chunk
    output = pb.OutputLogProbs(
        token_logprobs=[-0.5],
        token_ids=[11],
        top_logprobs=[pb.TopLogProbs(values=[-0.5, -2.0], token_ids=[11, 4])],
        token_ids_logprobs=[pb.TopLogProbs(values=[-3.0, -4.0], token_ids=[8, 9])],
    )
    assert first.output_logprobs == output
    assert first.input_logprobs == pb.InputLogProbs(
        token_logprobs=[pb.InputTokenLogProb(), pb.InputTokenLogProb(value=-2.5)],
        token_ids=[6, 7],
        top_logprobs=[pb.TopLogProbs(), pb.TopLogProbs(values=[-2.5, -3.5], token_ids=[7, 6])],
    )
    await served.engine.say({"rid": rid, "ids": [11], "reason": "length", **row})
    second, last = (await call.read()).chunk, (await call.read()).complete
    assert second.output_logprobs == output and not second.HasField("input_logprobs")
    twice = pb.OutputLogProbs()
    twice.MergeFrom(output)
    twice.MergeFrom(output)
    assert last.output_logprobs == twice and last.input_logprobs == first.input_logprobs


async def test_a_prompt_that_is_only_scored_has_one_row(served: Stage) -> None:
    call = served.generate(
        return_logprob=True, logprob_start_len=-1, token_ids_logprob=[8], sampling={"max_new_tokens": 0}
    )
    rid = (await served.engine.request())["rid"]
    await served.engine.say(
        {
            "rid": rid,
            "reason": "length",
            "output_token_logprobs_val": [-0.5],
            "output_token_logprobs_idx": [11],
            "output_token_ids_logprobs_val": [[-3.0]],
            "output_token_ids_logprobs_idx": [[8]],
        }
    )
    (reply,) = [reply async for reply in call]
    assert list(reply.complete.output_ids) == []
    assert reply.complete.output_logprobs == pb.OutputLogProbs(
        token_ids_logprobs=[pb.TopLogProbs(values=[-3.0], token_ids=[8])]
    )


async def test_a_long_prompt_arrives_in_every_sample_and_is_scored(
    served: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bridge.guard.LONG", 4)
    monkeypatch.setattr("bridge.prompt.PIECE", 2)
    ids = [5, 127, VOCABULARY - 1, 6, 7]
    call = served.generate(ids, return_logprob=True, logprob_start_len=2, sampling={"n": 2})
    asked = [await served.engine.request() for _ in range(2)]
    assert [(one["input_ids"], one["logprob_start_len"]) for one in asked] == [(ids, 2)] * 2
    request = next(iter(served.front_end.engine.table._requests))
    assert (request.prompt_tokens, request.prompt_ids) == (5, ids[2:])
    call.cancel()
    assert sorted(await served.engine.aborted()) == sorted(one["rid"] for one in asked)
    wrong = await failure(served.generate([1, 2, 3, VOCABULARY, 5]))
    assert wrong.code() is Code.INVALID_ARGUMENT and f"input_ids[3] is {VOCABULARY}" in str(wrong.details())


async def test_hidden_states_and_reasoning_tokens(served: Stage) -> None:
    call = served.generate(return_hidden_states=True, require_reasoning=True)
    rid = (await served.engine.request())["rid"]
    await served.engine.say(
        {"rid": rid, "ids": [4], "reasoning_tokens": 1, "hidden": [[0.5, 1.5], [2.5, 3.5], [4.5, 5.5]]}
    )
    first = (await call.read()).chunk
    assert list(first.hidden_states) == [0.5, 1.5, 2.5, 3.5, 4.5, 5.5] and first.reasoning_tokens == 1
    await served.engine.say({"rid": rid, "ids": [5], "reasoning_tokens": 2, "hidden": [[6.5, 7.5]], "reason": "length"})
    second, last = (await call.read()).chunk, (await call.read()).complete
    assert list(second.hidden_states) == [6.5, 7.5] and last.reasoning_tokens == 2
    rows = [(list(row.values), row.layer, row.position) for row in last.all_hidden_states]
    assert rows == [([0.5, 1.5], -1, 0), ([2.5, 3.5], -1, 1), ([4.5, 5.5], -1, 2), ([6.5, 7.5], -1, 3)]


async def test_samples_are_requests_of_their_own(served: Stage) -> None:
    call = served.generate(sampling={"n": 3}, request_id="three")
    rids = [(await served.engine.request())["rid"] for _ in range(3)]
    assert len(set(rids)) == 3
    await served.engine.say(*({"rid": rid, "ids": [7 + index]} for index, rid in enumerate(rids)))
    await served.engine.say(*({"rid": rid, "ids": [2], "reason": "stop", "matched": 2} for rid in rids))
    replies = [reply async for reply in call]
    ends = {reply.complete.index: list(reply.complete.output_ids) for reply in replies if reply.HasField("complete")}
    assert ends == {0: [7, 2], 1: [8, 2], 2: [9, 2]}


@pytest.mark.parametrize(
    ("matched", "field", "value"),
    [(13, "matched_token_id", 13), ("Ende", "matched_stop_str", "Ende"), (2, None, None)],
)
async def test_only_the_requests_own_stops_are_named(
    served: Stage, matched: int | str, field: str | None, value: object
) -> None:
    call = served.generate(sampling={"stop": ["Ende"], "stop_token_ids": [13]})
    rid = (await served.engine.request())["rid"]
    await served.engine.say({"rid": rid, "ids": [13], "reason": "stop", "matched": matched})
    last = [reply async for reply in call][-1].complete
    assert last.finish_reason == "stop" and last.WhichOneof("matched_stop") == field
    assert field is None or getattr(last, field) == value


@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        ({"reason": "abort", "message": "too long", "status": 400}, Code.INVALID_ARGUMENT, "too long"),
        ({"reason": "abort", "message": "queue full", "status": 503}, Code.UNAVAILABLE, "queue full"),
        ({"reason": "abort", "message": "broken", "status": 500}, Code.INTERNAL, "broken"),
        (
            {"reason": "abort", "message": "not in it", "err_type": "GrammarRejectedToken"},
            Code.INTERNAL,
            "GrammarRejectedToken: not in it",
        ),
        ({"reason": "stop", "matched": "NaN happened"}, Code.INTERNAL, "not a number"),
        ({"reason": "melted"}, Code.INTERNAL, "'melted'"),
    ],
)
@pytest.mark.parametrize("asked", [{}, {"return_logprob": True}])
async def test_errors_of_the_scheduler_are_statuses(
    served: Stage, asked: dict[str, Any], end: dict[str, Any], code: grpc.StatusCode, words: str
) -> None:
    call = served.generate(**asked)
    rid = (await served.engine.request())["rid"]
    tokens = [7] if end.get("status") == 400 else []
    await served.engine.say({"rid": rid, "ids": tokens, **end})
    error = await failure(call)
    assert error.code() is code and words in (error.details() or "")
    assert len(served.front_end.engine.table) == 0


async def test_a_bare_abort_of_the_scheduler_is_an_end(served: Stage) -> None:
    call = served.generate()
    rid = (await served.engine.request())["rid"]
    await served.engine.say({"rid": rid, "ids": [5]})
    await served.engine.say({"rid": rid, "reason": "abort", "message": "Aborted"})
    replies = [reply async for reply in call]
    assert replies[-1].complete.finish_reason == "abort" and list(replies[-1].complete.output_ids) == [5]


async def test_an_abort_ends_the_stream_and_says_whether_there_was_one(served: Stage) -> None:
    call = served.generate(request_id="mine")
    rid = (await served.engine.request())["rid"]
    await served.engine.say({"rid": rid, "ids": [5]})
    await call.read()
    done = await served.stub.Abort(pb.AbortRequest(request_id="mine", reason="tired"))
    assert done.success and await served.engine.aborted() == [rid]
    assert (await call.read()).complete.finish_reason == "abort"
    again = await served.stub.Abort(pb.AbortRequest(request_id="mine"))
    assert not again.success and "'mine'" in again.message


async def test_a_live_request_id_is_not_taken_twice(served: Stage) -> None:
    served.generate(request_id="mine")
    await served.engine.request()
    assert (await failure(served.generate(request_id="mine"))).code() is Code.ALREADY_EXISTS


async def test_a_step_that_cannot_be_read_fails_what_it_may_have_held(served: Stage) -> None:
    call = served.generate()
    await served.engine.request()
    await served.engine.raw(msgspec.msgpack.encode(["BatchTokenIDSlimOutput", ["x"], 5]))
    assert (await failure(call)).code() is Code.INTERNAL
    again = served.generate()
    kinds = [await served.engine.frames(), await served.engine.frames()]
    assert sorted(kind[0] for kind in kinds) == [b"\x00", b"\x01"]
    again.cancel()


async def test_the_engines_last_word_ends_everything(served: Stage) -> None:
    call = served.generate()
    await served.engine.request()
    await served.engine.raw(b"ENGINE_CORE_DEAD")
    assert (await failure(call)).code() is Code.UNAVAILABLE
    assert served.deaths and not (await served.stub.HealthCheck(pb.HealthCheckRequest())).healthy


async def test_embeddings(tmp_path: Path) -> None:
    facts = msgspec.structs.replace(FACTS, is_generation=False)
    async with stage(tmp_path, facts=facts) as served:
        tokenized = pb.TokenizedInput(input_ids=[1, 2])
        asking = served.stub.Embed(pb.EmbedRequest(tokenized=tokenized, token_type_ids=[0, 1]))
        task = asyncio.ensure_future(asking)
        asked = await served.engine.request()
        assert asked["input_ids"] == [1, 2] and asked["token_type_ids"] == [0, 1]
        assert asked["sampling_params"]["max_new_tokens"] == 0
        batch = ["BatchEmbeddingSlimOutput", [asked["rid"]], [[0.25, -0.5]], [2], [0], ["stop"], [None], [None], 0]
        await served.engine.raw(msgspec.msgpack.encode(batch))
        reply = await task
        assert (list(reply.embedding), reply.embedding_dim, reply.prompt_tokens) == ([0.25, -0.5], 2, 2)
        refused = asyncio.ensure_future(served.stub.Embed(pb.EmbedRequest(tokenized=tokenized)))
        rid = (await served.engine.request())["rid"]
        batch = ["BatchEmbeddingSlimOutput", [rid], [[]], [0], [0], ["abort"], ["no room"], [400], 0]
        await served.engine.raw(msgspec.msgpack.encode(batch))
        error = await failure(refused)
        assert error.code() is Code.INVALID_ARGUMENT and error.details() == "no room"
        for request, code in (
            (pb.EmbedRequest(), Code.INVALID_ARGUMENT),
            (pb.EmbedRequest(tokenized=tokenized, texts=["a"]), Code.UNIMPLEMENTED),
            (pb.EmbedRequest(tokenized=tokenized, mm_inputs={}), Code.UNIMPLEMENTED),
            (pb.EmbedRequest(tokenized=tokenized, token_type_ids=[0]), Code.INVALID_ARGUMENT),
            (pb.EmbedRequest(tokenized=tokenized, data_parallel_rank=3), Code.INVALID_ARGUMENT),
        ):
            assert (await failure(served.stub.Embed(request))).code() is code
        assert (await failure(served.generate())).code() is Code.FAILED_PRECONDITION


async def test_ranks_share_the_work_and_can_be_named(tmp_path: Path) -> None:
    async with stage(tmp_path, ranks=2) as served:
        served.generate([1], data_parallel_rank=1)
        assert (await served.engines[1].request())["input_ids"] == [1]
        served.generate([2])
        assert (await served.engines[0].request())["input_ids"] == [2]
        flushing = asyncio.ensure_future(served.stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=2.5)))
        for engine, (success, text) in zip(served.engines, ((True, None), (False, "busy")), strict=True):
            call_id, method, args = await engine.call()
            assert (method, args) == ("flush_cache", [2.5])
            await engine.reply(call_id, success, text)
        done = await flushing
        assert not done.success and done.message == "busy"
        await served.engines[0].say(running=3, waiting=1, kv_used=250, kv_total=1000)
        await served.engines[1].say(running=1, waiting=0, kv_used=500, kv_total=1000)
        await asyncio.sleep(0.1)
        loads = await served.stub.GetLoads(pb.GetLoadsRequest(include=["core", "queues"]))
        assert [(load.num_running_reqs, load.num_waiting_reqs, load.num_used_tokens) for load in loads.loads] == [
            (3, 1, 250),
            (1, 0, 500),
        ]
        assert loads.dp_rank_count == 2 and loads.version == "0.5.23"
        assert [load.queues.waiting for load in loads.loads] == [1, 0]
        assert not loads.loads[0].HasField("memory")
        total = loads.aggregate
        assert (total.total_running_reqs, total.total_waiting_reqs, total.total_reqs) == (4, 1, 5)
        assert total.avg_token_usage == 0.375
        one = await served.stub.GetLoads(pb.GetLoadsRequest(dp_rank=1))
        assert [load.dp_rank for load in one.loads] == [1] and one.loads[0].memory.token_capacity == 1000
        assert one.loads[0].disaggregation.mode == "null" and not one.loads[0].HasField("lora")
        for request in (pb.GetLoadsRequest(dp_rank=2), pb.GetLoadsRequest(include=["everything"])):
            assert (await failure(served.stub.GetLoads(request))).code() is Code.INVALID_ARGUMENT


async def test_profiling(served: Stage) -> None:
    request = common_pb2.StartProfileRequest(output_dir="out", num_steps=3, activities=["CPU"], with_stack=False)
    starting = asyncio.ensure_future(served.stub.StartProfile(request))
    call_id, method, args = await served.engine.call()
    assert method == "start_profile"
    assert args == [
        {"profile_by_stage": False, "output_dir": "out", "num_steps": 3, "with_stack": False, "activities": ["CPU"]}
    ]
    await served.engine.reply(call_id, True)
    assert (await starting).message == "profiler started"
    stopping = asyncio.ensure_future(served.stub.StopProfile(common_pb2.StopProfileRequest()))
    call_id, method, args = await served.engine.call()
    assert (method, args) == ("stop_profile", [])
    await served.engine.reply(call_id, False, "not running")
    done = await stopping
    assert not done.success and done.message == "not running"


async def test_what_is_reported(served: Stage) -> None:
    model = await served.stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (model.model_path, model.served_model_name, model.vocab_size) == ("models/tiny", "tiny", VOCABULARY)
    assert (model.max_context_length, model.max_req_input_len) == (CONTEXT, 994)
    assert list(model.eos_token_ids) == [2] and model.weight_version == "default"
    assert model.default_sampling_params_json == '{"temperature": 0.6, "top_p": 0.95}'
    server = await served.stub.GetServerInfo(pb.GetServerInfoRequest())
    assert (server.sglang_version, server.server_type, server.max_total_num_tokens) == ("0.5.23", "grpc", 1000)
    assert server.server_args["model_path"] == "models/tiny" and server.server_args["max_running_requests"] == 8
    assert server.scheduler_info["max_req_input_len"] == 994 and server.start_time.seconds > 0
    assert (await served.stub.HealthCheck(pb.HealthCheckRequest())).healthy


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("LoadLoRAAdapter", pb.LoadLoRAAdapterRequest(lora_name="a")),
        ("UnloadLoRAAdapter", pb.UnloadLoRAAdapterRequest(lora_name="a")),
        ("ListLoadedLoRAAdapters", pb.ListLoadedLoRAAdaptersRequest()),
        ("SubscribeKvEvents", common_pb2.SubscribeKvEventsRequest()),
    ],
)
async def test_what_does_not_exist_yet_says_so(served: Stage, method: str, request_: Any) -> None:
    error = await failure(getattr(served.stub, method)(request_))
    assert error.code() is Code.UNIMPLEMENTED and method in (error.details() or "")
