"""The engine dials, announces itself on every input socket and only then takes requests."""

from __future__ import annotations

import time

import pytest

from bridge.plugins.sim import versions
from tests.sim.conftest import Start
from tests.sim.front_end import LENGTH, OUTPUTS

READY_032 = {
    *("max_model_len", "num_gpu_blocks", "block_size", "dp_stats_address", "dtype", "vllm_version", "world_size"),
    *("data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size", "decode_context_parallel_size"),
    *("data_parallel_rank", "max_num_seqs", "max_num_batched_tokens", "instance_id", "supports_lora", "max_loras"),
    *("mamba_block_size", "kv_cache_size_tokens", "kv_cache_max_concurrency", "kv_events_config"),
    *("weight_transfer_backend", "enable_sleep_mode", "supports_draft_weight_updates"),
    "effective_attention_block_size",
}


def test_hello_and_ready_are_those_of_a_headless_engine(start: Start) -> None:
    front = start()
    assert front.hello == {"status": "HELLO", "local": False, "headless": True}
    assert front.said_ready == {"status": "READY", "local": False, "headless": True}
    assert set(front.ready[0]) == READY_032
    assert front.ready[0]["vllm_version"] == "0.32.0"


def test_an_index_is_the_identity_and_the_rank(start: Start) -> None:
    front = start(index=0x0102)
    assert front.ready[0]["data_parallel_rank"] == 0x0102
    assert front.ready[0]["data_parallel_size"] == 1, "a dense rank counts itself as the only one"
    front.add("a", [5], {"max_tokens": 1})
    assert front.receive()[0] == 0x0102


def test_every_pair_gets_the_ready_map_and_its_own_outputs(start: Start) -> None:
    front = start(pairs=3)
    assert front.ready[0] == front.ready[1] == front.ready[2]
    for client in (2, 0, 1):
        front.add(f"r{client}", [5, 6], {"max_tokens": 3}, client=client)
        assert front.collect(f"r{client}", client=client)[f"r{client}"].finish == LENGTH


@pytest.mark.parametrize(
    ("version", "output_fields", "message_fields", "ready_keys"),
    [
        ("0.27.0", 14, 8, 18),
        ("0.28.0", 16, 8, 21),
        ("0.29.0", 17, 8, 24),
        ("0.30.0", 17, 8, 24),
        ("0.31.0", 18, 8, 25),
        ("0.32.0", 18, 9, 25),
        ("0.33.0", 19, 9, 28),
    ],
)
def test_a_release_sends_its_own_layout(
    start: Start, version: str, output_fields: int, message_fields: int, ready_keys: int
) -> None:
    front = start("--wire-version", version)
    assert front.ready[0]["vllm_version"] == version
    assert len(front.ready[0]) == ready_keys == len(versions.keys_at(versions.READY_KEYS, versions.parse(version)))
    front.add("a", [5], {"max_tokens": 2})
    message = front.receive()
    assert (len(message), len(message[OUTPUTS][0])) == (message_fields, output_fields)


def test_loading_takes_its_time_and_shows_progress(start: Start) -> None:
    front = start("--load-seconds", "0.6", shake=False)
    front.receive_handshake()
    begun = time.monotonic()
    front.send_init()
    front.engine.wait_for("loading weights: 60 %", 5)
    assert front.receive_handshake()["status"] == "READY"
    assert 0.6 <= time.monotonic() - begun < 3


def test_an_engine_that_dies_while_loading_says_why_and_fails(start: Start) -> None:
    front = start("--load-seconds", "0.2", "--die-while-loading", shake=False)
    front.receive_handshake()
    front.send_init()
    assert front.engine.process.wait(10) == 1
    assert "shard 4 of 5 cannot be read" in front.engine.output()
    assert "Traceback" not in front.engine.output()


def test_no_init_is_one_line_and_a_failure(start: Start) -> None:
    front = start("--init-timeout-s", "0.3", shake=False)
    front.receive_handshake()
    assert front.engine.process.wait(10) == 1
    assert "answered HELLO within 0.3 s" in front.engine.output().splitlines()[-1]


def test_a_coordinator_is_refused(start: Start) -> None:
    front = start(shake=False)
    front.receive_handshake()
    front.send_init(coordinator_input="tcp://127.0.0.1:1")
    assert front.engine.process.wait(10) == 1
    assert "coordinator" in front.engine.output()


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (("--wire-version", "0.26.0"), "0.27.0 to 0.33.0"),
        (("--max-num-seqs", "9000"), "--max-num-batched-tokens"),
        (("--num-gpu-blocks", "5"), "--num-gpu-blocks"),
        (("--fault", "explode"), "explode"),
        (("--fault", "kill@steps"), "needs a number"),
        (("--model-path", "no-such-folder"), "does not exist"),
        (("--eos-token-id", "32000"), "vocabulary"),
    ],
)
def test_a_value_that_cannot_be_is_one_line(start: Start, flags: tuple[str, ...], word: str) -> None:
    front = start(*flags, shake=False)
    assert front.engine.process.wait(10) == 2
    (line,) = front.engine.output().splitlines()
    assert word in line
