"""What a request gets back: its tokens, its finish reason, and what rides on the first output."""

from __future__ import annotations

import time

import pytest

from bridge.plugins.sim.tokens import expected_tokens
from tests.sim.conftest import Start
from tests.sim.front_end import EVENTS, LENGTH, OUTPUTS, PREFILL, STOP, TOKENS, TRACE, Answer

PROMPT = [100, 200, 300]


def test_tokens_are_the_expected_ones_and_length_ends_them(start: Start) -> None:
    answer = start().generate(PROMPT, {"max_tokens": 40})
    assert answer.tokens == expected_tokens(PROMPT, 40)
    assert (answer.finish, answer.stop_reason) == (LENGTH, None)
    assert [len(output[TOKENS]) for output in answer.outputs] == [1] * 40


def test_a_seed_changes_them_and_the_default_is_sixteen(start: Start) -> None:
    front = start()
    assert front.generate(PROMPT, {"seed": 7}).tokens == expected_tokens(PROMPT, 16, 7)


def test_eos_stops_without_a_stop_reason_and_is_in_the_output(start: Start) -> None:
    front = start("--eos-after", "5")
    answer = front.generate(PROMPT, {"max_tokens": 40, "_eos_token_id": 2, "stop_token_ids": [2]})
    assert answer.tokens == expected_tokens(PROMPT, 6, eos_after=5)
    assert (answer.tokens[-1], answer.finish, answer.stop_reason) == (2, STOP, None)


def test_without_an_eos_id_on_the_wire_generation_passes_it(start: Start) -> None:
    answer = start("--eos-after", "5").generate(PROMPT, {"max_tokens": 9, "ignore_eos": True})
    assert answer.tokens == expected_tokens(PROMPT, 9, eos_after=5)
    assert answer.finish == LENGTH


@pytest.mark.parametrize("per_step", [1, 3, 5])
def test_a_stop_id_stops_and_names_itself(start: Start, per_step: int) -> None:
    stop = expected_tokens(PROMPT, 31)[30]
    front = start("--tokens-per-step", str(per_step), "--max-num-seqs", "64")
    answer = front.generate(PROMPT, {"max_tokens": 50, "stop_token_ids": [31999, stop]})
    assert answer.tokens == expected_tokens(PROMPT, 31)
    assert (answer.finish, answer.stop_reason) == (STOP, stop)


def test_a_stop_on_the_last_allowed_token_is_a_stop(start: Start) -> None:
    stop = expected_tokens(PROMPT, 4)[3]
    assert start().generate(PROMPT, {"max_tokens": 4, "stop_token_ids": [stop]}).finish == STOP


def test_min_tokens_holds_stops_back_only_if_the_front_end_listed_them(start: Start) -> None:
    front = start("--eos-after", "2")
    sampling = {"max_tokens": 30, "min_tokens": 8, "_eos_token_id": 2}
    held = front.generate(PROMPT, {**sampling, "_all_stop_token_ids": [2]}, "held")
    assert held.tokens == expected_tokens(PROMPT, 9, eos_after=2, min_tokens=8, masked={2})
    assert len(front.generate(PROMPT, sampling, "forgotten").tokens) == 3


def test_the_context_ends_a_request_that_asks_for_more(start: Start) -> None:
    front = start("--max-model-len", "32")
    answer = front.generate(list(range(10, 30)), {"max_tokens": 1000})
    assert (len(answer.tokens), answer.finish) == (12, LENGTH)
    full = front.generate(list(range(10, 42)), {"max_tokens": 1000})
    assert (len(full.tokens), full.finish) == (1, LENGTH)


@pytest.mark.parametrize("per_step", [2, 7, 20])
def test_several_tokens_a_step_are_the_same_tokens(start: Start, per_step: int) -> None:
    front = start("--tokens-per-step", str(per_step), "--max-num-seqs", "64")
    answer = front.generate(PROMPT, {"max_tokens": 45})
    assert answer.tokens == expected_tokens(PROMPT, 45)
    assert max(len(output[TOKENS]) for output in answer.outputs) == per_step
    assert all(output[TOKENS] for output in answer.outputs)


