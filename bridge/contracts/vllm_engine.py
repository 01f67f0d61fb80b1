"""`vllm.grpc.engine.VllmEngine`: the contract SMG speaks to a vLLM worker, on the neutral core.

What a zero means here (only temperature, max_tokens, logprobs, prompt_logprobs, seed and truncate_prompt_tokens have
presence): top_p 0, top_k 0, min_p 0, the penalties' 0 and n 0 are "unset", and an unset value is the model's
generation-config default, else the engine's own.

Rulings: chunk counters are cumulative; `complete` repeats everything; output ids are as the engine made them, EOS
included; matched_stop names only what the request itself gave.
"""

from __future__ import annotations

import asyncio
import datetime
import os
import time
from collections.abc import AsyncGenerator, Iterable
from functools import partial
from typing import Any

from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from bridge.contracts.context import Context
from bridge.engine import State
from bridge.grpc.call import Call
from bridge.grpc.service import Method
from bridge.grpc.status import CancelReason, Code, GrpcError
from bridge.guard import Ask
from bridge.refusal import Refusal, invalid, unsupported
from bridge.requests import Request, Sequence
from bridge.varint import VARINT
from bridge.wire.codec import Finish, GenerateCall

NAME = "vllm.grpc.engine.VllmEngine"

FLUSH_POLL_S = 0.05
"""How often FlushCache looks whether the engine is idle while it waits."""

Reply = pb.GenerateResponse
_FINISH = {Finish.STOP: "stop", Finish.LENGTH: "length", Finish.ABORT: "abort", Finish.ERROR: "error"}


class GenerateSink:
    """Renders one Generate call. Plain chunks are byte templates; everything else goes through protobuf."""

    __slots__ = ("_call", "_prompt")

    def __init__(self, call: Call, prompt_tokens: int) -> None:
        self._call = call
        self._prompt = b"\x10" + VARINT[prompt_tokens]

    def chunk(self, sequence: Sequence, tokens: list[int]) -> None:
        varint = VARINT
        ids = varint[tokens[0]] if len(tokens) == 1 else b"".join([varint[token] for token in tokens])
        cached = sequence.cached_tokens
        body = b"\x0a%b%b%b\x18%b%b" % (
            varint[len(ids)],
            ids,
            self._prompt,
            varint[sequence.sent],
            b"\x20" + varint[cached] if cached else b"",
        )
        self._call.send(b"\x0a%b%b" % (varint[len(body)], body))

    def complete(self, sequence: Sequence) -> None:
        assert sequence.finish is not None
        complete = pb.GenerateComplete(
            output_ids=sequence.output_ids,
            finish_reason=_FINISH[sequence.finish],
            prompt_tokens=sequence.request.prompt_tokens,
            completion_tokens=len(sequence.output_ids),
            cached_tokens=sequence.cached_tokens,
            index=sequence.index,
        )
        if sequence.stop_id is not None:
            complete.matched_token_id = sequence.stop_id
        self._call.send(Reply(complete=complete).SerializeToString())

    def close(self) -> None:
        self._call.finish()

    def fail(self, code: Code, message: str) -> None:
        self._call.finish(code, message)


