"""A real vLLM engine behind the bridge, asked by grpcio clients."""

from __future__ import annotations

import hashlib
import io
import zipfile

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as pb_grpc
from tokenizers import Tokenizer

from tests.gateways import chat_text
from tests.running import Worker

PARIS = "What is the capital of France?"


def request(ids: list[int], *, stream: bool = True, request_id: str = "", **sampling: object) -> pb.GenerateRequest:
    params = pb.SamplingParams(**{"temperature": 0.0, "max_tokens": 24, **sampling})
    return pb.GenerateRequest(
        request_id=request_id, tokenized=pb.TokenizedInput(input_ids=ids), sampling_params=params, stream=stream
    )


def test_streamed_and_whole_answers_are_the_same_and_say_paris(served: Worker, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(chat_text(PARIS)).ids
    *chunks, last = served.stub.Generate(request(ids), timeout=60)
    (whole,) = served.stub.Generate(request(ids, stream=False), timeout=60)
    streamed = [token for reply in chunks for token in reply.chunk.token_ids]
    assert "Paris" in tokenizer.decode(streamed)
    assert streamed == list(last.complete.output_ids) == list(whole.complete.output_ids)
    assert last.complete.finish_reason == "stop"
    assert not last.complete.HasField("matched_token_id"), "EOS is never a matched stop"
    counts = [reply.chunk.completion_tokens for reply in chunks]
    assert counts == sorted(counts) and counts[-1] == len(streamed) == last.complete.completion_tokens
    assert {reply.chunk.prompt_tokens for reply in chunks} == {len(ids)} == {last.complete.prompt_tokens}


async def test_the_aio_client_streams_the_same(served: Worker, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(chat_text(PARIS)).ids
    async with grpc.aio.insecure_channel(served.address) as channel:
        stub = pb_grpc.VllmEngineStub(channel)
        replies = [reply async for reply in stub.Generate(request(ids), timeout=60)]
    assert "Paris" in tokenizer.decode(list(replies[-1].complete.output_ids))


def test_text_is_tokenized_with_the_models_tokenizer(served: Worker, tokenizer: Tokenizer) -> None:
    text = chat_text(PARIS)
    by_text = request([], stream=False)
    by_text.text = text
    (answer,) = served.stub.Generate(by_text, timeout=60)
    (same,) = served.stub.Generate(request(tokenizer.encode(text).ids, stream=False), timeout=60)
    assert answer.complete == same.complete


def test_a_stop_token_id_ends_the_answer_and_is_named(served: Worker, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(chat_text(PARIS)).ids
    (free,) = served.stub.Generate(request(ids, stream=False), timeout=60)
    stop = free.complete.output_ids[3]
    (stopped,) = served.stub.Generate(request(ids, stream=False, stop_token_ids=[stop]), timeout=60)
    assert list(stopped.complete.output_ids) == list(free.complete.output_ids[:4])
    assert (stopped.complete.finish_reason, stopped.complete.matched_token_id) == ("stop", stop)


def test_a_client_that_disconnects_frees_the_engine_within_a_second(served: Worker, tokenizer: Tokenizer) -> None:
    served.wait_idle(5)
    call = served.stub.Generate(request(tokenizer.encode("Count:").ids, max_tokens=900, ignore_eos=True))
    for _, _ in zip(range(3), call, strict=False):
        pass
    assert served.running() == 1
    call.cancel()
    assert served.wait_idle(1.0) <= 1.0


def test_abort_ends_the_stream_with_what_it_has(served: Worker, tokenizer: Tokenizer) -> None:
    call = served.stub.Generate(
        request(tokenizer.encode("Count:").ids, request_id="to-abort", max_tokens=900, ignore_eos=True)
    )
    tokens = [token for _, reply in zip(range(3), call, strict=False) for token in reply.chunk.token_ids]
    served.stub.Abort(pb.AbortRequest(request_ids=["to-abort", "never-seen"]), timeout=5)
    *chunks, last = call
    tokens += [token for reply in chunks for token in reply.chunk.token_ids]
    assert last.complete.finish_reason == "abort"
    assert list(last.complete.output_ids) == tokens
    served.wait_idle(1.0)


def test_a_deadline_ends_the_request_here_and_in_the_engine(served: Worker, tokenizer: Tokenizer) -> None:
    call = served.stub.Generate(request(tokenizer.encode("Count:").ids, max_tokens=900, ignore_eos=True), timeout=0.5)
    with pytest.raises(grpc.RpcError) as error:
        list(call)
    assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    served.wait_idle(1.0)


def test_a_live_duplicate_id_is_refused_and_the_first_goes_on(served: Worker, tokenizer: Tokenizer) -> None:
    asked = request(tokenizer.encode("Count:").ids, request_id="twin", max_tokens=40, ignore_eos=True)
    first = served.stub.Generate(asked, timeout=60)
    next(first)
    with pytest.raises(grpc.RpcError) as error:
        list(served.stub.Generate(asked, timeout=60))
    assert error.value.code() is grpc.StatusCode.ALREADY_EXISTS
    *_, last = first
    assert len(last.complete.output_ids) == 40


@pytest.mark.parametrize(
    ("sampling", "field", "limit"),
    [
        ({"temperature": -1.0}, "temperature", "at least 0"),
        ({"temperature": float("nan")}, "temperature", "number"),
        ({"top_p": 1.5}, "top_p", "at most 1"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"min_tokens": 30, "max_tokens": 20}, "min_tokens", "at most"),
        ({"presence_penalty": 2.5}, "presence_penalty", "at most 2"),
        ({"stop_token_ids": [49152]}, "stop_token_ids", "49152"),
    ],
)
def test_a_value_vllm_would_choke_on_is_refused_by_name(
    served: Worker, sampling: dict[str, object], field: str, limit: str
) -> None:
    with pytest.raises(grpc.RpcError) as error:
        list(served.stub.Generate(request([1, 2, 3], **sampling), timeout=30))
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field in error.value.details() and limit in error.value.details()


@pytest.mark.parametrize("ids", [[], [49152], [1] * 1024], ids=["empty", "outside the vocabulary", "no room"])
def test_a_prompt_that_kills_vllm_is_refused(served: Worker, ids: list[int]) -> None:
    with pytest.raises(grpc.RpcError) as error:
        list(served.stub.Generate(request(ids), timeout=30))
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    (after,) = served.stub.Generate(request([1, 2, 3], stream=False, max_tokens=1), timeout=30)
    assert after.complete.finish_reason == "length"


def test_max_tokens_beyond_the_context_is_clamped_to_it(served: Worker) -> None:
    (answer,) = served.stub.Generate(request([1] * 1000, stream=False, max_tokens=100000, ignore_eos=True), timeout=60)
    assert (answer.complete.completion_tokens, answer.complete.finish_reason) == (24, "length")


def test_media_and_foreign_transfers_are_refused_by_name(served: Worker) -> None:
    with_media = request([1, 2, 3])
    with_media.mm_inputs.im_token_id = 5
    with_transfer = request([1, 2, 3])
    with_transfer.kv_transfer_params_json = "{}"
    for asked, code, field in (
        (with_media, grpc.StatusCode.UNIMPLEMENTED, "mm_inputs"),
        (with_transfer, grpc.StatusCode.FAILED_PRECONDITION, "kv_transfer_params_json"),
    ):
        with pytest.raises(grpc.RpcError) as error:
            list(served.stub.Generate(asked, timeout=30))
        assert error.value.code() is code and field in error.value.details()


def test_a_generation_model_does_not_embed(served: Worker) -> None:
    with pytest.raises(grpc.RpcError) as error:
        served.stub.Embed(pb.EmbedRequest(tokenized=pb.TokenizedInput(input_ids=[1, 2])), timeout=5)
    assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION


def test_truncation_keeps_the_end_of_the_prompt(served: Worker) -> None:
    ids = list(range(100, 160))
    (cut,) = served.stub.Generate(request(ids, stream=False, truncate_prompt_tokens=7), timeout=60)
    (same,) = served.stub.Generate(request(ids[-7:], stream=False), timeout=60)
    assert cut.complete == same.complete and cut.complete.prompt_tokens == 7
    (whole,) = served.stub.Generate(
        request([1] * 2000, stream=False, truncate_prompt_tokens=-1, ignore_eos=True), timeout=60
    )
    assert (whole.complete.prompt_tokens, whole.complete.completion_tokens) == (1023, 1)


def test_model_info_reports_the_model(served: Worker, smollm2: object) -> None:
    info = served.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=5)
    assert info.served_model_name == "smol"
    assert (info.vocab_size, info.max_context_length, info.max_req_input_len) == (49152, 1024, 1023)
    assert list(info.eos_token_ids) == [2]
    assert list(info.architectures) == ["LlamaForCausalLM"]
    assert info.is_generation and not info.supports_vision
    assert info.model_path == str(smollm2)


def test_server_info_and_loads_report_the_engine(served: Worker) -> None:
    info = served.stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=5)
    assert (info.server_type, info.data_parallel_size, info.max_num_seqs) == ("vllm-grpc", 1, 8)
    assert info.uptime_seconds > 0 and info.block_size > 0 and ":" in info.shm_namespace_id
    assert info.model_dtype.endswith("float32")
    loads = served.stub.GetLoads(pb.GetLoadsRequest(), timeout=5)
    assert loads.dp_rank_count == 1 and loads.version.startswith("0.32")
    assert loads.loads[0].max_running_requests == 8 and loads.loads[0].max_total_num_tokens > 0
    with pytest.raises(grpc.RpcError) as error:
        served.stub.GetLoads(pb.GetLoadsRequest(dp_rank=1), timeout=5)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_the_tokenizer_arrives_whole(served: Worker, tokenizer: Tokenizer) -> None:
    chunks = list(served.stub.GetTokenizer(common_pb2.GetTokenizerRequest(), timeout=30))
    archive = b"".join(chunk.data for chunk in chunks)
    assert [bool(chunk.sha256) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert all(len(chunk.data) <= 64 * 1024 for chunk in chunks)
    assert chunks[-1].sha256 == hashlib.sha256(archive).hexdigest()
    with zipfile.ZipFile(io.BytesIO(archive)) as files:
        assert "tokenizer.json" in files.namelist() and "config.json" in files.namelist()
        again = Tokenizer.from_str(files.read("tokenizer.json").decode())
    assert again.encode("Paris").ids == tokenizer.encode("Paris").ids


def test_flush_cache_fails_while_busy_and_succeeds_when_idle(served: Worker, tokenizer: Tokenizer) -> None:
    call = served.stub.Generate(request(tokenizer.encode("Count:").ids, max_tokens=900, ignore_eos=True))
    next(call)
    busy = served.stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=0), timeout=5)
    assert not busy.success and "running" in busy.message
    call.cancel()
    assert served.stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=5), timeout=10).success


