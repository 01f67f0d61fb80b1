"""The lane that the plugin gives SGLang's real scheduler, asked by a peer that shares no code with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sglang.peer import Peer

PROMPT = [1, 70, 101, 108, 40, 55]
LONG = {"max_new_tokens": 1500, "ignore_eos": True}


def test_the_ready_map_says_what_gateways_read(lane: Peer) -> None:
    ready = lane.ready[0]
    assert ready["vllm_version"] == "sglang-0.5.23"
    assert (ready["max_model_len"], ready["block_size"], ready["dtype"]) == (2048, 1, "float32")
    assert ready["kv_cache_size_tokens"] == ready["num_gpu_blocks"] == 8192
    assert ready["data_parallel_size"] == ready["world_size"] == 1 and ready["max_num_batched_tokens"] >= 0
    layouts = ready["positional_layouts"]
    assert layouts["TokenizedGenerateReqInput"][:4] == ["rid", "http_worker_ipc", "input_text", "input_ids"]
    assert set(layouts) >= {"TokenizedEmbeddingReqInput", "EncoderDispatchErrorReq", "SamplingParams"}
    assert set(layouts) >= {"MultimodalProcessorOutput", "MultimodalDataItem"}


def test_tokens_come_one_step_at_a_time_with_running_counts(lane: Peer) -> None:
    answer = lane.ask("plain", PROMPT, {"max_new_tokens": 6, "ignore_eos": True})
    assert [len(row["output_ids"]) for row in answer.rows] == [1] * 6
    assert [row["completion_tokens"] for row in answer.rows] == [1, 2, 3, 4, 5, 6]
    assert {row["prompt_tokens"] for row in answer.rows} == {len(PROMPT)}
    assert answer.reason == "length" and answer.last["finished_messages"] is None
    assert {row["kv_total_tokens"] for row in answer.rows} == {8192}
    assert "finished_status" not in answer.rows[0], "columns nobody asked for are left off"


def test_greedy_tokens_are_those_of_transformers(lane: Peer, greedy: list[int]) -> None:
    assert lane.ask("greedy", PROMPT, {"max_new_tokens": 24, "ignore_eos": True}).tokens == greedy


@pytest.fixture(scope="module")
def greedy(sglang_python: Path, tiny_llama: Path) -> list[int]:
    """What transformers makes of the prompt, greedily and in float32."""
    code = (
        "import sys, json, torch\n"
        "from transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)\n"
        "ids = json.loads(sys.argv[2])\n"
        "for _ in range(24):\n"
        "    ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))\n"
        "print(json.dumps(ids[-24:]))\n"
    )
    import json
    import subprocess

    command = [str(sglang_python), "-c", code, str(tiny_llama), json.dumps(PROMPT)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    tokens: list[int] = json.loads(done.stdout.splitlines()[-1])
    return tokens


def test_a_whole_answer_comes_in_one_message(lane: Peer) -> None:
    answer = lane.ask("whole", PROMPT, {"max_new_tokens": 6, "ignore_eos": True}, stream=False)
    assert len(answer.rows) == 1 and len(answer.tokens) == 6
