"""From a contract's request to the engine: what has to be prepared off the loop, the guard, the admission.

A contract says what it wants in neutral words (`Wanted`) and gets its sink from `answer` once the prompt's ids and the
sampling values are settled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from bridge.contracts import amounts
from bridge.contracts.amounts import at_most
from bridge.contracts.context import Context
from bridge.grpc.call import Call
from bridge.grpc.service import Rest
from bridge.grpc.status import Code
from bridge.guard import Ask
from bridge.prompt import kept_ids, wire_ids
from bridge.refusal import Refusal, invalid
from bridge.requests import EngineCall, Request, Rich, Sink
from bridge.wire.codec import Adapter, Constraint, GenerateCall, Sampling

MAX_TRANSFER_DEPTH = 64

Answer = tuple[Sink, Callable[[], Rich] | None]
"""Where the results go, and what makes that which a sequence carries beyond tokens."""


@dataclass(slots=True, kw_only=True)
class Wanted:
    """One generation in neutral words. `text` is the prompt where there are no `ids`.

    `answer(ids, sampling)` is called when nothing else can be refused by then but the in-flight limit.
    """

    request_id: str
    ask: Ask
    answer: Callable[[Sequence[int], Sampling], Answer]
    stream: bool
    ids: Sequence[int] = ()
    text: str | None = None
    text_out: bool = False
    """Text comes out, so the tokenizer must be there."""
    constraint: tuple[str, Any] | None = None
    """Kind and value, in the words of `codec.Constraint`."""
    rank: int | None = None
    session_id: str = ""
    cache_salt: str = ""
    adapter: Adapter | None = None
    transfer: dict[str, Any] | None = None
    keep_stop_text: bool = False
    keep_prompt: bool = False
    arrived: float = field(default_factory=time.time)


class Admission:
    """Submits what contracts want to one engine."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def submit(self, wanted: Wanted, call: Call) -> Rest | None:
        """Admit now, or return what will do so once all is done that cannot be done at once; both raise `Refusal`."""
        context, ask = self._context, wanted.ask
        context.engine.table  # noqa: B018  (refuses unless up)
        at_most("request_id", wanted.request_id, amounts.REQUEST_ID_CHARACTERS, "characters")
        call.request_id = wanted.request_id
        at_most("stop", ask.stop, amounts.STOP_STRINGS, "strings")
        missing_tokenizer = (wanted.text_out or ask.stop) and context.text.loaded is None
        if wanted.text is not None or missing_tokenizer or wanted.constraint is not None:
            return partial(self._prepare, wanted, call)
        if context.guard.is_long(len(wanted.ids), ask.truncate_prompt_tokens):
            return partial(self._prepare, wanted, call)
        self._admit(wanted, call, context.guard.prompt(wanted.ids, ask.truncate_prompt_tokens), None)
        return None

    async def _prepare(self, wanted: Wanted, call: Call) -> None:
        """Tokenize, make a long prompt ready, read the tokenizer, validate a constraint."""
        context, ids = self._context, wanted.ids
        if wanted.text is not None:
            limit = amounts.CHARACTERS_PER_TOKEN * context.guard.max_model_len
            at_most("text", wanted.text, limit, "characters")
            ids = await context.text.encode(wanted.text)
        prompt = await context.guard.any_prompt(ids, wanted.ask.truncate_prompt_tokens)
        if wanted.text_out or wanted.ask.stop:
            await context.text.tokenizer()
        constraint = await self._constraint(wanted.constraint)
        self._admit(wanted, call, prompt, constraint)

    async def _constraint(self, wanted: tuple[str, Any] | None) -> Constraint | None:
        if wanted is None:
            return None
        kind, value = wanted
        if kind == "choice":
            at_most("choice", value, amounts.CHOICES, "choices")
        elif kind != "json_object":
            at_most(kind, value, amounts.CONSTRAINT_CHARACTERS, "characters")
        return await self._context.grammar.prepare(kind, value)

    def _admit(self, wanted: Wanted, call: Call, ids: Sequence[int], constraint: Constraint | None) -> None:
        engine, ask = self._context.engine, wanted.ask
        sampling = self._context.guard.check(ids, ask)
        sampling.constraint = constraint
        if wanted.transfer is not None and not engine.facts.kv_connector:
            raise Refusal(
                Code.FAILED_PRECONDITION,
                "kv_transfer_params is set, and the engine has no KV connector; start it with one",
            )
        pin = wanted.rank
        rank = engine.choose_rank(wanted.session_id) if pin is None else engine.pinned_rank("dp_rank", pin)
        sink, rich = wanted.answer(ids, sampling)
        transfer = wanted.transfer
        request = Request(
            wanted.request_id,
            kept_ids(ids, wanted.keep_prompt),
            call,
            sink,
            stream=wanted.stream,
            arrived=wanted.arrived,
            stop_ids=sampling.stop_token_ids,
            keep_stop_text=wanted.keep_stop_text,
            keep_prompt=wanted.keep_prompt,
            receiving=transfer is not None and bool(transfer.get("do_remote_prefill")),
        )
        samples = ask.n or 1
        sent = wire_ids(ids, samples)
        calls: list[EngineCall] = [
            GenerateCall(
                wire_id="",
                prompt_token_ids=sent,
                sampling=sample_of(sampling, index),
                arrival_time=wanted.arrived,
                priority=ask.priority or 0,
                cache_salt=wanted.cache_salt or None,
                session_id=wanted.session_id or None,
                adapter=wanted.adapter,
                transfer_params=transfer,
                stream=wanted.stream,
            )
            for index in range(samples)
        ]
        engine.submit(request, rank, calls, rich)
        table = engine.table
        call.on_cancel = lambda reason: table.cancel(request)
        call.on_blocked = partial(table.hold, request)
        call.on_writable = partial(table.resume, request)


def sample_of(sampling: Sampling, index: int) -> Sampling:
    """The sampling of sample `index`: its own seed, as vLLM derives it, so that seeded samples differ."""
    if index == 0 or sampling.seed is None:
        return sampling
    return msgspec.structs.replace(sampling, seed=sampling.seed + index)


def whole_numbers(value: Any, depth: int = 0) -> Any:
    """A JSON-like value out of a protobuf Struct, whose numbers are all doubles: whole ones become integers again."""
    if depth > MAX_TRANSFER_DEPTH:
        raise invalid("the depth of kv_transfer_params", depth, f"at most {MAX_TRANSFER_DEPTH} levels")
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < 1 << 53 else value
    if isinstance(value, dict):
        return {name: whole_numbers(one, depth + 1) for name, one in value.items()}
    if isinstance(value, list):
        return [whole_numbers(one, depth + 1) for one in value]
    return value