def test_a_cached_prefix_is_reported_until_the_cache_is_flushed(served: Worker, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("The quick brown fox jumps over the lazy dog. " * 40).ids
    cached = []
    for flush in (True, False, True):
        if flush:
            assert served.stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=5), timeout=10).success
        (answer,) = served.stub.Generate(request(ids, stream=False, max_tokens=1), timeout=30)
        cached.append(answer.complete.cached_tokens)
    assert cached[0] == 0 and cached[1] > 0 and cached[2] == 0


def test_the_profiler_answers_with_the_engines_own_words(served: Worker) -> None:
    reply = served.stub.StartProfile(common_pb2.StartProfileRequest(), timeout=30)
    assert not reply.success and "profil" in reply.message.lower()
    with pytest.raises(grpc.RpcError) as error:
        served.stub.StartProfile(common_pb2.StartProfileRequest(num_steps=5), timeout=5)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT and "num_steps" in error.value.details()


def test_kv_events_are_refused_so_that_gateways_poll(served: Worker) -> None:
    with pytest.raises(grpc.RpcError) as error:
        list(served.stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(), timeout=5))
    assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_eight_streams_at_once_each_get_all_their_tokens_in_order(served: Worker, tokenizer: Tokenizer) -> None:
    prompts = [tokenizer.encode(f"{number} bottles of beer on the wall,").ids for number in range(8)]
    calls = [
        served.stub.Generate(request(ids, max_tokens=16 + number), timeout=120) for number, ids in enumerate(prompts)
    ]
    for number, call in enumerate(calls):
        *chunks, last = call
        tokens = [token for reply in chunks for token in reply.chunk.token_ids]
        assert tokens == list(last.complete.output_ids)
        assert len(tokens) == 16 + number or tokens[-1] == 2
        assert last.complete.prompt_tokens == len(prompts[number])
