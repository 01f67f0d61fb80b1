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
import json
import math
import os
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from functools import partial
from typing import Any

import msgspec
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from bridge.contracts import amounts
from bridge.contracts.amounts import at_most
from bridge.contracts.context import Context
from bridge.contracts.vllm_render import EmbedSink, PlainSink, RichSink
from bridge.engine import State
from bridge.grpc.call import Call
from bridge.grpc.service import Method, Rest
from bridge.grpc.status import Code
from bridge.guard import Ask, Guard
from bridge.logprobs import Columns
from bridge.prompt import kept_ids, wire_ids
from bridge.refusal import Refusal, invalid, unsupported
from bridge.requests import EngineCall, Request, Rich
from bridge.stops import StopMatcher, StopRules
from bridge.wire.codec import Constraint, EmbedCall, GenerateCall, Sampling

NAME = "vllm.grpc.engine.VllmEngine"

FLUSH_POLL_S = 0.05
"""How often FlushCache looks whether the engine is idle while it waits."""


CHECKED, CHECKED_BYTES = 256, 512
"""How many sampling params are known that passed the guard, and how long each may be."""


class VllmEngine:
    """The service. One instance a front end."""

    name = NAME

    def __init__(self, context: Context) -> None:
        self._context = context
        self._engine = context.engine
        self._checked_by: Guard | None = None
        self._checked: dict[bytes, tuple[int, Sampling]] = {}

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

    # -- generation --------------------------------------------------------------------------------------------------

    def generate(self, message: pb.GenerateRequest, call: Call) -> Rest | None:
        arrived = time.time()
        self._engine.table  # noqa: B018  (refuses unless up)
        at_most("request_id", message.request_id, amounts.REQUEST_ID_CHARACTERS, "characters")
        call.request_id = message.request_id
        _refuse_unsupported(message)
        _refuse_excess(message)
        params = message.sampling_params
        kind = message.WhichOneof("input")
        if kind is None:
            raise Refusal(Code.INVALID_ARGUMENT, "input is unset; give tokenized.input_ids or text")
        tokenizer, guard, limit = self._context.text.loaded, self._context.guard, _truncation(params)
        if kind == "text" or (params.stop and tokenizer is None) or params.WhichOneof("constraint") is not None:
            return partial(self._prepare, message, call, arrived)
        if guard.is_long(len(message.tokenized.input_ids), limit):
            return partial(self._prepare, message, call, arrived)
        self._submit(message, call, guard.prompt(message.tokenized.input_ids, limit), arrived, None)
        return None

    async def _prepare(self, message: pb.GenerateRequest, call: Call, arrived: float) -> None:
        """Do what cannot be done at once: tokenize, a long prompt, read the tokenizer, validate a constraint."""
        context, params = self._context, message.sampling_params
        ids: Sequence[int] = message.tokenized.input_ids
        if message.WhichOneof("input") == "text":
            limit = amounts.CHARACTERS_PER_TOKEN * context.guard.max_model_len
            at_most("text", message.text, limit, "characters")
            ids = await context.text.encode(message.text)
        prompt = await context.guard.any_prompt(ids, _truncation(params))
        if params.stop:
            await context.text.tokenizer()
        constraint = await self._constraint(params)
        self._submit(message, call, prompt, arrived, constraint)

    async def _constraint(self, params: pb.SamplingParams) -> Constraint | None:
        kind = params.WhichOneof("constraint")
        if kind is None:
            return None
        if kind == "choice":
            at_most("choice", params.choice.choices, amounts.CHOICES, "choices")
        elif kind != "json_object":
            at_most(kind, getattr(params, kind), amounts.CONSTRAINT_CHARACTERS, "characters")
        value = list(params.choice.choices) if kind == "choice" else getattr(params, kind)
        return await self._context.grammar.prepare(kind, value)

    def _submit(
        self, message: pb.GenerateRequest, call: Call, ids: Sequence[int], arrived: float, constraint: Constraint | None
    ) -> None:
        engine, guard, params = self._engine, self._context.guard, message.sampling_params
        samples, sampling = self._values(guard.check_prompt(ids), params)
        if constraint is not None:
            sampling = msgspec.structs.replace(sampling, constraint=constraint)
        transfer = self._transfer_params(message)
        pin = message.data_parallel_rank if message.HasField("data_parallel_rank") else None
        rank = engine.choose_rank() if pin is None else engine.pinned_rank("data_parallel_rank", pin)
        rich = self._rich(params, sampling, ids)
        scored = sampling.logprobs is not None or sampling.prompt_logprobs is not None
        sink = RichSink(call, len(ids)) if scored or samples > 1 else PlainSink(call, len(ids))
        keep_prompt = sampling.prompt_logprobs is not None
        request = Request(
            message.request_id,
            kept_ids(ids, keep_prompt),
            call,
            sink,
            stream=message.stream,
            arrived=arrived,
            stop_ids=sampling.stop_token_ids,
            keep_stop_text=params.include_stop_str_in_output,
            keep_prompt=keep_prompt,
            receiving=transfer is not None and bool(transfer.get("do_remote_prefill")),
        )
        sent = wire_ids(ids, samples)
        calls: list[EngineCall] = [
            GenerateCall(
                wire_id="",
                prompt_token_ids=sent,
                sampling=sampling if index == 0 or sampling.seed is None else _with_seed(sampling, index),
                arrival_time=arrived,
                constrain_from_first_token=constraint is not None and params.grammar_from_first_token,
                transfer_params=transfer,
            )
            for index in range(samples)
        ]
        engine.submit(request, rank, calls, rich)
        table = engine.table
        call.on_cancel = lambda reason: table.cancel(request)
        call.on_blocked = partial(table.hold, request)
        call.on_writable = partial(table.resume, request)

    def _values(self, room: int, params: pb.SamplingParams) -> tuple[int, Sampling]:
        """(samples, values to send), which clients ask for again and again in the same words."""
        guard = self._context.guard
        if guard is not self._checked_by or len(self._checked) >= CHECKED:
            self._checked_by, self._checked = guard, {}
        words = params.SerializeToString()
        found = self._checked.get(words)
        if found is None or found[1].max_tokens > room:
            ask = _ask(params)
            wanted = ask.max_tokens
            found = ask.n or 1, guard.check_values(room, ask)
            if wanted is not None and wanted <= room and len(words) <= CHECKED_BYTES:
                self._checked[words] = found
        return found

    def _rich(self, params: pb.SamplingParams, sampling: Sampling, ids: Sequence[int]) -> Callable[[], Rich] | None:
        """What each sequence of the request carries beyond its tokens; None when nothing."""
        rules = None
        tokenizer = self._context.text.loaded
        if params.stop and tokenizer is not None:
            rules = StopRules(
                tokenizer,
                params.stop,
                ids,
                min_tokens=sampling.min_tokens,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            )
        logprobs, prompt_logprobs = sampling.logprobs is not None, sampling.prompt_logprobs is not None
        if rules is None and not logprobs and not prompt_logprobs:
            return None

        def make() -> Rich:
            rich = Rich()
            rich.stops = StopMatcher(rules) if rules is not None else None
            rich.logprobs = Columns(sampling.logprobs) if sampling.logprobs is not None else None
            rich.prompt_logprobs = Columns(sampling.prompt_logprobs) if sampling.prompt_logprobs is not None else None
            return rich

        return make

    def _transfer_params(self, message: pb.GenerateRequest) -> dict[str, Any] | None:
        """The KV connector's parameters: the JSON object, or the older pair of host and port."""
        if message.HasField("kv_transfer_params_json"):
            field, text = "kv_transfer_params_json", message.kv_transfer_params_json
            at_most(field, text, amounts.TRANSFER_CHARACTERS, "characters")
            try:
                found = json.loads(text)
                msgspec.msgpack.encode(found)
            except (ValueError, RecursionError, OverflowError):
                found = None
            if not isinstance(found, dict) or _depth(found) > MAX_TRANSFER_DEPTH:
                limit = f"a JSON object at most {MAX_TRANSFER_DEPTH} levels deep, of 64-bit integers and valid text"
                raise invalid(field, text, limit)
        elif message.HasField("kv_transfer_params"):
            field, pair = "kv_transfer_params", message.kv_transfer_params
            found = {"do_remote_prefill": True, "remote_host": pair.remote_host, "remote_port": pair.remote_port}
        else:
            return None
        if not self._engine.facts.kv_connector:
            raise Refusal(
                Code.FAILED_PRECONDITION,
                f"{field} is set, and the engine has no KV connector; start it with --kv-transfer-config",
            )
        return found

    async def embed(self, message: pb.EmbedRequest, call: Call) -> pb.EmbedResponse:
        engine, table, arrived = self._engine, self._engine.table, time.time()
        at_most("request_id", message.request_id, amounts.REQUEST_ID_CHARACTERS, "characters")
        call.request_id = message.request_id
        ids = await self._context.guard.check_embed(message.tokenized.input_ids)
        sink = EmbedSink()
        request = Request(message.request_id, kept_ids(ids, False), call, sink, stream=False, arrived=arrived)
        asked = EmbedCall(
            wire_id="",
            prompt_token_ids=wire_ids(ids),
            arrival_time=arrived,
            activation=engine.facts.embed_activation,
        )
        engine.submit(request, engine.choose_rank(), [asked], partial(Rich, embeds=True))
        try:
            vector = await sink.result
        finally:
            table.cancel(request)
        return pb.EmbedResponse(embedding=vector, prompt_tokens=len(ids), embedding_dim=len(vector))

    async def abort(self, message: pb.AbortRequest, call: Call) -> pb.AbortResponse:
        self._engine.table  # noqa: B018  (refuses unless up)
        at_most("request_ids", message.request_ids, amounts.ABORTS, "ids")
        self._engine.abort(message.request_ids)
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
                    cache_hit_rate=table.cache_hit_rate(rank.identity),
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
        if not 0 <= message.timeout_s < math.inf:
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


