"""Generation by SGLang's real scheduler with SmolLM2, asked over `sglang.grpc.scheduler`."""

from __future__ import annotations

import io
import json
import math
import re
import subprocess
import time
import zipfile
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import struct_pb2
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb
from tokenizers import Tokenizer

from tests.gateways import chat_text
from tests.sglang.worker import SglangWorker

EOS = 2
HIDDEN_SIZE = 576
FRANCE = chat_text("What is the capital of France?")
STORY = "Once upon a time, in a village by the sea,"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
LONG = {"max_new_tokens": 800, "ignore_eos": True}


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2 / "tokenizer.json"))


def ask(served: SglangWorker, ids: list[int], sampling: dict[str, Any], **given: Any) -> list[pb.GenerateResponse]:
    request = pb.GenerateRequest(
        tokenized=pb.TokenizedInput(input_ids=ids),
        sampling_params=pb.SamplingParams(**sampling),
        **{"stream": True, **given},
    )
    return list(served.stub.Generate(request, timeout=120))


def answer(served: SglangWorker, ids: list[int], sampling: dict[str, Any], **given: Any) -> pb.GenerateComplete:
    """The terminal of one sample, whose chunks add up to it."""
    *chunks, last = ask(served, ids, sampling, **given)
    assert [token for reply in chunks for token in reply.chunk.token_ids] == list(last.complete.output_ids)
    return last.complete


def refused(
    served: SglangWorker, ids: list[int], sampling: dict[str, Any], **given: Any
) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        ask(served, ids, sampling, **given)
    return caught.value.code(), caught.value.details()