class VllmEngine:
    """The service. One instance a front end."""

    name = NAME

    def __init__(self, context: Context) -> None:
        self._context = context
        self._engine = context.engine

    def methods(self) -> Iterable[Method]:
        common = common_pb2
        yield Method(f"/{NAME}/Generate", "raw_stream", pb.GenerateRequest, self.generate)
        yield Method(f"/{NAME}/Embed", "unary", pb.EmbedRequest, self.embed)
        yield Method(f"/{NAME}/HealthCheck", "unary", pb.HealthCheckRequest, self.health_check)
        yield Method(f"/{NAME}/Abort", "unary", pb.AbortRequest, self.abort)
        yield Method(f"/{NAME}/GetModelInfo", "unary", pb.GetModelInfoRequest, self.get_model_info)
        yield Method(f"/{NAME}/GetServerInfo", "unary", pb.GetServerInfoRequest, self.get_server_info)
        yield Method(f"/{NAME}/GetLoads", "unary", pb.GetLoadsRequest, self.get_loads)
        yield Method(f"/{NAME}/FlushCache", "unary", common.FlushCacheRequest, self.flush_cache)
        yield Method(f"/{NAME}/StartProfile", "unary", common.StartProfileRequest, self.start_profile)
        yield Method(f"/{NAME}/StopProfile", "unary", common.StopProfileRequest, self.stop_profile)
        yield Method(f"/{NAME}/GetTokenizer", "stream", common.GetTokenizerRequest, self.get_tokenizer)
        yield Method(f"/{NAME}/SubscribeKvEvents", "stream", common.SubscribeKvEventsRequest, self.subscribe_kv_events)

    # -- generation --------------------------------------------------------------------------------------------------

    def generate(self, message: pb.GenerateRequest, call: Call) -> None:
        arrived = time.time()
        self._engine.table  # noqa: B018  (refuses unless up)
        _refuse_unsupported(message)
        match message.WhichOneof("input"):
            case "tokenized":
                self._submit(message, call, list(message.tokenized.input_ids), arrived)
            case "text":
                task = asyncio.ensure_future(self._submit_text(message, call, arrived))
                call.on_cancel = partial(_cancel_task, task)
            case _:
                raise Refusal(Code.INVALID_ARGUMENT, "input is unset; give tokenized.input_ids or text")

    async def _submit_text(self, message: pb.GenerateRequest, call: Call, arrived: float) -> None:
        try:
            ids = await self._context.text.encode(message.text)
            call.on_cancel = None
            self._submit(message, call, ids, arrived)
        except GrpcError as error:
            call.fail(error)
        except Exception:
            call.finish(Code.INTERNAL, "the text prompt could not be submitted; see the bridge's log")
            raise
        finally:
            call.connection.flush()

    def _submit(self, message: pb.GenerateRequest, call: Call, ids: list[int], arrived: float) -> None:
        engine = self._engine
        sampling = self._context.guard.check(ids, _ask(message.sampling_params))
        pin = message.data_parallel_rank if message.HasField("data_parallel_rank") else None
        rank = engine.choose_rank() if pin is None else engine.pinned_rank("data_parallel_rank", pin)
        request = Request(
            message.request_id,
            len(ids),
            call,
            GenerateSink(call, len(ids)),
            stream=message.stream,
            stop_ids=sampling.stop_token_ids,
            arrived=arrived,
        )
        engine.generate(
            request, rank, GenerateCall(wire_id="", prompt_token_ids=ids, sampling=sampling, arrival_time=arrived)
        )
        table = engine.table
        call.on_cancel = lambda reason: table.cancel(request)
        call.on_writable = partial(table.resume, request)

    async def embed(self, message: pb.EmbedRequest, call: Call) -> pb.EmbedResponse:
        raise Refusal(Code.UNIMPLEMENTED, "Embed is not served: this bridge runs generation models only")

    async def abort(self, message: pb.AbortRequest, call: Call) -> pb.AbortResponse:
        table = self._engine.table
        for request_id in message.request_ids:
            table.abort(request_id)
        return pb.AbortResponse()

    # -- facts -------------------------------------------------------------------------------------------------------

    async def health_check(self, message: pb.HealthCheckRequest, call: Call) -> pb.HealthCheckResponse:
        engine = self._engine
        if self._context.draining:
            return pb.HealthCheckResponse(healthy=False, message="shutting down")
        if engine.state is State.UP:
            return pb.HealthCheckResponse(healthy=True, message="serving")
        return pb.HealthCheckResponse(healthy=False, message=f"{engine.state.value}: {engine.detail}")

    async def get_model_info(self, message: pb.GetModelInfoRequest, call: Call) -> pb.GetModelInfoResponse:
        facts = self._engine.facts
        limit = self._context.guard.max_model_len
        return pb.GetModelInfoResponse(
            model_path=facts.model_path,
            is_generation=facts.is_generation,
            max_context_length=limit,
            vocab_size=facts.vocab_size,
            supports_vision=facts.supports_vision,
            served_model_name=facts.served_model_name,
            tokenizer_path=facts.tokenizer_path,
            model_type=facts.model_type,
            architectures=facts.architectures,
            eos_token_ids=facts.eos_token_ids,
            pad_token_id=facts.pad_token_id or 0,
            bos_token_id=facts.bos_token_id or 0,
            max_req_input_len=max(limit - 1, 0),
            default_sampling_params_json=self._context.default_sampling_json,
        )

    async def get_server_info(self, message: pb.GetServerInfoRequest, call: Call) -> pb.GetServerInfoResponse:
        engine = self._engine
        facts = engine.facts
        ready = engine.ranks[0].ready
        return pb.GetServerInfoResponse(
            active_requests=engine.active_requests,
            is_paused=False,
            last_receive_timestamp=engine.last_receive_at,
            uptime_seconds=time.time() - engine.started_at,
            server_type="vllm-grpc",
            kv_connector=facts.kv_connector,
            kv_role=facts.kv_role,
            kv_engine_id=facts.kv_engine_id,
            data_parallel_size=len(engine.ranks),
            shm_namespace_id=shm_namespace(),
            kv_cache_dtype=facts.kv_cache_dtype,
            block_size=ready.get("block_size") or 0,
            attention_backend=facts.attention_backend,
            model_dtype=facts.model_dtype,
            pairing_protocol=os.environ.get("SMG_PAIRING_PROTOCOL", ""),
            max_num_seqs=ready.get("max_num_seqs") or 0,
            engine_reasoning_parser=facts.reasoning_parser,
            constrained_decoding_start=facts.constrained_decoding_start,
        )

    async def get_loads(self, message: pb.GetLoadsRequest, call: Call) -> pb.GetLoadsResponse:
        engine = self._engine
        table = engine.table
        wanted = message.dp_rank if message.HasField("dp_rank") else None
        if wanted is not None:
            engine.pinned_rank("dp_rank", wanted)
        loads = []
        rate = engine.tokens_per_second() / len(engine.ranks)
        for rank in engine.ranks:
            if wanted is not None and rank.index != wanted:
                continue
            load, ready = rank.load, rank.ready
            capacity = ready.get("kv_cache_size_tokens") or (
                (ready.get("num_gpu_blocks") or 0) * (ready.get("block_size") or 0)
            )
            seats = ready.get("max_num_seqs") or 0
            loads.append(
                pb.SchedulerLoad(
                    dp_rank=rank.index,
                    num_running_reqs=load.running,
                    num_waiting_reqs=load.waiting,
                    num_total_reqs=load.running + load.waiting,
                    num_used_tokens=round(load.kv_cache_usage * capacity),
                    max_total_num_tokens=capacity,
                    token_usage=load.kv_cache_usage,
                    gen_throughput=rate,
                    cache_hit_rate=rank.hits / rank.queries if rank.queries else 0.0,
                    utilization=load.running / seats if seats else 0.0,
                    max_running_requests=seats,
                    num_waiting_uncached_tokens=table.waiting_prompt_tokens.get(rank.identity, 0),
                )
            )
        return pb.GetLoadsResponse(
            timestamp=datetime.datetime.now(datetime.UTC).isoformat(),
            version=engine.facts.engine_version,
            dp_rank_count=len(engine.ranks),
            loads=loads,
        )

    # -- operations --------------------------------------------------------------------------------------------------

    async def flush_cache(self, message: common_pb2.FlushCacheRequest, call: Call) -> common_pb2.FlushCacheResponse:
        engine = self._engine
        if message.timeout_s < 0:
            raise invalid("timeout_s", message.timeout_s, "0 or more seconds")
        until = time.monotonic() + message.timeout_s
        while len(engine.table):
            if time.monotonic() >= until:
                return common_pb2.FlushCacheResponse(
                    success=False, message=f"{len(engine.table)} requests are running; wait longer with timeout_s"
                )
            await asyncio.sleep(FLUSH_POLL_S)
        replies = await engine.utility("reset_prefix_cache", (False, False))
        failures = [reply.failure or "the engine's blocks are in use" for reply in replies if reply.value is not True]
        if failures:
            return common_pb2.FlushCacheResponse(success=False, message="; ".join(failures))
        return common_pb2.FlushCacheResponse(success=True, message="prefix cache reset")

    async def start_profile(self, message: common_pb2.StartProfileRequest, call: Call) -> common_pb2.ProfileResponse:
        for field, value in message.ListFields():
            raise invalid(field.name, value, "unset: vLLM fixes profiler options when the engine is launched")
        return await self._profile(start=True)

    async def stop_profile(self, message: common_pb2.StopProfileRequest, call: Call) -> common_pb2.ProfileResponse:
        return await self._profile(start=False)

    async def _profile(self, *, start: bool) -> common_pb2.ProfileResponse:
        replies = await self._engine.utility("profile", (start,), timeout_s=300.0)
        failures = [reply.failure for reply in replies if reply.failure is not None]
        done = "profiler started" if start else "profiler stopped"
        return common_pb2.ProfileResponse(success=not failures, message="; ".join(failures) or done)

    async def get_tokenizer(
        self, message: common_pb2.GetTokenizerRequest, call: Call
    ) -> AsyncGenerator[common_pb2.GetTokenizerChunk, None]:
        archive, digest = await self._context.tokenizer_archive()
        step = self._context.TOKENIZER_CHUNK
        for start in range(0, len(archive), step):
            end = start + step
            yield common_pb2.GetTokenizerChunk(data=archive[start:end], sha256=digest if end >= len(archive) else "")

    async def subscribe_kv_events(
        self, message: common_pb2.SubscribeKvEventsRequest, call: Call
    ) -> AsyncGenerator[common_pb2.KvEventBatch, None]:
        raise Refusal(Code.UNIMPLEMENTED, "SubscribeKvEvents is not served; poll GetLoads")
        yield