MEDIA = [
    (field, pb.GenerateRequest.DESCRIPTOR.fields_by_name[field].is_repeated)
    for field in ("mm_inputs", "extra_mm_inputs", "media_refs")
]
"""Fields with media, and whether they are lists."""


def _refuse_unsupported(message: pb.GenerateRequest) -> None:
    """Refuse by name what a request asks for and this contract does not do yet."""
    for field, repeated in MEDIA:
        if getattr(message, field) if repeated else message.HasField(field):
            raise unsupported(field, "set", "media inputs are not supported; send text or token ids only")


def _refuse_excess(message: pb.GenerateRequest) -> None:
    """Refuse what would take long to look at piece by piece."""
    params = message.sampling_params
    at_most("stop", params.stop, amounts.STOP_STRINGS, "strings")
    at_most("stop_token_ids", params.stop_token_ids, amounts.STOP_IDS, "ids")
    at_most("logit_bias", params.logit_bias, amounts.BIASES, "entries")


def _truncation(params: pb.SamplingParams) -> int | None:
    return params.truncate_prompt_tokens if params.HasField("truncate_prompt_tokens") else None


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
        n=params.n or None,
        stop=list(params.stop),
        logprobs=params.logprobs if params.HasField("logprobs") else None,
        prompt_logprobs=params.prompt_logprobs if params.HasField("prompt_logprobs") else None,
        logit_bias=dict(params.logit_bias) or None,
        truncate_prompt_tokens=_truncation(params),
    )


MAX_TRANSFER_DEPTH = 64


def _depth(value: Any) -> int:
    """Levels of objects and arrays inside each other."""
    level, depth = [value], 0
    while level := [one for one in level if isinstance(one, (dict, list))]:
        depth += 1
        level = [child for one in level for child in (one.values() if isinstance(one, dict) else one)]
    return depth


def _with_seed(sampling: Sampling, index: int) -> Sampling:
    """The sampling of sample `index`: its own seed, as vLLM derives it, so that seeded samples differ."""
    assert sampling.seed is not None
    return msgspec.structs.replace(sampling, seed=sampling.seed + index)


def shm_namespace() -> str:
    """`<boot_id>:<st_dev of /dev/shm>`, so that a gateway can tell whether it shares memory with us; "" if unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()}:{os.stat('/dev/shm').st_dev}"
    except OSError:
        return ""
