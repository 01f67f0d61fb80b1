"""From a contract's request to the engine: what has to be prepared off the loop, the guard, the admission.

A contract says what it wants in neutral words (`Wanted`) and gets its sink from `answer` once the prompt's ids and the
sampling values are settled.
"""

from __future__ import annotations

import asyncio
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
from bridge.grpc.status import CancelReason, Code, GrpcError
from bridge.guard import Ask
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
    answer: Callable[[list[int], Sampling], Answer]
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

    def submit(self, wanted: Wanted, call: Call) -> None:
        """Admit now, or as soon as what cannot be done on the loop is done; raises `Refusal`."""
        context, ask = self._context, wanted.ask
        context.engine.table  # noqa: B018  (refuses unless up)
        at_most("request_id", wanted.request_id, amounts.REQUEST_ID_CHARACTERS, "characters")
        call.request_id = wanted.request_id
        call.request_id = wanted.request_id
        at_most("stop", ask.stop, amounts.STOP_STRINGS, "strings")
        missing_tokenizer = (wanted.text_out or ask.stop) and context.text.loaded is None
        if wanted.text is not None or missing_tokenizer or wanted.constraint is not None:
            task = asyncio.ensure_future(self._prepare(wanted, call))
            call.on_cancel = partial(_cancel_task, task)
        else:
            self._admit(wanted, call, self._kept(ask, wanted.ids), None)

    async def _prepare(self, wanted: Wanted, call: Call) -> None:
        """Tokenize, read the tokenizer, validate a constraint."""
        context = self._context
        try:
            if wanted.text is None:
                ids = self._kept(wanted.ask, wanted.ids)
            else:
                limit = amounts.CHARACTERS_PER_TOKEN * context.guard.max_model_len
                at_most("text", wanted.text, limit, "characters")
                ids = self._kept(wanted.ask, await context.text.encode(wanted.text))
            if wanted.text_out or wanted.ask.stop:
                await context.text.tokenizer()
            constraint = await self._constraint(wanted.constraint)
            call.on_cancel = None
            self._admit(wanted, call, ids, constraint)
        except GrpcError as error:
            call.fail(error)
        except Exception:
            call.finish(Code.INTERNAL, "the request could not be submitted; see the bridge's log")
            raise
        finally:
            call.connection.flush()

    def _kept(self, ask: Ask, ids: Sequence[int]) -> list[int]:
        """The prompt as a list, cut where that was asked for; raises `Refusal` for too many ids before they are one."""
        guard = self._context.guard
        if ask.truncate_prompt_tokens is not None:
            return list(guard.truncate(ids, ask.truncate_prompt_tokens))
        guard.room(len(ids))
        whole: list[int] = ids[:]  # type: ignore[assignment]  # a quarter faster than list(ids)
        return whole

    async def _constraint(self, wanted: tuple[str, Any] | None) -> Constraint | None:
        if wanted is None:
            return None
        kind, value = wanted
        if kind == "choice":
            at_most("choice", value, amounts.CHOICES, "choices")
        elif kind != "json_object":
            at_most(kind, value, amounts.CONSTRAINT_CHARACTERS, "characters")
        return await self._context.grammar.prepare(kind, value)

    def _admit(self, wanted: Wanted, call: Call, ids: list[int], constraint: Constraint | None) -> None:
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
            ids,
            call,
            sink,
            stream=wanted.stream,
            arrived=wanted.arrived,
            stop_ids=sampling.stop_token_ids,
            keep_stop_text=wanted.keep_stop_text,
            keep_prompt=wanted.keep_prompt,
            receiving=transfer is not None and bool(transfer.get("do_remote_prefill")),
        )
        calls: list[EngineCall] = [
            GenerateCall(
                wire_id="",
                prompt_token_ids=ids,
                sampling=sample_of(sampling, index),
                arrival_time=wanted.arrived,
                priority=ask.priority or 0,
                cache_salt=wanted.cache_salt or None,
                session_id=wanted.session_id or None,
                adapter=wanted.adapter,
                transfer_params=transfer,
                stream=wanted.stream,
            )
            for index in range(ask.n or 1)
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


def _cancel_task(task: asyncio.Future[None], reason: CancelReason) -> None:
    task.cancel()
