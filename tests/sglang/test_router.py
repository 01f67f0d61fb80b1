"""An SGLang scheduler as a worker of the real vllm-router, by vllm.Inference, beside SMG's contract on the same port."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from tokenizers import Tokenizer

from tests.contracts.asking import Stub, control, engine_v1, inference, joined
from tests.gateways import chat_text, get_json, post_events, post_json, vllm_router
from tests.running import unused_port
from tests.sglang.worker import SglangWorker

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
SPOKEN = chat_text("What is the capital of France?")
LIMIT_S = 60


@pytest.fixture(scope="module")
def router(router_binary: Path, contracts: SglangWorker, smollm2: Path, logs: Path) -> Iterator[str]:
    with vllm_router(router_binary, smollm2, logs / "router.log", contracts) as gateway:
        yield gateway.base


def chat(**more: object) -> dict[str, object]:
    return {"model": "smol", "messages": QUESTION, "temperature": 0, "max_tokens": 24, **more}


def test_the_router_knows_the_worker(router: str) -> None:
    assert [model["id"] for model in get_json(f"{router}/v1/models")["data"]] == ["smol"]


def test_chat_whole_and_streamed(router: str) -> None:
    whole = post_json(f"{router}/v1/chat/completions", chat())["choices"][0]
    assert "Paris" in whole["message"]["content"] and whole["finish_reason"] == "stop"
    pieces = [
        event["choices"][0]["delta"].get("content") or ""
        for event in post_events(f"{router}/v1/chat/completions", chat())
        if event["choices"]
    ]
    assert "".join(pieces) == whole["message"]["content"] and len([one for one in pieces if one]) > 3


@pytest.mark.parametrize("word", ["France", "is Par"])
def test_a_stop_string_ends_and_is_not_shown(router: str, word: str) -> None:
    whole = post_json(f"{router}/v1/chat/completions", chat())["choices"][0]["message"]["content"]
    reply = post_json(f"{router}/v1/chat/completions", chat(stop=[word]))["choices"][0]
    assert reply["message"]["content"] == whole.partition(word)[0] and reply["finish_reason"] == "stop"


def test_a_json_schema_shapes_the_answer(router: str) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "warm": {"type": "boolean"}},
        "required": ["city", "warm"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}}
    reply = post_json(f"{router}/v1/chat/completions", chat(response_format=wanted, max_tokens=60))
    assert set(json.loads(reply["choices"][0]["message"]["content"])) == {"city", "warm"}


def test_two_workers_and_one_dies(
    router_binary: Path, contracts: SglangWorker, sglang_python: Path, smollm2: Path, tmp_path: Path
) -> None:
    named = ["--served-model-name", "smol", "--contract", "sglang.grpc.scheduler", "--contract", "vllm.Inference"]
    log = tmp_path / "second.log"
    with SglangWorker(sglang_python, smollm2, unused_port(), log, named) as second:
        second.wait_until_serving()
        with vllm_router(router_binary, smollm2, tmp_path / "router.log", contracts, second) as gateway:
            url = f"{gateway.base}/v1/chat/completions"
            answers = {post_json(url, chat())["choices"][0]["message"]["content"] for _ in range(4)}
            for process in second.tree():
                process.kill()
            answers |= {post_json(url, chat())["choices"][0]["message"]["content"] for _ in range(6)}
            assert len(answers) == 1 and "Paris" in answers.pop()


def test_every_field_of_an_answer(contracts: SglangWorker, smollm2: Path) -> None:
    stub, tokenizer = Stub(contracts.channel, "vllm.Inference"), Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    shown = {"output_token_ids": True, "output_logprobs": True, "output_candidates": {"top_n": 2}}
    asked = inference(text=SPOKEN, stopping={"max_new_tokens": 24}, response={**shown, "prompt_token_ids": True})
    for reply in (stub.Generate(asked, timeout=LIMIT_S), joined(list(stub.GenerateStream(asked, timeout=LIMIT_S)))):
        assert list(reply.prompt_info.token_ids) == tokenizer.encode(SPOKEN).ids
        out = reply.outputs
        assert out.text == tokenizer.decode(list(out.token_ids)) and "Paris" in out.text
        assert out.finish_info.eos_token_id == 2 and out.token_ids[-1] == 2
        assert len(out.logprobs) == len(out.candidate_tokens) == out.num_tokens == len(out.token_ids)
        for token, value, row in zip(out.token_ids, out.logprobs, out.candidate_tokens, strict=True):
            assert (row.tokens[0].id, row.tokens[0].rank) == (token, 1)
            assert row.tokens[0].logprob == pytest.approx(value, abs=1e-5)


def test_what_the_engine_cannot_do_is_refused_by_name(contracts: SglangWorker) -> None:
    stub = Stub(contracts.channel, "vllm.Inference")
    for fields, code, word in (
        ({"priority": 3}, "UNIMPLEMENTED", "priority"),
        ({"kv": {"bypass_prefix_cache": True}}, "UNIMPLEMENTED", "bypass_prefix_cache"),
        ({"decoding": {"allowed_token_ids": [5]}}, "UNIMPLEMENTED", "allowed_token_ids"),
        ({"lora_name": "x"}, "FAILED_PRECONDITION", "lora_name"),
        ({"decoding": {"choice": {"choices": ["a"]}}}, "UNIMPLEMENTED", "choice"),
    ):
        with pytest.raises(grpc.RpcError) as error:
            stub.Generate(inference(text="a", stopping={"max_new_tokens": 2}, **fields), timeout=LIMIT_S)
        assert (error.value.code().name, word in str(error.value.details())) == (code, True), error.value
    controls = Stub(contracts.channel, "vllm.Control")
    for name in ("PauseGeneration", "IsSleeping", "GetWeightVersion"):
        with pytest.raises(grpc.RpcError) as error:
            getattr(controls, name)(control(name), timeout=LIMIT_S)
        assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED, error.value
    assert controls.GetServerInfo(control("GetServerInfo"), timeout=5).max_model_len > 0
    assert controls.GetModelInfo(control("GetModelInfo"), timeout=5).served_model_name == "smol"


def test_the_older_contract_answers_as_well(contracts: SglangWorker) -> None:
    stub = Stub(contracts.channel, "vllm.engine.v1.VllmEngine")
    reply = stub.Generate(engine_v1(prompt_text=SPOKEN, sampling_params={"max_tokens": 24}), timeout=LIMIT_S)
    assert "Paris" in reply.output_text and reply.finish_reason == "stop"
