"""Queueing, capacity, time, statistics and aborts."""

from __future__ import annotations

import time
from typing import Any

from bridge.plugins.sim.control import SimControl
from bridge.plugins.sim.tokens import expected_tokens
from tests.sim.conftest import Start
from tests.sim.front_end import EVENTS, FINISH, OUTPUTS, REQUEST_ID, STATS, TIMESTAMP, FrontEnd

STATS_KEYS = {
    *("num_running_reqs", "num_waiting_reqs", "num_skipped_waiting_reqs", "num_kv_fetch_reqs_by_stage"),
    *("step_counter", "current_wave", "kv_cache_usage", "iteration_details", "prefix_cache_stats"),
    *("connector_prefix_cache_stats", "kv_cache_eviction_events", "spec_decoding_stats", "kv_connector_stats"),
    *("ec_connector_stats", "waiting_lora_adapters", "running_lora_adapters", "cudagraph_stats", "perf_stats"),
}


def wait_for(front: FrontEnd, **wanted: Any) -> dict[str, Any]:
    """Until the engine's own counts are `wanted`."""
    end = time.monotonic() + 5
    with SimControl(front.control) as control:
        while True:
            state = control.state()
            if all(state[name] == value for name, value in wanted.items()):
                return state
            assert time.monotonic() < end, state
            time.sleep(0.01)


def test_statistics_ride_on_a_step_and_one_message_trails_the_last_token(start: Start) -> None:
    front = start()
    front.generate(list(range(100, 140)), {"max_tokens": 3})
    trailing = front.receive()
    assert front.arrivals() == []
    assert [len(message[OUTPUTS]) for message in front.messages] == [1, 1, 1, 0]
    assert all(set(message[STATS]) == STATS_KEYS for message in front.messages)
    assert [message[STATS]["num_running_reqs"] for message in front.messages] == [1, 1, 0, 0]
    assert trailing[STATS]["kv_cache_usage"] == 0.0
    assert front.messages[0][STATS]["prefix_cache_stats"]["queries"] == 40
    assert front.messages[1][STATS]["prefix_cache_stats"]["queries"] == 0, "counts are since the last message"
    assert abs(trailing[TIMESTAMP] - time.monotonic()) < 5
    assert trailing[8] == "default"


def test_only_the_first_client_of_a_step_gets_statistics_and_client_0_the_trailing_ones(start: Start) -> None:
    front = start("--step-ms", "30", pairs=2)
    front.add("b", [5], {"max_tokens": 5}, client=1)
    front.receive(client=1)
    front.add("a", [6], {"max_tokens": 3}, client=0)
    front.collect("a")
    front.collect("b", client=1)
    trailing = front.receive()
    assert (trailing[OUTPUTS], trailing[STATS]["num_running_reqs"]) == ([], 0)
    by_step: dict[float, list[list[Any]]] = {}
    for message in front.messages:
        by_step.setdefault(message[TIMESTAMP], []).append(message)
    assert all(sum(message[STATS] is not None for message in step) == 1 for step in by_step.values())
    shared = [step for step in by_step.values() if len(step) == 2]
    assert shared and all(
        message[OUTPUTS][0][REQUEST_ID] == "b" for step in shared for message in step if message[STATS]
    ), "the client of the request that was admitted first"


def test_statistics_can_be_off(start: Start) -> None:
    front = start("--disable-log-stats")
    answer = front.generate([5], {"max_tokens": 3})
    assert front.arrivals() == []
    assert all(message[STATS] is None for message in front.messages)
    assert all(output[EVENTS] is None for output in answer.outputs)


def test_requests_beyond_the_batch_wait_their_turn(start: Start) -> None:
    front = start("--max-num-seqs", "2", "--step-ms", "20")
    for number in range(5):
        front.add(f"r{number}", [number + 5], {"max_tokens": 4})
    answers = front.collect(*(f"r{number}" for number in range(5)))
    for number in range(5):
        assert answers[f"r{number}"].tokens == expected_tokens([number + 5], 4)
    loads = [(message[STATS]["num_running_reqs"], message[STATS]["num_waiting_reqs"]) for message in front.messages]
    assert (2, 3) in loads and max(loads)[0] == 2


def test_a_long_prompt_is_computed_in_chunks_while_others_go_on(start: Start) -> None:
    front = start("--max-num-batched-tokens", "64", "--max-num-seqs", "8", "--step-ms", "5")
    front.add("short", [9], {"max_tokens": 40})
    front.receive()
    front.add("long", list(range(100, 612)), {"max_tokens": 1})
    front.until(lambda message: any(output[REQUEST_ID] == "long" for output in message[OUTPUTS]))
    before = [message for message in front.messages[1:-1] if message[OUTPUTS]]
    assert len(before) >= 7, "512 tokens take at least eight steps of 63"
    assert front.messages[-1][OUTPUTS][-1][FINISH] is not None


