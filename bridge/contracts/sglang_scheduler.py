"""`sglang.grpc.scheduler.SglangScheduler`: the contract SMG speaks to an SGLang worker.

What its zeros mean: `sglang_request.py`.

The model's own sampling defaults are not applied: GetModelInfo reports them and gateways do. Stop strings, EOS ids and
constraints are the scheduler's: it has its tokenizer and refuses what it cannot compile.

Rulings: chunk counters are cumulative; `complete` repeats everything; output ids are as the engine made them, EOS
included; matched_stop names only what the request itself gave; every error is a gRPC status.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from functools import partial
from typing import Any

import msgspec
from google.protobuf.timestamp_pb2 import Timestamp
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb

from bridge.contracts import amounts
from bridge.contracts.amounts import at_most
from bridge.contracts.context import Context
from bridge.contracts.sglang_loads import aggregate_of, load_of, sections_of
from bridge.contracts.sglang_render import PlainSink, RichSink
from bridge.contracts.sglang_request import (
    CALLED,
    ask_of,
    check_processor,
    constraint_of,
    custom_params_of,
    prompt_logprobs_start,
    refuse_excess,
    rich_of,
    transfer_of,
)
from bridge.contracts.vllm_render import EmbedSink
from bridge.engine import State
from bridge.grpc.call import Call
from bridge.grpc.service import Method, Rest
from bridge.grpc.status import Code
from bridge.prompt import kept_ids, wire_ids
from bridge.refusal import Refusal, invalid, unsupported
from bridge.requests import EngineCall, Request, Rich
from bridge.wire.codec import EmbedCall, GenerateCall, Reply
from bridge.wire.sglang.requests import NO_PROMPT_LOGPROBS, EmbedNative, Native
from bridge.wire.sglang.sampling import Stops

NAME = "sglang.grpc.scheduler.SglangScheduler"

PROCESSOR_CHARACTERS = 1 << 20
FLUSH_S = 30.0
"""Least that the scheduler gets to answer FlushCache."""
PROFILE_S = 300.0


class SglangScheduler:
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
        yield Method(f"/{NAME}/FlushCache", "unary", common.FlushCacheRequest, self.flush_cache, admin=True)
        yield Method(f"/{NAME}/StartProfile", "unary", common.StartProfileRequest, self.start_profile, admin=True)
        yield Method(f"/{NAME}/StopProfile", "unary", common.StopProfileRequest, self.stop_profile, admin=True)
        yield Method(f"/{NAME}/GetTokenizer", "stream", common.GetTokenizerRequest, self.get_tokenizer)
        yield Method(f"/{NAME}/SubscribeKvEvents", "stream", common.SubscribeKvEventsRequest, self.subscribe_kv_events)
        for method, request in (
            ("LoadLoRAAdapter", pb.LoadLoRAAdapterRequest),
            ("UnloadLoRAAdapter", pb.UnloadLoRAAdapterRequest),
            ("ListLoadedLoRAAdapters", pb.ListLoadedLoRAAdaptersRequest),
        ):
            yield Method(f"/{NAME}/{method}", "unary", request, partial(_refuse_adapters, method), admin=True)

    # -- generation --------------------------------------------------------------------------------------------------

    def generate(self, message: pb.GenerateRequest, call: Call) -> Rest | None:
        arrived, engine, guard = time.time(), self._engine, self._context.guard
        engine.table  # noqa: B018  (refuses unless up)
        call.request_id = message.request_id
        refuse_excess(message)
        self._refuse_unsupported(message)
        given = message.tokenized.input_ids
        if guard.is_long(len(given), None):
            return partial(self._prepare, message, call, arrived)
        self._submit(message, call, guard.prompt(given, None), arrived)
        return None

    async def _prepare(self, message: pb.GenerateRequest, call: Call, arrived: float) -> None:
        prompt = await self._context.guard.long_prompt(message.tokenized.input_ids, None)
        self._submit(message, call, prompt, arrived)

    def _submit(self, message: pb.GenerateRequest, call: Call, ids: Sequence[int], arrived: float) -> None:
        engine, guard = self._engine, self._context.guard
        start = prompt_logprobs_start(message, len(ids))
        ask = ask_of(message, start)
        sampling = guard.check(ids, ask, CALLED)
        sampling.constraint = constraint_of(message.sampling_params)
        native = self._native(message, start)
        pin = message.data_parallel_rank if message.HasField("data_parallel_rank") else None
        rank = engine.choose_rank() if pin is None else engine.pinned_rank("data_parallel_rank", pin)
        samples = ask.n or 1
        rich = rich_of(sampling, native)
        kind = PlainSink if rich is None and samples == 1 else RichSink
        request = Request(
            message.request_id,
            kept_ids(ids, keep=False),
            call,
            kind(call, message.request_id, len(ids)),
            stream=message.stream,
            arrived=arrived,
            stop_ids=sampling.stop_token_ids,
            receiving=native.transfer is not None and self._mode() == "decode",
        )
        if start != NO_PROMPT_LOGPROBS:
            request.prompt_ids = list(ids[start:])
        sent = wire_ids(ids, samples)
        calls: list[EngineCall] = [
            GenerateCall(
                wire_id="",
                prompt_token_ids=sent,
                sampling=sampling,
                arrival_time=arrived,
                stream=message.stream,
                native=native,
            )
            for _ in range(samples)
        ]
        engine.submit(request, rank, calls, rich)
        table = engine.table
        call.on_cancel = lambda reason: table.cancel(request)
        call.on_blocked = partial(table.hold, request)
        call.on_writable = partial(table.resume, request)

    def _argument(self, name: str) -> Any:
        """A launch argument of the engine that is not SGLang's default; None as well when none is known (`attach`)."""
        return self._engine.facts.server_args.get(name)

    def _refuse_unsupported(self, message: pb.GenerateRequest) -> None:
        """Refuse by name what this contract can say and the bridge, or the engine as it was started, does not do."""
        if message.HasField("mm_inputs"):
            raise unsupported("mm_inputs", "set", "media inputs are not supported; send token ids only")
        if message.input_embeds:
            raise unsupported("input_embeds", f"{len(message.input_embeds)} values", "send token ids")
        arguments = self._engine.facts.server_args
        if message.return_hidden_states and arguments and not self._returns_hidden_states():
            raise _not_started_with("return_hidden_states", "--enable-return-hidden-states")
        if message.custom_logit_processor:
            at_most("custom_logit_processor", message.custom_logit_processor, PROCESSOR_CHARACTERS, "characters")
            if arguments and not self._argument("enable_custom_logit_processor"):
                raise _not_started_with("custom_logit_processor", "--enable-custom-logit-processor")
            check_processor(message.custom_logit_processor)
        if message.lora_id and not (
            self._engine.ranks[0].ready.get("supports_lora") or self._engine.facts.supports_lora
        ):
            raise _not_started_with("lora_id", "--enable-lora")
        if message.HasField("disaggregated_params") and arguments and self._mode() == "null":
            raise _not_started_with("disaggregated_params", "--disaggregation-mode prefill or decode")
        if not message.return_logprob:
            for field in ("top_logprobs_num", "token_ids_logprob"):
                value = getattr(message, field)
                if value:
                    raise invalid(field, value, "unset without return_logprob")

    def _mode(self) -> str:
        return str(self._argument("disaggregation_mode") or "null")

    def _returns_hidden_states(self) -> bool:
        mode = self._argument("return_hidden_states_mode")
        return bool(self._argument("enable_return_hidden_states")) or mode in ("last", "full")

    def _native(self, message: pb.GenerateRequest, start: int) -> Native:
        params = message.sampling_params
        interval = params.stream_interval if params.HasField("stream_interval") else None
        if interval is not None and interval < 1:
            raise invalid("stream_interval", interval, "1 or more tokens")
        return Native(
            stops=Stops(
                strings=list(params.stop),
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
                no_stop_trim=params.no_stop_trim,
                stream_interval=interval,
            ),
            logprob_start=start,
            scored_ids=list(message.token_ids_logprob) or None,
            hidden_states=message.return_hidden_states,
            reasoning=message.require_reasoning,
            lora_id=message.lora_id or None,
            logit_processor=message.custom_logit_processor or None,
            custom_params=custom_params_of(params),
            transfer=transfer_of(message),
        )

    async def embed(self, message: pb.EmbedRequest, call: Call) -> pb.EmbedResponse:
        engine, table, arrived = self._engine, self._engine.table, time.time()
        call.request_id = message.request_id
        at_most("request_id", message.request_id, amounts.REQUEST_ID_CHARACTERS, "characters")
        if message.HasField("mm_inputs"):
            raise unsupported("mm_inputs", "set", "media inputs are not supported; send token ids only")
        if message.texts:
            raise unsupported("texts", f"{len(message.texts)} texts", "send the pair as token ids")
        ids = await self._context.guard.check_embed(message.tokenized.input_ids)
        types = list(message.token_type_ids) or None
        if types is not None and len(types) != len(ids):
            raise invalid("the number of token_type_ids", len(types), f"{len(ids)}, one a token")
        if message.data_parallel_rank:
            rank = engine.pinned_rank("data_parallel_rank", message.data_parallel_rank)
        else:
            rank = engine.choose_rank()
        sink = EmbedSink()
        request = Request(message.request_id, kept_ids(ids, keep=False), call, sink, stream=False, arrived=arrived)
        asked = EmbedCall(
            wire_id="",
            prompt_token_ids=wire_ids(ids),
            arrival_time=arrived,
            activation=engine.facts.embed_activation,
            native=EmbedNative(token_type_ids=types),
        )
        engine.submit(request, rank, [asked], partial(Rich, embeds=True))
        try:
            vector = await sink.result
        finally:
            table.cancel(request)
        return pb.EmbedResponse(embedding=vector, prompt_tokens=len(ids), embedding_dim=len(vector))

    async def abort(self, message: pb.AbortRequest, call: Call) -> pb.AbortResponse:
        call.request_id = message.request_id
        if not self._engine.abort([message.request_id]):
            return pb.AbortResponse(success=True, message="aborted")
        return pb.AbortResponse(success=False, message=f"no request {message.request_id[:80]!r} is in flight here")

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
        preferred = self._argument("preferred_sampling_params") or ""
        return pb.GetModelInfoResponse(
            model_path=facts.model_path,
            tokenizer_path=facts.tokenizer_path,
            is_generation=facts.is_generation,
            preferred_sampling_params=preferred if isinstance(preferred, str) else json.dumps(preferred),
            weight_version=str(self._argument("weight_version") or "default"),
            served_model_name=facts.served_model_name,
            max_context_length=self._context.guard.max_model_len,
            vocab_size=facts.vocab_size,
            supports_vision=facts.supports_vision,
            model_type=facts.model_type,
            eos_token_ids=facts.eos_token_ids,
            pad_token_id=facts.pad_token_id or 0,
            bos_token_id=facts.bos_token_id or 0,
            max_req_input_len=self._max_input(),
            architectures=facts.architectures,
            default_sampling_params_json=self._context.default_sampling_json,
        )

    def _max_input(self) -> int:
        """Tokens of the longest prompt: the scheduler keeps 6 of the context, or of its KV cache, for itself."""
        capacity = self._engine.ranks[0].ready.get("kv_cache_size_tokens") or math.inf
        return int(max(min(self._context.guard.max_model_len, capacity) - 6, 0))

    async def get_server_info(self, message: pb.GetServerInfoRequest, call: Call) -> pb.GetServerInfoResponse:
        engine, facts = self._engine, self._engine.facts
        ready = engine.ranks[0].ready
        arguments = dict(facts.server_args)
        if not arguments.get("max_running_requests"):
            arguments["max_running_requests"] = ready.get("max_num_seqs") or 0
        pairing = os.environ.get("SMG_PAIRING_PROTOCOL", "")
        if pairing:
            arguments["pairing_protocol"] = pairing
        capacity = int(ready.get("kv_cache_size_tokens") or 0)
        started = Timestamp()
        started.FromSeconds(int(engine.started_at))
        reply = pb.GetServerInfoResponse(
            active_requests=engine.active_requests,
            is_paused=False,
            last_receive_timestamp=engine.last_receive_at,
            uptime_seconds=time.time() - engine.started_at,
            sglang_version=facts.engine_version.removeprefix("sglang-"),
            server_type="grpc",
            start_time=started,
            max_total_num_tokens=capacity,
        )
        reply.server_args.update(msgspec.to_builtins(arguments, str_keys=True))
        reply.scheduler_info.update(
            {
                "status": "ready",
                "is_generation": facts.is_generation,
                "max_total_num_tokens": capacity,
                "max_req_input_len": self._max_input(),
            }
        )
        return reply

    async def get_loads(self, message: pb.GetLoadsRequest, call: Call) -> pb.GetLoadsResponse:
        engine = self._engine
        table = engine.table
        sections = sections_of(message.include)
        wanted = message.dp_rank if message.HasField("dp_rank") else None
        if wanted is not None:
            engine.pinned_rank("dp_rank", wanted)
        rate = engine.tokens_per_second() / len(engine.ranks)
        loads = [
            load_of(rank, table, rate, sections, self._mode())
            for rank in engine.ranks
            if wanted is None or rank.index == wanted
        ]
        return pb.GetLoadsResponse(
            timestamp=datetime.datetime.now(datetime.UTC).isoformat(),
            version=engine.facts.engine_version.removeprefix("sglang-"),
            dp_rank_count=len(engine.ranks),
            loads=loads,
            aggregate=aggregate_of(loads),
        )

    # -- operations --------------------------------------------------------------------------------------------------

    async def flush_cache(self, message: common_pb2.FlushCacheRequest, call: Call) -> common_pb2.FlushCacheResponse:
        if not 0 <= message.timeout_s < math.inf:
            raise invalid("timeout_s", message.timeout_s, "0 or more seconds")
        wait = max(FLUSH_S, message.timeout_s + 10.0)
        replies = await self._engine.utility("flush_cache", (float(message.timeout_s),), timeout_s=wait)
        success, text = _outcome(replies, "cache flushed")
        return common_pb2.FlushCacheResponse(success=success, message=text)

    async def start_profile(self, message: common_pb2.StartProfileRequest, call: Call) -> common_pb2.ProfileResponse:
        options: dict[str, Any] = {"profile_by_stage": message.profile_by_stage}
        for field in ("output_dir", "start_step", "num_steps", "with_stack", "record_shapes"):
            if message.HasField(field):
                options[field] = getattr(message, field)
        if message.activities:
            options["activities"] = list(message.activities)
        return await self._profile("start_profile", (options,), "profiler started")

    async def stop_profile(self, message: common_pb2.StopProfileRequest, call: Call) -> common_pb2.ProfileResponse:
        return await self._profile("stop_profile", (), "profiler stopped")

    async def _profile(self, method: str, args: tuple[Any, ...], done: str) -> common_pb2.ProfileResponse:
        replies = await self._engine.utility(method, args, timeout_s=PROFILE_S)
        success, text = _outcome(replies, done)
        return common_pb2.ProfileResponse(success=success, message=text)

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


async def _refuse_adapters(method: str, message: Any, call: Call) -> Any:
    raise Refusal(Code.UNIMPLEMENTED, f"{method} is not served; start the engine with --lora-paths")


def _not_started_with(field: str, flag: str) -> Refusal:
    return Refusal(Code.FAILED_PRECONDITION, f"{field} is set, and the engine was started without {flag}")


def _outcome(replies: Iterable[Reply], done: str) -> tuple[bool, str]:
    """(success, text) over every rank."""
    failures = [reply.failure for reply in replies if reply.failure is not None]
    return not failures, "; ".join(failures) or done
