"""`vllm.engine.v1` on the simulated engine: the five RPCs, and what was asked of them when they were proposed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from tokenizers import Tokenizer

from bridge.contracts.proto import message
from tests.contracts.asking import engine_v1
from tests.contracts.conftest import Served

PROMPT = [504, 3575, 282, 4649, 314]
LIMIT_S = 30


def request(count: int = 7, **fields: Any) -> Any:
    sampling = {"max_tokens": count, **fields.pop("sampling_params", {})}
    prompt = {} if "prompt_text" in fields else {"prompt_token_ids": PROMPT}
    return engine_v1(**{"request_id": "", **prompt, **fields, "sampling_params": sampling})


def both(served: Served, wanted: Any) -> tuple[Any, list[Any]]:
    """Generate's answer and GenerateStream's messages, which must agree."""
    whole = served.engine_v1.Generate(wanted, timeout=LIMIT_S)
    replies = list(served.engine_v1.GenerateStream(wanted, timeout=LIMIT_S))
    assert [reply.token_id for reply in replies if reply.HasField("token_id")] == list(whole.output_token_ids)
    assert "".join(reply.text_delta for reply in replies) == whole.output_text
    assert [reply.is_finished for reply in replies] == [False] * (len(replies) - 1) + [True]
    assert replies[-1].finish_reason == whole.finish_reason
    return whole, replies


def refused(served: Served, code: grpc.StatusCode, wanted: Any) -> str:
    texts = set()
    for call in (
        served.engine_v1.Generate,
        lambda *given, **more: list(served.engine_v1.GenerateStream(*given, **more)),
    ):
        with pytest.raises(grpc.RpcError) as error:
            call(wanted, timeout=LIMIT_S)
        assert error.value.code() is code, error.value
        texts.add(error.value.details())
    (text,) = texts
    return str(text)


def test_every_token_of_a_step_has_its_message_and_the_last_has_the_text(
    three_a_step: Served, tokenizer: Tokenizer
) -> None:
    whole, replies = both(three_a_step, request(7))
    ids = three_a_step.tokens(PROMPT, 7)
    assert list(whole.output_token_ids) == ids and whole.finish_reason == "length"
    assert len(replies) == 7, "one message a token"
    texts = [reply.text_delta for reply in replies]
    assert {index for index, text in enumerate(texts) if text} <= {2, 5, 6}, "text inside a step"
    assert "".join(texts) == tokenizer.decode(ids)


def test_token_zero_is_a_token(served: Served) -> None:
    reply = message("vllm.engine.v1.GenerateStreamResponse")(token_id=0)
    assert reply.HasField("token_id") and reply.SerializeToString() == b"\x10\x00"


def test_unary_and_stream_carry_the_clients_request_id(served: Served) -> None:
    for stream in (False, True):
        wanted = request(3, request_id="mine")
        if stream:
            assert {reply.request_id for reply in served.engine_v1.GenerateStream(wanted, timeout=LIMIT_S)} == {"mine"}
        else:
            assert served.engine_v1.Generate(wanted, timeout=LIMIT_S).request_id == "mine"
    stream = served.engine_v1.GenerateStream(request(1000, request_id="both"), timeout=LIMIT_S)
    next(stream)
    assert "'both'" in refused(served, grpc.StatusCode.ALREADY_EXISTS, request(3, request_id="both"))
    stream.cancel()


def test_a_rank_beyond_the_group_is_refused(served: Served, two_ranks: Served) -> None:
    text = refused(served, grpc.StatusCode.INVALID_ARGUMENT, request(dp_rank=1))
    assert "dp_rank is 1" in text
    assert "dp_rank is 2" in refused(two_ranks, grpc.StatusCode.INVALID_ARGUMENT, request(dp_rank=2))
    for rank in (0, 1):
        both(two_ranks, request(5, dp_rank=rank))


@pytest.mark.parametrize(("mode", "name"), [(1, "PREFILL_ONLY"), (2, "DECODE_ONLY"), (7, "7")])
def test_other_execution_modes_are_unimplemented(served: Served, mode: int, name: str) -> None:
    text = refused(served, grpc.StatusCode.UNIMPLEMENTED, request(execution_mode=mode))
    assert "execution_mode" in text and name in text


def test_multimodal_data_is_unimplemented(served: Served) -> None:
    item = {"modality_type": "image", "raw_data": b"x", "shape": [1]}
    assert "multimodal_data" in refused(served, grpc.StatusCode.UNIMPLEMENTED, request(multimodal_data=[item]))


def test_waiting_requests_are_the_engines(smollm2: Path, tmp_path: Path) -> None:
    with Served(smollm2, tmp_path / "log", "--max-num-seqs", "2", "--step-ms", "5") as served:
        served.wait_until_serving(30)
        streams = [served.engine_v1.GenerateStream(request(count), timeout=LIMIT_S) for count in (900, 100)]
        for stream in streams:
            next(stream)
        streams += [served.engine_v1.GenerateStream(request(900), timeout=LIMIT_S) for _ in range(3)]
        *_, last = streams[1]
        assert last.is_finished and last.metrics.waiting_requests in (2, 3) and last.metrics.running_requests in (1, 2)
        assert 0 < last.metrics.kv_cache_usage_percent < 100
        for stream in streams:
            stream.cancel()


def test_metrics_of_the_last_message(served: Served) -> None:
    whole, replies = both(served, request(3))
    for metrics in (whole.metrics, replies[-1].metrics):
        assert 0 <= metrics.kv_cache_usage_percent <= 100
    assert not any(reply.HasField("metrics") for reply in replies[:-1])


def test_text_prompts_are_the_fallback(served: Served, tokenizer: Tokenizer) -> None:
    whole, _ = both(served, request(3, prompt_text="The capital of France is"))
    assert list(whole.output_token_ids) == served.tokens(tokenizer.encode("The capital of France is").ids, 3)
    assert "prompt" in refused(served, grpc.StatusCode.INVALID_ARGUMENT, engine_v1())


def test_stop_sequences_and_ids_end_the_answer(served: Served, tokenizer: Tokenizer) -> None:
    ids = served.tokens(PROMPT, 7)
    word = tokenizer.decode([ids[4]])
    whole, _ = both(served, request(7, sampling_params={"stop_sequences": [word]}))
    assert whole.output_text == tokenizer.decode(ids[:4]) and whole.finish_reason == "stop"
    whole, _ = both(served, request(7, sampling_params={"stop_token_ids": [ids[2]]}))
    assert list(whole.output_token_ids) == ids[:3] and whole.output_text == tokenizer.decode(ids[:2])


def test_eos_and_its_ignoring(ending: Served) -> None:
    assert len(both(ending, request(9))[0].output_token_ids) == 5
    assert len(both(ending, request(9, sampling_params={"ignore_eos": True}))[0].output_token_ids) == 9


def test_what_the_engine_would_choke_on_is_refused(served: Served) -> None:
    for sampling, words in (
        ({"temperature": 3.0}, "temperature"),
        ({"top_p": 2.0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"frequency_penalty": 9.0}, "frequency_penalty"),
        ({"seed": 2**63}, "seed"),
    ):
        assert words in refused(served, grpc.StatusCode.INVALID_ARGUMENT, request(sampling_params=sampling))


def test_it_tells_what_the_model_is(served: Served, two_ranks: Served) -> None:
    info = served.engine_v1.GetModelInfo(message("vllm.engine.v1.ModelInfoRequest")(), timeout=5)
    assert (info.model_name, info.max_model_len, info.dp_size, info.block_size) == ("smol", 1024, 1, 16)
    assert list(info.stop_tokens) == ["<|im_end|>"]
    assert two_ranks.engine_v1.GetModelInfo(message("vllm.engine.v1.ModelInfoRequest")(), timeout=5).dp_size == 2


def test_health_and_the_prefix_cache(served: Served) -> None:
    assert served.engine_v1.HealthCheck(message("vllm.engine.v1.HealthCheckRequest")(), timeout=5).status == 1
    served.wait_idle(5)
    reset = served.engine_v1.ResetPrefixCache(message("vllm.engine.v1.EmptyRequest")(), timeout=5)
    assert reset.success and reset.message


def test_stubs_come_from_the_build_and_read_on_the_declared_protobuf() -> None:
    """Nothing generated is under version control, and what the build makes is data without a runtime floor of its own."""
    root = Path(__file__).resolve().parents[2]
    listed = subprocess.run(
        ["git", "ls-files", "bridge/contracts/proto"], cwd=root, capture_output=True, text=True, check=True
    ).stdout.split()
    assert {Path(name).suffix for name in listed} == {".py", ".proto"}
    assert not [name for name in listed if "_pb2" in name]


def test_the_mock_engine_needs_no_vllm() -> None:
    code = (
        "import sys, bridge.plugins.sim.engine; print([name for name in sys.modules if name.split('.')[0] == 'vllm'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
