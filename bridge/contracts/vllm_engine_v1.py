"""`vllm.engine.v1.VllmEngine`: the contract that was proposed for vLLM Router, on the neutral core.

What a zero means here: only seed has presence; temperature 0 is greedy, dp_rank 0 is the first rank, and every other zero
is "unset": the model's generation default, else the engine's.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Ids
from functools import partial
from typing import Any

from bridge.contracts import amounts, proto
from bridge.contracts.admission import Admission, Answer, Wanted
from bridge.contracts.amounts import at_most
from bridge.contracts.context import Context
from bridge.contracts.proto import message
from bridge.contracts.text_out import TextOut, text_out
from bridge.detokenizer import TextRules
from bridge.engine import Engine, State
from bridge.grpc.call import Call
from bridge.grpc.service import Method, Rest
from bridge.grpc.status import Code
from bridge.guard import Ask
from bridge.refusal import Refusal, unsupported
from bridge.requests import Rich, Sequence
from bridge.stops import StopMatcher, StopRules
from bridge.template import Template
from bridge.wire.codec import Finish, Sampling
from bridge.wire.engines import operations_for

NAME = "vllm.engine.v1.VllmEngine"

GenerateRequest = message("vllm.engine.v1.GenerateRequest")
GenerateResponse = message("vllm.engine.v1.GenerateResponse")
StreamResponse = message("vllm.engine.v1.GenerateStreamResponse")

MODES = {number: name for name, number in proto.enum("vllm.engine.v1.ExecutionMode").items()}
HEALTH = proto.enum("vllm.engine.v1.HealthCheckResponse.ServingStatus")
FINISH = {Finish.STOP: "stop", Finish.LENGTH: "length", Finish.ABORT: "abort"}


class VllmEngineV1:
    """The service. One instance a front end."""

    name = NAME

    def __init__(self, context: Context) -> None:
        self._context = context
        self._engine = context.engine
        self._admission = Admission(context)

    def methods(self) -> Iterable[Method]:
        def at(method: str) -> str:
            return f"/{NAME}/{method}"

        yield Method(at("GenerateStream"), "raw_stream", GenerateRequest, partial(self.generate, stream=True))
        yield Method(at("Generate"), "raw_stream", GenerateRequest, partial(self.generate, stream=False))
        yield Method(at("GetModelInfo"), "unary", message("vllm.engine.v1.ModelInfoRequest"), self.get_model_info)
        yield Method(at("HealthCheck"), "unary", message("vllm.engine.v1.HealthCheckRequest"), self.health_check)
        empty = message("vllm.engine.v1.EmptyRequest")
        yield Method(at("ResetPrefixCache"), "unary", empty, self.reset_prefix_cache, admin=True)

    def generate(self, request: Any, call: Call, *, stream: bool) -> Rest | None:
        """Both methods: without `stream` the one reply comes at the end."""
        engine, params = self._engine, request.sampling_params
        engine.table  # noqa: B018  (refuses unless up)
        if request.execution_mode:
            mode = MODES.get(request.execution_mode, request.execution_mode)
            raise unsupported("execution_mode", mode, "only NORMAL is served")
        if request.multimodal_data:
            items = f"{len(request.multimodal_data)} items"
            raise unsupported("multimodal_data", items, "media inputs are not supported; send text or token ids only")
        at_most("stop_token_ids", params.stop_token_ids, amounts.STOP_IDS, "ids")
        if not (request.prompt_token_ids or request.prompt_text):
            raise Refusal(Code.INVALID_ARGUMENT, "the prompt is empty; give prompt_token_ids or prompt_text")
        facts = engine.facts
        return self._admission.submit(
            Wanted(
                request_id=request.request_id,
                ask=_ask(params),
                answer=lambda ids, sampling: self._answer(request, call, ids, sampling, stream=stream),
                stream=stream,
                ids=request.prompt_token_ids,
                text=None if request.prompt_token_ids else request.prompt_text,
                text_out=bool(facts.tokenizer_path) and not facts.skip_tokenizer_init,
                rank=request.dp_rank,
            ),
            call,
        )

    def _answer(self, request: Any, call: Call, ids: Ids[int], sampling: Sampling, *, stream: bool) -> Answer:
        tokenizer, strings = self._context.text.loaded, request.sampling_params.stop_sequences
        if tokenizer is None:
            return Sink(self._engine, call, request.request_id, None, stream=stream), None
        if not strings:
            rules = TextRules(tokenizer, ids, skip_special_tokens=True)
            return Sink(self._engine, call, request.request_id, rules, stream=stream), None
        stops = StopRules(tokenizer, strings, ids, min_tokens=sampling.min_tokens, skip_special_tokens=True)

        def make() -> Rich:
            rich = Rich()
            rich.stops = StopMatcher(stops, keep_text=True)
            return rich

        return Sink(self._engine, call, request.request_id, stops, stream=stream), make

    async def get_model_info(self, request: Any, call: Call) -> Any:
        """`stop_tokens` are the EOS tokens as text, where the model has a tokenizer."""
        engine, facts = self._engine, self._engine.facts
        words: list[str] = []
        if facts.tokenizer_path and not facts.skip_tokenizer_init:
            tokenizer = await self._context.text.tokenizer()
            words = [word for token in facts.eos_token_ids if (word := tokenizer.id_to_token(token)) is not None]
        return message("vllm.engine.v1.ModelInfoResponse")(
            model_name=facts.served_model_name,
            max_model_len=self._context.guard.max_model_len,
            dp_size=len(engine.ranks),
            block_size=int(engine.ranks[0].ready.get("block_size") or 0),
            stop_tokens=words,
        )

    async def health_check(self, request: Any, call: Call) -> Any:
        serving = self._engine.state is State.UP and not self._context.draining
        status = HEALTH["SERVING" if serving else "NOT_SERVING"]
        return message("vllm.engine.v1.HealthCheckResponse")(status=status)

    async def reset_prefix_cache(self, request: Any, call: Call) -> Any:
        engine = self._engine
        method = operations_for(engine.name).get("reset_prefix_cache")
        if method is None:
            raise Refusal(Code.UNIMPLEMENTED, f"{engine.name} has no operation reset_prefix_cache")
        replies = await engine.utility(method, (False, False))
        failures = [reply.failure or "the engine's blocks are in use" for reply in replies if reply.value is not True]
        text = "; ".join(failures) or "prefix cache reset"
        return message("vllm.engine.v1.AdminResponse")(success=not failures, message=text)


class Sink:
    """Renders one call: in a stream one message a token, the text of a step on its last token."""

    def __init__(self, engine: Engine, call: Call, request_id: str, rules: TextRules | None, *, stream: bool) -> None:
        """Without `rules` there is no text."""
        self._engine = engine
        self._call = call
        self._request_id = request_id
        self._rules = rules
        self._stream = stream
        self._text: TextOut | None = None
        self._last: list[int] = []
        self.template: Template | None = None

    def chunk(self, sequence: Sequence, tokens: list[int]) -> None:
        if sequence.finish is not None:
            self._last = tokens
            return
        text = self._text_out(sequence)
        self._send(tokens, "" if text is None else text.next(tokens))

    def complete(self, sequence: Sequence) -> None:
        assert sequence.finish is not None
        tokens = self._last if self._stream else sequence.output_ids.tolist()
        out, text = self._text_out(sequence), ""
        if out is not None:
            stopped = sequence.finish is Finish.STOP and sequence.stop_string is None
            text = out.last(tokens[:-1] if stopped else tokens, sequence.stop_string, keep_stop=False)
        reason, metrics = FINISH[sequence.finish], self._metrics()
        if self._stream:
            self._send(tokens[:-1], "")
            last = StreamResponse(
                request_id=self._request_id, text_delta=text, is_finished=True, finish_reason=reason, metrics=metrics
            )
            if tokens:
                last.token_id = tokens[-1]
            self._call.send(last.SerializeToString())
        else:
            reply = GenerateResponse(
                request_id=self._request_id,
                output_token_ids=tokens,
                output_text=text,
                finish_reason=reason,
                metrics=metrics,
            )
            self._call.send(reply.SerializeToString())

    def close(self) -> None:
        self._call.finish()

    def fail(self, code: Code, text: str) -> None:
        self._call.finish(code, text)

    def _send(self, tokens: list[int], text: str) -> None:
        for token in tokens[:-1]:
            self._call.send(StreamResponse(request_id=self._request_id, token_id=token).SerializeToString())
        if tokens:
            last = StreamResponse(request_id=self._request_id, token_id=tokens[-1], text_delta=text)
            self._call.send(last.SerializeToString())

    def _text_out(self, sequence: Sequence) -> TextOut | None:
        if self._text is None and self._rules is not None:
            self._text = text_out(sequence, self._rules, keep_stop=False)
        return self._text

    def _metrics(self) -> Any:
        loads = [rank.load for rank in self._engine.ranks]
        return message("vllm.engine.v1.WorkerMetrics")(
            running_requests=sum(load.running for load in loads),
            waiting_requests=sum(load.waiting for load in loads),
            kv_cache_usage_percent=100.0 * sum(load.kv_cache_usage for load in loads) / len(loads),
        )


def _ask(params: Any) -> Ask:
    return Ask(
        temperature=params.temperature,
        top_p=params.top_p or None,
        top_k=params.top_k or None,
        frequency_penalty=params.frequency_penalty or None,
        presence_penalty=params.presence_penalty or None,
        max_tokens=params.max_tokens or None,
        seed=params.seed if params.HasField("seed") else None,
        ignore_eos=params.ignore_eos,
        stop_token_ids=list(params.stop_token_ids),
        stop=list(params.stop_sequences),
    )