def _cancel_task(task: asyncio.Future[None], reason: CancelReason) -> None:
    task.cancel()


def _refuse_unsupported(message: pb.GenerateRequest) -> None:
    """Refuse by name what a request asks for and this contract does not do yet."""
    why = "this bridge does not support it yet"
    for field in ("mm_inputs", "extra_mm_inputs", "media_refs"):
        if _present(message, field):
            raise unsupported(field, "set", "media inputs are not supported; send text or token ids only")
    for field in ("kv_transfer_params", "kv_transfer_params_json"):
        if _present(message, field):
            raise unsupported(field, "set", "prefill/decode transfer is not supported")
    params = message.sampling_params
    if params.n > 1:
        raise unsupported("sampling_params.n", params.n, "only one sample a request is supported")
    for field in ("stop", "logit_bias"):
        if _present(params, field):
            raise unsupported(f"sampling_params.{field}", _plain(getattr(params, field)), why)
    for field in ("logprobs", "prompt_logprobs", "truncate_prompt_tokens"):
        if params.HasField(field):
            raise unsupported(f"sampling_params.{field}", getattr(params, field), why)
    for field in ("include_stop_str_in_output", "grammar_from_first_token"):
        if getattr(params, field):
            raise unsupported(f"sampling_params.{field}", True, why)
    constraint = params.WhichOneof("constraint")
    if constraint is not None:
        raise unsupported(f"sampling_params.{constraint}", "set", "structured outputs are not supported yet")


