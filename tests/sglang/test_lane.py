"""The lane that the plugin gives SGLang's real scheduler, asked by a peer that shares no code with it."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import msgspec
import pytest

from tests.sglang.peer import Peer

PROMPT = [1, 70, 101, 108, 40, 55]
LONG = {"max_new_tokens": 1500, "ignore_eos": True}
HIDDEN_SIZE = 128


@pytest.fixture(scope="module")
def greedy(sglang_python: Path, tiny_llama: Path) -> list[int]:
    """24 tokens of transformers after `PROMPT`."""
    script = Path(__file__).with_name("greedy.py")
    command = [sglang_python, script, tiny_llama, json.dumps(PROMPT), "24"]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True, timeout=120)
    tokens: list[int] = json.loads(done.stdout.splitlines()[-1])
    return tokens


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


def test_a_whole_answer_comes_in_one_message(lane: Peer) -> None:
    answer = lane.ask("whole", PROMPT, {"max_new_tokens": 6, "ignore_eos": True}, stream=False)
    assert len(answer.rows) == 1 and len(answer.tokens) == 6


def test_a_stop_token_and_a_stop_string_end_and_are_named(lane: Peer, greedy: list[int]) -> None:
    answer = lane.ask("stop-id", PROMPT, {"max_new_tokens": 24, "stop_token_ids": [greedy[3]]})
    assert answer.reason == "stop" and answer.last["finished_matched"] == greedy[3]
    assert answer.tokens == greedy[: greedy.index(greedy[3]) + 1]
    letter = next(chr(one - 3) for one in greedy if 32 < one - 3 < 127)
    answer = lane.ask("stop-text", PROMPT, {"max_new_tokens": 24, "ignore_eos": True, "stop": [letter]})
    assert answer.reason == "stop" and answer.last["finished_matched"] == letter


def test_logprobs_of_every_kind(lane: Peer) -> None:
    asked = {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0, "token_ids_logprob": [5, 9]}
    answer = lane.ask("logprobs", PROMPT, {"max_new_tokens": 4, "ignore_eos": True}, **asked)
    assert answer.joined("output_token_logprobs_idx") == answer.tokens
    top = answer.joined("output_top_logprobs_val")
    assert [row[0] for row in top] == answer.joined("output_token_logprobs_val"), "greedy takes the likeliest"
    assert [len(row) for row in answer.joined("output_top_logprobs_idx")] == [2] * 4
    assert answer.joined("output_token_ids_logprobs_idx") == [[5, 9]] * 4
    first = answer.rows[0]
    assert first["input_token_logprobs_idx"] == PROMPT
    assert first["input_token_logprobs_val"][0] is None and all(
        one < 0 for one in first["input_token_logprobs_val"][1:]
    )
    assert [len(row) for row in first["input_top_logprobs_idx"]] == [0, *[2] * (len(PROMPT) - 1)]
    assert all(not row.get("input_token_logprobs_val") for row in answer.rows[1:]), "prompt columns come once"


def test_hidden_states_come_as_new_rows_only(lane: Peer) -> None:
    uncached = [250, 251, 252, 253]
    answer = lane.ask("hidden", uncached, {"max_new_tokens": 4, "ignore_eos": True}, return_hidden_states=True)
    sizes = [len(row["output_hidden_states"]) for row in answer.rows]
    assert sizes == [len(uncached), 1, 1, 1]
    assert {len(one) for one in answer.joined("output_hidden_states")} == {HIDDEN_SIZE}


def test_a_schema_and_a_regex_shape_the_tokens(lane: Peer) -> None:
    answer = lane.ask("regex", PROMPT, {"max_new_tokens": 12, "regex": "[ab]{5}"})
    assert answer.reason == "stop" and set(answer.tokens[:5]) <= {ord("a") + 3, ord("b") + 3}
    schema = json.dumps({"type": "object", "properties": {"n": {"type": "boolean"}}, "required": ["n"]})
    answer = lane.ask("schema", PROMPT, {"max_new_tokens": 40, "json_schema": schema})
    text = bytes(one - 3 for one in answer.tokens if one > 2).decode()
    assert set(json.loads(text)) == {"n"} and answer.reason == "stop"


REFUSALS = [
    ({}, {"input_ids": []}, "input_ids is empty"),
    ({}, {"input_ids": [1, 259]}, "input_ids has 259; token ids go from 0 to 258"),
    ({}, {"input_ids": [5, -1]}, "input_ids has -1"),
    ({"n": 2}, {}, "n is 2"),
    ({"beam_width": 3}, {}, "beam_width is 3"),
    ({"temperature": -1.0}, {}, "temperature must be"),
    ({"top_p": 2.0}, {}, "top_p must be"),
    ({"stop": ["x"] * 33}, {}, "at most 32 stop strings"),
    ({"logit_bias": {"400": 1.0}}, {}, "logit_bias"),
    ({"regex": "a", "ebnf": "b"}, {}, "Only one of"),
    ({}, {"top_logprobs_num": 5000}, "top_logprobs_num is 5000"),
    ({}, {"return_logprob": True, "token_ids_logprob": [900]}, "token_ids_logprob has 900"),
    ({}, {"custom_logit_processor": "x"}, "--enable-custom-logit-processor"),
    ({}, {"lora_id": "none"}, "lora_id is 'none'"),
    ({}, {"return_sampling_mask": True}, "return_sampling_mask is not carried"),
    ({}, {"input_embeds": [[0.5]]}, "input_embeds is not carried"),
    ({"regex": "(["}, {}, ""),
    ({}, {"input_ids": [1] * 3000}, ""),
    ({"temperature": "hot"}, {}, "cannot be decoded"),
]


@pytest.mark.parametrize(("sampling", "fields", "text"), REFUSALS, ids=lambda value: str(value)[:40])
def test_what_cannot_be_served_ends_with_400_and_says_why(
    lane: Peer, sampling: dict[str, object], fields: dict[str, object], text: str
) -> None:
    given = {"input_ids": PROMPT, **fields}
    ids = given.pop("input_ids")
    assert isinstance(ids, list)
    answer = lane.ask("refused", ids, sampling, **given)
    assert answer.reason == "abort" and answer.last["finished_status"] == 400
    assert text in answer.last["finished_messages"]


def test_an_embedding_is_refused_by_an_engine_that_generates(lane: Peer) -> None:
    lane.embed("no-embedding", PROMPT)
    answer = lane.answers("no-embedding")["no-embedding"]
    assert answer.last["finished_status"] == 400 and "--is-embedding" in answer.last["finished_messages"]


def test_an_abort_ends_a_request_and_the_engine_is_idle_within_a_second(lane: Peer) -> None:
    lane.generate("gone", PROMPT, LONG)
    next(message for message in lane.messages() if message["rids"])
    started = time.monotonic()
    lane.abort("gone", "never-was")
    ended = idle = False
    for message in lane.messages(timeout=2):
        ended = ended or "abort" in (message["finished_reasons"] or ())
        idle = ended and message["num_running"] == 0 == message["num_waiting"]
        if idle:
            break
    assert ended and idle and time.monotonic() - started < 1


def test_an_abort_ends_no_request_whose_id_begins_alike(lane: Peer) -> None:
    """SGLang aborts every id that begins with the given one."""
    lane.generate("1.5.1", PROMPT, {"max_new_tokens": 200, "ignore_eos": True})
    lane.generate("1.5.12", PROMPT, {"max_new_tokens": 30, "ignore_eos": True})
    lane.abort("1.5.1")
    answers = lane.answers("1.5.1", "1.5.12")
    assert answers["1.5.1"].reason == "abort"
    assert answers["1.5.12"].reason == "length" and len(answers["1.5.12"].tokens) == 30


def test_an_id_that_runs_already_ends_both(lane: Peer) -> None:
    lane.generate("twice", PROMPT, LONG)
    next(message for message in lane.messages() if message["rids"])
    lane.generate("twice", PROMPT, LONG)
    answer = lane.answers("twice")["twice"]
    assert answer.reason == "abort" and "still runs" in answer.last["finished_messages"]
    assert lane.ask("twice", PROMPT, {"max_new_tokens": 2, "ignore_eos": True}).reason == "length", "free again"


def test_an_id_that_looks_like_a_health_check_is_served(lane: Peer) -> None:
    lane.generate("busy", PROMPT, {"max_new_tokens": 40, "ignore_eos": True})
    lane.generate("HEALTH_CHECK_1", PROMPT, {"max_new_tokens": 2, "ignore_eos": True})
    assert lane.answers("busy", "HEALTH_CHECK_1")["HEALTH_CHECK_1"].reason == "length"


def test_control_calls_are_answered_by_their_id(lane: Peer) -> None:
    time.sleep(0.3)  # what ran before leaves the running batch with the next turn of the loop
    lane.ask("cached", PROMPT, {"max_new_tokens": 2, "ignore_eos": True})
    assert lane.ask("cached", PROMPT, {"max_new_tokens": 2, "ignore_eos": True}).last["cached_tokens"] > 0
    reply = lane.control(41, "flush_cache", 5.0)
    assert (reply["call_id"], reply["success"], reply["engine_index"]) == (41, True, 0)
    assert lane.ask("fresh", PROMPT, {"max_new_tokens": 2, "ignore_eos": True}).last["cached_tokens"] == 0
    reply = lane.control(42, "no_such_call")
    assert (reply["call_id"], reply["success"]) == (42, False) and "no_such_call" in reply["message"]
    reply = lane.control(43, "start_profile", {"colour": "blue"})
    assert (reply["call_id"], reply["success"]) == (43, False) and "colour" in reply["message"]
    reply = lane.control(44, "stop_profile")
    assert (reply["call_id"], reply["success"]) == (44, False)


def test_a_profile_is_taken(lane: Peer, tmp_path: Path) -> None:
    assert lane.control(51, "start_profile", {"output_dir": str(tmp_path), "activities": ["CPU"]})["success"]
    lane.ask("profiled", PROMPT, {"max_new_tokens": 3, "ignore_eos": True})
    assert lane.control(52, "stop_profile")["success"]
    assert list(tmp_path.rglob("*.json*"))


def test_answers_go_to_the_slot_that_asked(lane: Peer) -> None:
    for slot in (2, 0, 1):
        lane.generate(f"slot-{slot}", PROMPT, {"max_new_tokens": 30, "ignore_eos": True}, slot=slot)
    for slot in range(3):
        answer = lane.answers(f"slot-{slot}", slot=slot)[f"slot-{slot}"]
        assert len(answer.tokens) == 30
    lane.generate("other", PROMPT, LONG, slot=1)
    next(message for message in lane.messages(1) if message["rids"])
    lane.abort("other", slot=0)
    assert lane.answers("other", slot=1)["other"].reason == "abort", "an abort may come from any slot"
    reply = lane.control(61, "no_such_call", slot=2)
    assert reply["call_id"] == 61


def test_metadata_that_cannot_be_read_counts_as_none(lane: Peer) -> None:
    lane.generate("meta", PROMPT, {"max_new_tokens": 2, "ignore_eos": True}, metadata=b"\xc1")
    assert lane.answers("meta")["meta"].reason == "length"
    lane.generate(
        "trace", PROMPT, {"max_new_tokens": 2}, metadata=msgspec.msgpack.encode({"trace_headers": {"a": "b"}})
    )
    assert lane.answers("trace")["trace"].reason


def test_sampling_values_in_the_layout_of_smg(lane: Peer) -> None:
    """SMG 1.13 leaves out `watermark`, so that what follows it stands one place early."""
    layout = lane.ready[0]["positional_layouts"]["SamplingParams"]
    values = lane.sampling({"max_new_tokens": 3, "ebnf_full_assistant": False, "stop_str_max_len": 0})
    values[layout.index("stop_regex_max_len")] = 0
    values[layout.index("is_normalized")] = False
    del values[layout.index("watermark")]
    assert lane.ask("smg", PROMPT, sampling_params=values).last["completion_tokens"] == 3


def test_garbage_hurts_nobody(lane: Peer) -> None:
    for frames in ((b"\x07", b"\x90"), (b"\x00",), (b"\x00", b"\xc1"), (b"\x01", b"\xc0"), (b"\x02", b"\x80"), (b"",)):
        lane.send(*frames)
    assert lane.ask("after", PROMPT, {"max_new_tokens": 2, "ignore_eos": True}).reason == "length"