def test_greedy_tokens_are_those_of_transformers(
    served: SglangWorker, tokenizer: Tokenizer, sglang_python: Path, smollm2: Path
) -> None:
    script = Path(__file__).with_name("greedy.py")
    for prompt in (FRANCE, STORY):
        ids = tokenizer.encode(prompt).ids
        command = [str(part) for part in (sglang_python, script, smollm2, json.dumps(ids), 12)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        expected = json.loads(done.stdout.splitlines()[-1])
        assert list(answer(served, ids, {"max_new_tokens": 12, "ignore_eos": True}).output_ids) == expected


def test_it_says_paris_and_ends_on_eos_which_is_no_stop_of_the_request(
    served: SglangWorker, tokenizer: Tokenizer
) -> None:
    done = answer(served, tokenizer.encode(FRANCE).ids, {"max_new_tokens": 30})
    assert "Paris" in tokenizer.decode(list(done.output_ids))
    assert done.finish_reason == "stop" and done.output_ids[-1] == EOS and done.WhichOneof("matched_stop") is None
    assert done.prompt_tokens == len(tokenizer.encode(FRANCE).ids) and done.completion_tokens == len(done.output_ids)


def test_tokens_are_streamed_as_they_are_made(served: SglangWorker, tokenizer: Tokenizer) -> None:
    request = pb.GenerateRequest(
        request_id="streamed",
        tokenized=pb.TokenizedInput(input_ids=tokenizer.encode(STORY).ids),
        sampling_params=pb.SamplingParams(max_new_tokens=20, ignore_eos=True),
        stream=True,
    )
    times, replies = [], []
    for reply in served.stub.Generate(request, timeout=60):
        times.append(time.monotonic())
        replies.append(reply)
        assert reply.request_id == "streamed"
    assert len(replies) >= 15 and times[-1] - times[0] > (times[-1] - times[-2]) * 3
    counts = [reply.chunk.completion_tokens for reply in replies[:-1]]
    assert counts == sorted(counts) and counts[-1] == 20
    whole = ask(served, list(request.tokenized.input_ids), {"max_new_tokens": 20, "ignore_eos": True}, stream=False)
    assert [list(reply.complete.output_ids) for reply in whole] == [list(replies[-1].complete.output_ids)]


def test_tokens_can_be_sent_several_at_a_time(served: SglangWorker, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(STORY).ids
    sampling = {"max_new_tokens": 12, "ignore_eos": True, "stream_interval": 6}
    *chunks, last = ask(served, ids, sampling)
    assert len(chunks) <= 4 and len(last.complete.output_ids) == 12


def test_logprobs_of_every_kind(served: SglangWorker, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(STORY).ids
    done = answer(
        served,
        ids,
        {"max_new_tokens": 5, "ignore_eos": True},
        return_logprob=True,
        logprob_start_len=2,
        top_logprobs_num=3,
        token_ids_logprob=[5, 400],
    )
    output = done.output_logprobs
    assert list(output.token_ids) == list(done.output_ids) and len(output.token_logprobs) == 5
    for value, token, top, scored in zip(
        output.token_logprobs, output.token_ids, output.top_logprobs, output.token_ids_logprobs, strict=True
    ):
        assert len(top.values) == len(top.token_ids) == 3 and list(top.values) == sorted(top.values, reverse=True)
        assert top.token_ids[0] == token and math.isclose(top.values[0], value, abs_tol=1e-5)
        assert list(scored.token_ids) == [5, 400] and max(scored.values) <= value + 1e-5
    prompt = done.input_logprobs
    assert list(prompt.token_ids) == ids[2:]
    assert not prompt.token_logprobs[0].HasField("value")
    assert all(one.HasField("value") and one.value <= 0 for one in prompt.token_logprobs[1:])
    assert [len(top.values) for top in prompt.top_logprobs] == [0, *[3] * (len(ids) - 3)]
    alone = answer(served, ids, {"max_new_tokens": 2}, return_logprob=True, logprob_start_len=-1)
    assert not alone.HasField("input_logprobs") and not alone.output_logprobs.top_logprobs
    assert len(alone.output_logprobs.token_logprobs) == len(alone.output_ids)


def test_a_prompt_can_be_scored_without_generating(served: SglangWorker, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("The capital of France is").ids
    paris, london = tokenizer.encode(" Paris").ids[0], tokenizer.encode(" London").ids[0]
    done = answer(
        served, ids, {"max_new_tokens": 0}, return_logprob=True, logprob_start_len=-1, token_ids_logprob=[paris, london]
    )
    assert list(done.output_ids) == [] and done.finish_reason == "length" and done.completion_tokens == 0
    (row,) = done.output_logprobs.token_ids_logprobs
    assert list(row.token_ids) == [paris, london] and row.values[0] > row.values[1]


def test_stop_strings_and_ids_are_matched_and_named(served: SglangWorker, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(STORY).ids
    plain = answer(served, ids, {"max_new_tokens": 24, "ignore_eos": True})
    word = tokenizer.decode(list(plain.output_ids)).split()[3]
    done = answer(served, ids, {"max_new_tokens": 24, "stop": [word, "never to be seen"]})
    assert (done.finish_reason, done.matched_stop_str) == ("stop", word)
    assert word in tokenizer.decode(list(done.output_ids))
    assert list(done.output_ids) == list(plain.output_ids)[: len(done.output_ids)]
    token = plain.output_ids[4]
    done = answer(served, ids, {"max_new_tokens": 24, "stop_token_ids": [token]})
    first = list(plain.output_ids).index(token) + 1
    assert (done.finish_reason, done.matched_token_id) == ("stop", token)
    assert list(done.output_ids) == list(plain.output_ids)[:first]
    held = answer(served, ids, {"max_new_tokens": 24, "stop_token_ids": [token], "min_new_tokens": 12})
    assert len(held.output_ids) > 12


def test_penalties_and_biases_change_what_is_said(served: SglangWorker, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("la la la la la la").ids
    plain = answer(served, ids, {"max_new_tokens": 16, "ignore_eos": True})
    for penalty in ({"frequency_penalty": 2.0}, {"presence_penalty": 2.0}, {"repetition_penalty": 1.8}):
        done = answer(served, ids, {"max_new_tokens": 16, "ignore_eos": True, **penalty})
        assert len(set(done.output_ids)) > len(set(plain.output_ids)), penalty
    done = answer(served, ids, {"max_new_tokens": 3, "logit_bias": {"3200": 100.0}})
    assert list(done.output_ids) == [3200] * 3


def test_constraints_shape_the_text(served: SglangWorker, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(chat_text("Describe a person as JSON.")).ids

    def said(**constraint: str) -> str:
        done = answer(served, ids, {"max_new_tokens": 48, **constraint})
        assert done.finish_reason == "stop", constraint
        return str(tokenizer.decode(list(done.output_ids), skip_special_tokens=True))

    person = json.loads(said(json_schema=json.dumps(SCHEMA)))
    assert set(person) == {"name", "age"} and 0 <= person["age"] <= 99
    assert re.fullmatch(r"\d{3}-[a-f]{2}", said(regex=r"\d{3}-[a-f]{2}"))
    assert said(ebnf_grammar='root ::= "yes" | "no"') in ("yes", "no")
    tag = {"type": "structural_tag", "format": {"type": "const_string", "value": "only this"}}
    assert said(structural_tag=json.dumps(tag)) == "only this"


def test_samples_of_one_request(served: SglangWorker, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(STORY).ids
    replies = ask(served, ids, {"max_new_tokens": 12, "temperature": 1.0, "n": 3, "ignore_eos": True})
    ends = [reply.complete for reply in replies if reply.HasField("complete")]
    assert sorted(end.index for end in ends) == [0, 1, 2]
    assert len({tuple(end.output_ids) for end in ends}) > 1, "three samples are the same"
    for end in ends:
        chunks = [reply.chunk for reply in replies if reply.HasField("chunk") and reply.chunk.index == end.index]
        assert [token for chunk in chunks for token in chunk.token_ids] == list(end.output_ids)


def test_hidden_states_have_a_row_a_position(served: SglangWorker) -> None:
    served.stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=5), timeout=30)
    ids = [1, 300, 301, 302]
    *chunks, last = ask(served, ids, {"max_new_tokens": 4, "ignore_eos": True}, return_hidden_states=True)
    rows = last.complete.all_hidden_states
    assert [row.position for row in rows] == list(range(len(ids) + 3)), "the last token is never computed"
    assert {len(row.values) for row in rows} == {HIDDEN_SIZE}
    streamed = [value for reply in chunks for value in reply.chunk.hidden_states]
    assert streamed == [value for row in rows for value in row.values]


def test_a_logit_processor_of_the_client_runs(served: SglangWorker, tokenizer: Tokenizer, sglang_python: Path) -> None:
    code = (
        "from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor as P\nprint(P.to_str())"
    )
    done = subprocess.run([str(sglang_python), "-c", code], capture_output=True, text=True, check=True, timeout=120)
    ids = tokenizer.encode(STORY).ids
    plain = answer(served, ids, {"max_new_tokens": 6, "ignore_eos": True})
    banned = struct_pb2.Struct()
    banned.update({"token_ids": [int(plain.output_ids[0]), int(plain.output_ids[2])]})
    without = answer(
        served,
        ids,
        {"max_new_tokens": 6, "ignore_eos": True, "custom_params": banned},
        custom_logit_processor=done.stdout.splitlines()[-1],
    )
    assert not set(without.output_ids) & {plain.output_ids[0], plain.output_ids[2]}
    code_, words = refused(served, ids, {}, custom_logit_processor='{"callable": "00"}')
    assert code_ is grpc.StatusCode.INVALID_ARGUMENT and "custom_logit_processor" in words


@pytest.mark.parametrize(
    ("sampling", "given", "words"),
    [
        ({"regex": "[a-z"}, {}, "regex"),
        ({"json_schema": '{"type": "nothing"}'}, {}, "nothing"),
        ({"ebnf_grammar": "root ::= "}, {}, "grammar"),
        ({"structural_tag": '{"type": "nothing"}'}, {}, "structural"),
        ({"stop": ["a"] * 32, "top_p": 2.0}, {}, "top_p is 2.0"),
    ],
)
def test_a_refused_request_ends_its_stream_and_nothing_else(
    served: SglangWorker, sampling: dict[str, Any], given: dict[str, Any], words: str
) -> None:
    code, text = refused(served, [1, 2, 3], {"max_new_tokens": 4, **sampling}, **given)
    assert code is grpc.StatusCode.INVALID_ARGUMENT and words in text.lower(), text
    assert len(answer(served, [1, 2, 3], {"max_new_tokens": 4, "ignore_eos": True}).output_ids) == 4


def test_a_prompt_over_the_schedulers_own_limit_is_told_so(served: SglangWorker) -> None:
    info = served.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=5)
    longest = [1] * (info.max_req_input_len + 1)
    code, words = refused(served, longest, {"max_new_tokens": 1})
    assert code is grpc.StatusCode.INVALID_ARGUMENT and str(len(longest)) in words


def test_an_aborted_request_leaves_the_scheduler_within_a_second(served: SglangWorker) -> None:
    request = pb.GenerateRequest(
        request_id="long", tokenized=pb.TokenizedInput(input_ids=[1, 5, 9]), sampling_params=pb.SamplingParams(**LONG)
    )
    for end in ("abort", "cancel"):
        request.stream = True
        stream = served.stub.Generate(request, timeout=60)
        next(stream)
        served.wait_running(1, 3)
        if end == "abort":
            assert served.stub.Abort(pb.AbortRequest(request_id="long"), timeout=5).success
            *_, last = stream
            assert last.complete.finish_reason == "abort"
        else:
            stream.cancel()
        assert served.wait_idle(1.0) <= 1.0
    assert not served.stub.Abort(pb.AbortRequest(request_id="long"), timeout=5).success


def test_flushing_empties_the_prefix_cache(served: SglangWorker) -> None:
    ids = [1, *range(1000, 1040)]
    sampling = {"max_new_tokens": 1, "ignore_eos": True}
    answer(served, ids, sampling)
    assert answer(served, ids, sampling).cached_tokens > 30
    done = served.stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=5), timeout=30)
    assert done.success, done.message
    assert answer(served, ids, sampling).cached_tokens == 0


def test_what_is_reported_is_the_schedulers(served: SglangWorker, smollm2: Path) -> None:
    model = served.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=5)
    assert (model.served_model_name, model.vocab_size, list(model.eos_token_ids)) == ("smol", 49152, [EOS])
    assert model.is_generation and model.model_type == "llama" and model.max_req_input_len == 8192 - 6
    server = served.stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=5)
    assert server.sglang_version == "0.5.23" and server.max_total_num_tokens == 8192
    assert server.server_args["device"] == "cpu"
    (load,) = served.stub.GetLoads(pb.GetLoadsRequest(), timeout=5).loads
    assert load.max_total_num_tokens == load.memory.token_capacity == 8192 and load.max_running_requests > 0
    chunks = list(served.stub.GetTokenizer(common_pb2.GetTokenizerRequest(), timeout=30))
    archive = zipfile.ZipFile(io.BytesIO(b"".join(chunk.data for chunk in chunks)))
    assert archive.read("tokenizer.json") == (smollm2 / "tokenizer.json").read_bytes() and chunks[-1].sha256
