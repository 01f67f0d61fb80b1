"""`vllm.Control` on the simulated engine."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import grpc
import pytest

from bridge.contracts import proto
from bridge.contracts.vllm_control import NOT_SERVED
from tests.contracts.asking import control, inference
from tests.contracts.conftest import Served

IDS = {"token_ids": {"ids": [5, 6, 7]}, "response": {"output_text": False, "output_token_ids": True}}
KEEP, WAIT, ABORT = 3, 2, 1


def call(served: Served, name: str, **fields: Any) -> Any:
    return getattr(served.control, name)(control(name, **fields), timeout=10)


def test_it_tells_what_the_server_is(served: Served) -> None:
    info = call(served, "GetServerInfo")
    assert (info.engine_version, info.api_version, info.max_model_len) == ("0.32.0", "vllm", 1024)
    parallel = info.parallelism
    assert (parallel.tensor, parallel.pipeline, parallel.data_parallel_size, parallel.world_size) == (1, 1, 1, 1)
    assert (info.kv_block_size, info.total_kv_blocks) == (16, 65536)
    assert (info.max_running_requests, info.max_batched_tokens) == (1024, 8192)
    assert not info.rl_capabilities.weight_transfer_enabled


def test_it_tells_what_the_model_is(served: Served, smollm2: Any) -> None:
    info = call(served, "GetModelInfo")
    assert (info.model_id, info.served_model_name) == (str(smollm2), "smol")
    assert info.supports_text_input and info.supports_token_ids_input
    assert not info.supports_multimodal and not info.supports_lora
    assert not call(served, "GetKvEventSources").sources, "this engine publishes no KV events"


def test_an_abort_of_nothing_and_of_strangers_is_fine(served: Served) -> None:
    call(served, "Abort")
    call(served, "Abort", request_ids=["nobody", ""])
    reply = served.inference.Generate(inference(**IDS, stopping={"max_new_tokens": 3}), timeout=20)
    assert list(reply.outputs.token_ids) == served.tokens([5, 6, 7], 3)


@pytest.mark.parametrize("mode", [KEEP, WAIT])
def test_a_pause_holds_new_requests_until_the_resume(served: Served, mode: int) -> None:
    assert not call(served, "IsPaused").paused
    call(served, "PauseGeneration", mode=mode, clear_cache=False)
    assert call(served, "IsPaused").paused
    answers: list[Any] = []
    asking = threading.Thread(
        target=lambda: answers.append(
            served.inference.Generate(inference(**IDS, stopping={"max_new_tokens": 3}), timeout=20)
        )
    )
    asking.start()
    asking.join(0.3)
    assert asking.is_alive(), "a paused engine answered"
    call(served, "ResumeGeneration")
    asking.join(20)
    assert not call(served, "IsPaused").paused
    assert list(answers[0].outputs.token_ids) == served.tokens([5, 6, 7], 3)


def test_a_pause_that_aborts_ends_what_runs(served: Served) -> None:
    stream = served.inference.GenerateStream(inference(**IDS, stopping={"max_new_tokens": 1000}), timeout=20)
    next(stream)
    call(served, "PauseGeneration", mode=ABORT)
    *_, last = stream
    assert last.outputs.finish_info.finish_reason == 3
    call(served, "ResumeGeneration")


def test_weight_versions_are_set_and_told(served: Served) -> None:
    assert call(served, "GetWeightVersion").weight_version == "default"
    call(served, "UpdateWeightVersion", weight_version="v2")
    assert call(served, "GetWeightVersion").weight_version == "v2"
    call(served, "UpdateWeightVersion", weight_version="default")


@pytest.mark.parametrize("level", [0, 1])
def test_an_engine_sleeps_and_wakes(served: Served, level: int) -> None:
    assert call(served, "GetServerInfo").rl_capabilities.sleep_mode_enabled
    assert not call(served, "IsSleeping").sleeping
    call(served, "Sleep", level=level)
    assert call(served, "IsSleeping").sleeping
    call(served, "WakeUp")
    assert not call(served, "IsSleeping").sleeping
    answer = served.inference.Generate(inference(**IDS, stopping={"max_new_tokens": 3}), timeout=20)
    assert list(answer.outputs.token_ids) == served.tokens([5, 6, 7], 3)


@pytest.mark.parametrize("name", ["LoadLora", "UnloadLora", "ListLoras"])
def test_adapters_need_an_engine_that_can(served: Served, name: str) -> None:
    with pytest.raises(grpc.RpcError) as error:
        call(served, name)
    assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION and "LoRA" in str(error.value.details())


def test_adapters_are_loaded_used_listed_and_unloaded(smollm2: Path, tmp_path: Path) -> None:
    with Served(smollm2, tmp_path / "log", "--enable-lora", "--step-ms", "2") as served:
        served.wait_until_serving(30)
        assert call(served, "GetModelInfo").supports_lora and call(served, "GetServerInfo").max_loras == 8
        assert not call(served, "ListLoras").adapters
        source = str(tmp_path)
        adapter = call(served, "LoadLora", lora_name="mine", source_path=source).adapter
        assert (adapter.lora_name, adapter.source_path) == ("mine", source) and adapter.lora_id > 0
        assert call(served, "LoadLora", lora_name="mine", source_path=source).adapter == adapter
        assert list(call(served, "ListLoras").adapters) == [adapter]
        answer = served.inference.Generate(
            inference(**IDS, lora_name="mine", stopping={"max_new_tokens": 3}), timeout=20
        )
        assert answer.outputs.num_tokens
        for name, fields, code in (
            ("LoadLora", {"lora_name": "mine", "source_path": "/elsewhere"}, "ALREADY_EXISTS"),
            ("LoadLora", {"lora_name": "other", "source_path": f"{source}/none"}, "FAILED_PRECONDITION"),
            ("LoadLora", {"lora_name": "other"}, "INVALID_ARGUMENT"),
            ("UnloadLora", {}, "INVALID_ARGUMENT"),
            ("UnloadLora", {"lora_name": "other"}, "NOT_FOUND"),
        ):
            with pytest.raises(grpc.RpcError) as error:
                call(served, name, **fields)
            assert error.value.code().name == code, error.value
        assert call(served, "UnloadLora", lora_name="mine").adapter == adapter
        with pytest.raises(grpc.RpcError) as error:
            served.inference.Generate(inference(**IDS, lora_name="mine", stopping={"max_new_tokens": 3}), timeout=20)
        assert error.value.code() is grpc.StatusCode.NOT_FOUND and "'mine'" in str(error.value.details())


@pytest.mark.parametrize("name", sorted(NOT_SERVED))
def test_what_is_not_served_is_refused_by_name(served: Served, name: str) -> None:
    with pytest.raises(grpc.RpcError) as error:
        call(served, name)
    assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert str(error.value.details()).startswith(f"{name} is not served")


def test_wrong_values_are_refused_by_name(served: Served) -> None:
    for name, fields, words in (
        ("PauseGeneration", {"mode": 9}, "mode is 9"),
        ("Sleep", {"level": 3}, "level is 3"),
        ("UpdateWeightVersion", {}, "weight_version is ''"),
    ):
        with pytest.raises(grpc.RpcError) as error:
            call(served, name, **fields)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT and words in str(error.value.details())


def test_every_method_of_the_proto_is_there(served: Served) -> None:
    for name, _, _ in proto.methods("vllm.Control"):
        try:
            call(served, name)
        except grpc.RpcError as error:
            assert "unknown method" not in str(error.details()).lower(), name
    call(served, "ResumeGeneration")