def test_a_full_cache_preempts_the_youngest_and_no_token_is_lost(start: Start) -> None:
    front = start("--num-gpu-blocks", "17", "--max-model-len", "256", "--step-ms", "1")
    prompts = {f"r{number}": list(range(100 * number + 100, 100 * number + 130)) for number in range(4)}
    for request_id, prompt in prompts.items():
        front.add(request_id, prompt, {"max_tokens": 100})
    answers = front.collect(*prompts)
    for request_id, prompt in prompts.items():
        assert answers[request_id].tokens == expected_tokens(prompt, 100)
    state = wait_for(front, running=0, waiting=0, kv_blocks_used=0)
    assert state["preempted"] > 0
    kinds = [event["type"] for output in answers["r3"].outputs for event in output[EVENTS] or ()]
    assert 3 in kinds and kinds[:2] == [1, 2]


def test_a_request_may_fill_the_whole_cache(start: Start) -> None:
    front = start("--num-gpu-blocks", "5", "--max-model-len", "64")
    for number, length in enumerate((10, 63, 64)):
        answer = front.generate([100] * length, {"max_tokens": 1000}, f"r{number}")
        assert len(answer.tokens) == max(1, 64 - length)


def test_an_abort_ends_a_request_without_a_terminal(start: Start) -> None:
    front = start("--step-ms", "10", "--max-num-seqs", "1")
    front.add("runs", [5], {"max_tokens": 1000})
    front.add("waits", [6], {"max_tokens": 1000})
    front.receive()
    front.abort("runs", "nobody", "waits")
    state = wait_for(front, running=0, waiting=0, aborted=2)
    assert sorted(state["aborted_ids"]) == ["runs", "waits"]
    time.sleep(0.1)
    while (front.outputs[0].poll(0)) != 0:
        assert all(output[FINISH] is None for output in front.receive()[OUTPUTS])
    assert front.messages[-1][OUTPUTS] == [], "the statistics message that trails the last request"


def test_an_id_can_be_used_again_once_its_abort_is_done(start: Start) -> None:
    front = start("--step-ms", "10")
    front.add("a", [5], {"max_tokens": 1000})
    front.receive()
    front.abort("a")
    wait_for(front, running=0, aborted=1)
    front.until(lambda message: message[OUTPUTS] == [])
    assert front.generate([6], {"max_tokens": 3}, "a").tokens == expected_tokens([6], 3)


def test_abort_immediately_leaves_nothing_behind(start: Start) -> None:
    front = start()
    front.add("a", [5], {"max_tokens": 5}, abort_immediately=True)
    assert wait_for(front, added=1)["aborted_ids"] == ["a"]
    assert front.generate([5], {"max_tokens": 2}, "a").tokens == expected_tokens([5], 2)


def test_steps_keep_their_pace(start: Start) -> None:
    front = start("--step-ms", "20", "--per-request-ms", "0")
    front.add("a", [5], {"max_tokens": 26})
    front.receive()
    begun = time.monotonic()
    front.collect("a")
    assert 0.47 <= time.monotonic() - begun < 0.8, "25 steps of 20 ms"


def test_prefill_and_batch_size_take_time(start: Start) -> None:
    front = start("--step-ms", "1", "--per-request-ms", "5", "--prefill-tps", "5000")
    begun = time.monotonic()
    front.add("a", list(range(100, 1100)), {"max_tokens": 1})
    front.collect("a")
    assert time.monotonic() - begun >= 0.2, "1,000 tokens at 5,000 a second"
    begun = time.monotonic()
    for number in range(20):
        front.add(f"r{number}", [number + 5], {"max_tokens": 1})
    front.collect(*(f"r{number}" for number in range(20)))
    assert time.monotonic() - begun >= 0.1, "20 requests add 5 ms each"


def test_a_zero_step_is_as_fast_as_it_can(start: Start) -> None:
    front = start("--step-ms", "0")
    front.add("warm", [5], {"max_tokens": 2})
    front.collect("warm")
    for number in range(256):
        front.add(f"r{number}", [number + 5] * 32, {"max_tokens": 400})
    first = time.monotonic()
    raw: list[bytes] = []
    count = 0
    while count < 256 * 400:
        payload = front.receive_raw(10)
        assert payload is not None
        raw.append(payload)
        header = payload[2:5]
        if payload[2] == 0xDC:
            count += int.from_bytes(header[1:3], "big")
        elif 0x90 <= payload[2] <= 0x9F:
            count += payload[2] & 0x0F
    rate = count / (time.monotonic() - first)
    assert rate > 200_000, f"{rate:.0f} tokens/s"