def _present(message: Any, field: str) -> bool:
    descriptor = message.DESCRIPTOR.fields_by_name[field]
    return bool(getattr(message, field)) if descriptor.is_repeated else bool(message.HasField(field))


def _plain(value: Any) -> Any:
    return dict(value) if hasattr(value, "items") else list(value)


def _ask(params: pb.SamplingParams) -> Ask:
    """The contract's values in neutral words: None where the contract's zero means "unset"."""
    return Ask(
        temperature=params.temperature if params.HasField("temperature") else None,
        top_p=params.top_p or None,
        top_k=params.top_k or None,
        min_p=params.min_p or None,
        frequency_penalty=params.frequency_penalty or None,
        presence_penalty=params.presence_penalty or None,
        repetition_penalty=params.repetition_penalty or None,
        max_tokens=params.max_tokens if params.HasField("max_tokens") else None,
        min_tokens=params.min_tokens or None,
        seed=params.seed if params.HasField("seed") else None,
        ignore_eos=params.ignore_eos,
        stop_token_ids=list(params.stop_token_ids),
    )


def shm_namespace() -> str:
    """`<boot_id>:<st_dev of /dev/shm>`, so that a gateway can tell whether it shares memory with us; "" if unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()}:{os.stat('/dev/shm').st_dev}"
    except OSError:
        return ""