def test_the_first_output_carries_prefill_figures_and_events_in_engine_time(start: Start) -> None:
    answer = start().generate(list(range(100, 133)), {"max_tokens": 3})
    first, *rest = answer.outputs
    assert first[PREFILL] == {
        "num_prompt_tokens": 33,
        "num_computed_tokens": 33,
        "num_cached_tokens": 0,
        "num_local_cached_tokens": 0,
        "num_external_cached_tokens": 0,
        "num_cache_creation_tokens": 32,
    }
    assert [event["type"] for event in first[EVENTS]] == [1, 2]
    assert first[EVENTS][0]["timestamp"] <= first[EVENTS][1]["timestamp"] <= time.monotonic()
    assert all(output[PREFILL] is None and output[EVENTS] is None for output in rest)


def test_a_prompt_seen_before_comes_from_the_prefix_cache(start: Start) -> None:
    front = start()
    prompt = list(range(100, 164))
    answers = [front.generate(prompt, {"max_tokens": 20}, f"r{number}") for number in range(2)]
    cached = [answer.outputs[0][PREFILL]["num_cached_tokens"] for answer in answers]
    assert cached == [0, 48], "the block with the last token is computed again"
    longer = front.generate(prompt + answers[0].tokens + [7] * 16, {"max_tokens": 1}, "turn2")
    assert longer.outputs[0][PREFILL]["num_cached_tokens"] == 80, "generated blocks are cached too"
    salted = front.generate(prompt, {"max_tokens": 1, "skip_reading_prefix_cache": True}, "skip")
    assert salted.outputs[0][PREFILL]["num_cached_tokens"] == 0


def test_a_salt_separates_caches_and_the_switch_turns_them_off(start: Start) -> None:
    front = start()
    prompt = list(range(100, 164))
    for request_id, salt, cached in (("a", None, 0), ("b", "x", 0), ("c", "x", 48)):
        front.add(request_id, prompt, {"max_tokens": 1}, cache_salt=salt)
        assert front.collect(request_id)[request_id].outputs[0][PREFILL]["num_cached_tokens"] == cached
    off = start("--no-enable-prefix-caching")
    for request_id in "ab":
        assert off.generate(prompt, {"max_tokens": 1}, request_id).outputs[0][PREFILL]["num_cached_tokens"] == 0


def test_trace_headers_come_back_on_every_output(start: Start) -> None:
    front = start()
    front.add("a", PROMPT, {"max_tokens": 20}, trace_headers={"traceparent": "00-1"})
    answer = front.collect("a")["a"]
    assert answer.tokens == expected_tokens(PROMPT, 20)
    assert all(output[TRACE] == {"traceparent": "00-1"} for output in answer.outputs)


def test_many_requests_share_each_step_and_none_mixes_with_another(start: Start) -> None:
    front = start()
    prompts = {f"r{number}": [number + 10, number + 11] for number in range(200)}
    lengths = {request_id: 1 + number % 50 for number, request_id in enumerate(prompts)}
    for request_id, prompt in prompts.items():
        front.add(request_id, prompt, {"max_tokens": lengths[request_id]})
    answers = front.collect(*prompts)
    for request_id, prompt in prompts.items():
        assert answers[request_id].tokens == expected_tokens(prompt, lengths[request_id])
    assert max(len(message[OUTPUTS]) for message in front.messages) > 100


def test_a_model_folder_gives_vocabulary_and_eos(start: Start, tiny_llama: object) -> None:
    from bridge.plugins.sim.model import facts_of, vocabulary_of
    from bridge.plugins.sim.options import parse

    front = start("--model", str(tiny_llama), "--eos-after", "3")
    vocab = vocabulary_of(facts_of(parse(["--model-path", str(tiny_llama)])))
    answer = front.generate([5, 6], {"max_tokens": 9, "_eos_token_id": vocab.eos_token_id})
    assert front.ready[0]["max_model_len"] == 2048
    assert answer.tokens == expected_tokens([5, 6], 4, vocab=vocab, eos_after=3)
    assert max(answer.tokens) < 259


def test_answers_refuse_outputs_after_a_terminal() -> None:
    answer = Answer()
    answer.take(["r", [1], None, None, None, LENGTH, None])
    with pytest.raises(AssertionError, match="after the terminal"):
        answer.take(["r", [2], None, None, None, None, None])
