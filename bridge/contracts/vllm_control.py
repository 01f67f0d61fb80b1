"""`vllm.Control`: what a server is, and what may be done to it, for vLLM Router and operators.

Operations go by neutral names; an engine's `wire/<engine>/control.py` says what it calls them, and what it does not have
is refused by name.
"""

from __future__ import annotations

import zlib
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from bridge.contracts import amounts, proto
from bridge.contracts.amounts import at_most
from bridge.contracts.context import Context
from bridge.contracts.proto import message
from bridge.grpc.call import Call
from bridge.grpc.service import Method
from bridge.grpc.status import Code
from bridge.refusal import Refusal, invalid, shown
from bridge.wire.codec import Adapter
from bridge.wire.engines import operations_for

NAME = "vllm.Control"

API_VERSION = "vllm"
KV_EVENTS_SCHEMA = 1
"""What vllm-rs 0.33.0 calls the KV events of vLLM 0.32."""

PAUSES = {number: name.removeprefix("PAUSE_MODE_").lower() for name, number in proto.enum("vllm.PauseMode").items()}
DEFAULT_PAUSE = "abort"

OPERATION_S = 300.0
"""Longest wait for an operation: putting an engine to sleep copies its weights."""

OPEN = ("GetServerInfo", "GetModelInfo", "GetKvEventSources", "Abort", "IsPaused", "IsSleeping", "GetWeightVersion")
"""Methods that change nothing but the caller's own requests; all others are for administrators."""

NOT_SERVED = {
    "Shutdown": "stop the bridge with SIGTERM instead: it drains first",
    "InitWeightTransferEngine": "weights are not transferred into a running engine",
    "StartWeightUpdate": "weights are not transferred into a running engine",
    "StartDraftWeightUpdate": "weights are not transferred into a running engine",
    "UpdateWeights": "weights are not transferred into a running engine",
    "FinishWeightUpdate": "weights are not transferred into a running engine",
}
"""Methods that are refused, and why."""

MOST_ADAPTERS = 2**31 - 1

Handler = Callable[[Any, Call], Awaitable[Any]]


class VllmControl:
    """The service. One instance a front end."""

    name = NAME

    def __init__(self, context: Context) -> None:
        self._context = context
        self._engine = context.engine
        self._operations = operations_for(context.engine.name)

    def methods(self) -> Iterable[Method]:
        served: dict[str, Handler] = {
            "GetServerInfo": self.get_server_info,
            "GetModelInfo": self.get_model_info,
            "GetKvEventSources": self.get_kv_event_sources,
            "Abort": self.abort,
            "LoadLora": self.load_lora,
            "UnloadLora": self.unload_lora,
            "ListLoras": self.list_loras,
            "PauseGeneration": self.pause_generation,
            "ResumeGeneration": self.resume_generation,
            "IsPaused": self.is_paused,
            "Sleep": self.sleep,
            "WakeUp": self.wake_up,
            "IsSleeping": self.is_sleeping,
            "GetWeightVersion": self.get_weight_version,
            "UpdateWeightVersion": self.update_weight_version,
        }
        for name, request, _ in proto.methods(NAME):
            handler = served[name] if name in served else _refuser(name)
            yield Method(f"/{NAME}/{name}", "unary", request, handler, admin=name not in OPEN)

    # -- facts -------------------------------------------------------------------------------------------------------

    async def get_server_info(self, request: Any, call: Call) -> Any:
        engine, facts = self._engine, self._engine.facts
        ready = engine.ranks[0].ready

        def number(name: str) -> int:
            return int(ready.get(name) or 0)

        reply = message("vllm.GetServerInfoResponse")(
            engine_version=facts.engine_version,
            api_version=API_VERSION,
            instance_id=str(ready.get("instance_id") or ""),
            parallelism=message("vllm.ParallelismInfo")(
                tensor=number("tensor_parallel_size") or 1,
                pipeline=number("pipeline_parallel_size") or 1,
                data_parallel_size=len(engine.ranks),
                data_parallel_rank=number("data_parallel_rank"),
                decode_context_parallel_size=number("decode_context_parallel_size") or 1,
                world_size=number("world_size") or 1,
                data_parallel_size_local=len(engine.ranks),
            ),
            max_model_len=self._context.guard.max_model_len,
            kv_block_size=number("block_size"),
            total_kv_blocks=number("num_gpu_blocks"),
            max_running_requests=number("max_num_seqs"),
            max_batched_tokens=number("max_num_batched_tokens"),
            max_loras=number("max_loras"),
            rl_capabilities=message("vllm.RlCapabilities")(sleep_mode_enabled=bool(ready.get("enable_sleep_mode"))),
        )
        if ready.get("effective_attention_block_size"):
            reply.effective_attention_block_size = number("effective_attention_block_size")
        return reply

    async def get_model_info(self, request: Any, call: Call) -> Any:
        facts = self._engine.facts
        return message("vllm.GetModelInfoResponse")(
            model_id=facts.model_path,
            served_model_name=facts.served_model_name,
            supports_text_input=bool(facts.tokenizer_path) and not facts.skip_tokenizer_init,
            supports_token_ids_input=True,
            supports_lora=facts.supports_lora,
            reasoning_parser=facts.reasoning_parser,
            tool_call_parser=str(facts.server_args.get("tool_call_parser") or ""),
        )

    async def get_kv_event_sources(self, request: Any, call: Call) -> Any:
        """Where each rank publishes its KV events; none when it does not."""
        ranks = self._engine.ranks if self._context.ready else []
        reply = message("vllm.GetKvEventSourcesResponse")()
        for rank in ranks:
            config = rank.ready.get("kv_events_config") or {}
            if not config.get("enable_kv_cache_events") or config.get("publisher") != "zmq":
                continue
            source = reply.sources.add(
                transport="zmq",
                endpoint=str(config.get("endpoint") or ""),
                topic=str(config.get("topic") or ""),
                replay_endpoint=str(config.get("replay_endpoint") or ""),
                encoding="msgpack",
                schema_version=KV_EVENTS_SCHEMA,
                buffer_steps=int(config.get("buffer_steps") or 0),
                hwm=int(config.get("hwm") or 0),
                max_queue_size=int(config.get("max_queue_size") or 0),
            )
            source.data_parallel_rank = rank.index
        return reply

    async def abort(self, request: Any, call: Call) -> Any:
        at_most("request_ids", request.request_ids, amounts.ABORTS, "ids")
        self._engine.abort(request.request_ids)
        return message("vllm.AbortResponse")()

    # -- pause and sleep ---------------------------------------------------------------------------------------------

    async def pause_generation(self, request: Any, call: Call) -> Any:
        clear = request.clear_cache if request.HasField("clear_cache") else True
        await self._operate("pause", _pause_mode(request.mode), clear)
        return message("vllm.PauseGenerationResponse")()

    async def resume_generation(self, request: Any, call: Call) -> Any:
        await self._operate("resume")
        return message("vllm.ResumeGenerationResponse")()

    async def is_paused(self, request: Any, call: Call) -> Any:
        return message("vllm.IsPausedResponse")(paused=any(await self._operate("is_paused")))

    async def sleep(self, request: Any, call: Call) -> Any:
        self._must_have_sleep_mode()
        level = request.level if request.HasField("level") else 1
        if level not in (0, 1, 2):
            raise invalid("level", level, "0, 1 or 2")
        await self._operate("sleep", level, _pause_mode(request.mode))
        return message("vllm.SleepResponse")()

    async def wake_up(self, request: Any, call: Call) -> Any:
        self._must_have_sleep_mode()
        await self._operate("wake_up", list(request.tags) or None)
        return message("vllm.WakeUpResponse")()

    async def is_sleeping(self, request: Any, call: Call) -> Any:
        return message("vllm.IsSleepingResponse")(sleeping=any(await self._operate("is_sleeping")))

    def _must_have_sleep_mode(self) -> None:
        self._engine.table  # noqa: B018  (refuses unless up)
        if not self._engine.ranks[0].ready.get("enable_sleep_mode"):
            raise Refusal(
                Code.FAILED_PRECONDITION, "the engine has no sleep mode; start it with one (--enable-sleep-mode)"
            )

    # -- weights -----------------------------------------------------------------------------------------------------

    async def get_weight_version(self, request: Any, call: Call) -> Any:
        versions = {str(version) for version in await self._operate("get_weight_version")}
        return message("vllm.GetWeightVersionResponse")(weight_version=", ".join(sorted(versions)))

    async def update_weight_version(self, request: Any, call: Call) -> Any:
        if not request.weight_version:
            raise invalid("weight_version", "", "a name that is not empty")
        await self._operate("set_weight_version", request.weight_version)
        return message("vllm.UpdateWeightVersionResponse")()

    # -- adapters ----------------------------------------------------------------------------------------------------

    async def load_lora(self, request: Any, call: Call) -> Any:
        """Load an adapter in every rank; loading the same again changes nothing."""
        adapters = self._adapters()
        for field in ("lora_name", "source_path"):
            if not getattr(request, field):
                raise invalid(field, "", "given")
            at_most(field, getattr(request, field), amounts.REQUEST_ID_CHARACTERS, "characters")
        adapter = Adapter(_number(request.lora_name, request.source_path), request.lora_name, request.source_path)
        known = adapters.get(adapter.name)
        if known is not None and known != adapter:
            raise Refusal(
                Code.ALREADY_EXISTS, f"{shown(adapter.name)} is loaded from {shown(known.path)}; unload it first"
            )
        if not all(await self._operate("load_adapter", adapter)):
            raise Refusal(Code.FAILED_PRECONDITION, f"the engine did not load {shown(adapter.name)}")
        adapters[adapter.name] = adapter
        return message("vllm.LoadLoraResponse")(adapter=_described(adapter))

    async def unload_lora(self, request: Any, call: Call) -> Any:
        adapters = self._adapters()
        if not request.lora_name:
            raise invalid("lora_name", "", "given")
        adapter = adapters.get(request.lora_name)
        if adapter is None:
            raise Refusal(Code.NOT_FOUND, f"lora_name is {shown(request.lora_name)}, and no such adapter is loaded")
        await self._operate("unload_adapter", adapter.number)
        adapters.pop(adapter.name, None)
        return message("vllm.UnloadLoraResponse")(adapter=_described(adapter))

    async def list_loras(self, request: Any, call: Call) -> Any:
        """The adapters that were loaded here and that the engine still has."""
        adapters = self._adapters()
        has = [set(numbers) for numbers in await self._operate("list_adapters")]
        present = [one for one in adapters.values() if all(one.number in numbers for numbers in has)]
        return message("vllm.ListLorasResponse")(adapters=map(_described, present))

    def _adapters(self) -> dict[str, Adapter]:
        """Those that are loaded, by name; raises `Refusal` FAILED_PRECONDITION for an engine without LoRA."""
        self._must_have_lora()
        return self._context.adapters

    def _must_have_lora(self) -> None:
        if not self._engine.facts.supports_lora:
            raise Refusal(Code.FAILED_PRECONDITION, "the engine was started without LoRA; start it with --enable-lora")

    # -- operations --------------------------------------------------------------------------------------------------

    async def _operate(self, operation: str, *arguments: Any) -> list[Any]:
        """Each rank's answer; raises `Refusal` UNIMPLEMENTED for what the engine does not have."""
        method = self._operations.get(operation)
        if method is None:
            raise Refusal(Code.UNIMPLEMENTED, f"{self._engine.name} has no operation {operation}")
        replies = await self._engine.utility(method, arguments, timeout_s=OPERATION_S)
        for reply in replies:
            if reply.failure is not None:
                missing = "has no attribute" in reply.failure or "has no method" in reply.failure
                code = Code.UNIMPLEMENTED if missing else Code.FAILED_PRECONDITION
                raise Refusal(code, f"the engine refused {operation}: {reply.failure}")
        return [reply.value for reply in replies]


def _number(name: str, path: str) -> int:
    """The engine's number for an adapter: the same in every front end and after each start, another for other weights."""
    return zlib.crc32(f"{name}\0{path}".encode()) % MOST_ADAPTERS + 1


def _described(adapter: Adapter) -> Any:
    return message("vllm.LoraAdapter")(lora_id=adapter.number, lora_name=adapter.name, source_path=adapter.path)


def _pause_mode(number: int) -> str:
    name = PAUSES.get(number)
    if name is None:
        raise invalid("mode", number, "one of " + ", ".join(map(str, sorted(PAUSES))))
    return DEFAULT_PAUSE if name == "unspecified" else name


def _refuser(name: str) -> Handler:
    async def refuse(request: Any, call: Call) -> Any:
        raise Refusal(Code.UNIMPLEMENTED, f"{name} is not served: {NOT_SERVED[name]}")

    return refuse
