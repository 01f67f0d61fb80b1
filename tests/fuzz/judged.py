"""A run without an engine: cases go through a real front end, and vLLM's own classes judge every ADD and every case."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import msgspec
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from tests.fuzz import answers, poison
from tests.fuzz.captured import ABORT, ADD, SLOT, UTILITY, Captured
from tests.fuzz.cases import VALID, Case, batches
from tests.fuzz.client import Answer, Client
from tests.fuzz.fields import Model
from tests.fuzz.make import GENERATE
from tests.fuzz.refused import CONSTRAINTS
from tests.fuzz.report import Report, Surprise
from tests.fuzz.vllm_judge import Question, Verdict
from tests.fuzz.vllm_python import Companion, Judge

BATCH = 200
PROMPT, SAMPLING, CLIENT_INDEX = 1, 3, 11
"""Positions in an EngineCoreRequest (vLLM 0.27 to 0.33)."""

STRICTER: Sequence[tuple[str, str]] = (
    (r"min_tokens is \d+; it must be 0 with \d+ stop", "the newer model runner dies of more than 128 ids held back"),
    (r"the number of characters in request_id is ", "an id is repeated in messages and kept in tables"),
    (f"({CONSTRAINTS}) cannot be enforced: it needs the backend", "an engine has one backend, vLLM checks for any"),
    (f"({CONSTRAINTS}) cannot be enforced: no token .* can begin it", "the request would never get a token"),
    (r"kv_transfer_params_json is .*; it must be a JSON object", "nested so deeply that a decoder may give up on it"),
    (r"logit_bias is ", "not a number, or more than 1024 entries: vLLM makes -100 of NaN"),
)
"""What the bridge refuses and vLLM's front end takes: how the refusal begins, and why."""


@dataclass
class Asked:
    """A case, its answer, and the ADDs it led to."""

    case: Case
    answer: Answer
    adds: list[bytes] = field(default_factory=list)


class Judged:
    """One run. The front end takes the engine for one with a KV connector, so that transfer parameters are judged too."""

    def __init__(self, judge: Judge, companion: Companion) -> None:
        facts = companion.facts
        self._judge = judge
        self._grammar = companion.grammar
        self._facts = msgspec.structs.replace(facts, kv_connector="NixlConnector")
        self.model = Model(
            vocab_size=facts.vocab_size, max_model_len=facts.max_model_len, max_logprobs=facts.max_logprobs
        )
        self.report = Report()
        self._wire_ids: set[str] = set()
        self._adds = 0

    async def run(self, folder: Path, seed: int, count: int, kinds: Sequence[str], only: int | None = None) -> Report:
        """`folder` is short and private. With `only`, nothing but the batch that holds this case."""
        started = time.monotonic()
        async with Captured(folder, self._facts, self._grammar) as captured:
            client = Client("127.0.0.1", captured.port)
            waiting: asyncio.Task[None] | None = None
            for batch in batches(seed, count, BATCH, kinds, self.model):
                if only is not None and only not in range(batch[0].number, batch[-1].number + 1):
                    continue
                asked = await self._send(captured, client, batch)
                if waiting is not None:
                    await waiting
                waiting = asyncio.create_task(self._weigh(asked))
            if waiting is not None:
                await waiting
            client.close()
            self.report.surprises += [Surprise(f"the front end says {death}") for death in captured.deaths]
        self._note(time.monotonic() - started)
        return self.report

    async def _send(self, captured: Captured, client: Client, batch: list[Case]) -> list[Asked]:
        """One case after the other, so that each ADD belongs to one; at the end a good one, behind all that was sent."""
        peer = captured.peer
        start, goods = len(peer.messages), 0
        asked = []
        for case in batch:
            before = len(peer.messages)
            answer = await client.call(case)
            adds = peer.adds(before)
            if answer.how != "status" or case is batch[-1]:
                goods += 1
                good = await client.call(_good())
                *adds, _ = peer.adds(before)
                if (good.how, good.status) != ("status", 0):
                    self.report.surprises.append(Surprise(f"after case {case.number} a good request got {good}"))
            asked.append(Asked(case, answer, adds))
        known = sum(len(one.adds) for one in asked)
        if len(peer.adds(start)) != known + goods:
            numbers = f"{batch[0].number} to {batch[-1].number}"
            self.report.surprises.append(Surprise(f"ADDs came late, after refusals: one of the cases {numbers}"))
        self._check_frames(peer.messages[start:])
        return asked

    def _check_frames(self, messages: Sequence[list[bytes]]) -> None:
        """What no ADD may be, whatever the request: each of these wedges or kills an engine without a word."""
        for frames in messages:
            if frames[0] not in (ADD, ABORT, UTILITY) or len(frames) != 2:
                self.report.surprises.append(Surprise(f"sent frames of type {frames[0]!r}, {len(frames)} of them"))
            elif frames[0] == ADD:
                self._adds += 1
                content = msgpack.unpackb(frames[1], strict_map_key=False)
                wire_id = content[0]
                if wire_id in self._wire_ids:
                    self.report.surprises.append(Surprise(f"sent the wire id {wire_id} twice"))
                if content[CLIENT_INDEX] != SLOT:
                    self.report.surprises.append(Surprise(f"sent the client index {content[CLIENT_INDEX]}"))
                outside = [token for token in _ids(content) if not 0 <= token < self.model.vocab_size]
                if outside:
                    self.report.surprises.append(Surprise(f"sent ids outside the vocabulary in {wire_id}: {outside}"))
                self._wire_ids.add(wire_id)

    async def _weigh(self, asked: list[Asked]) -> None:
        generations = [one for one in asked if one.case.method == GENERATE]
        verdicts = await self._judge.ask([Question(one.case.number, one.case.message, one.adds) for one in generations])
        by_number = {verdict.number: verdict for verdict in verdicts}
        for one in asked:
            case, answer = one.case, one.answer
            surprise = answers.surprise(case, answer)
            verdict = by_number.get(case.number)
            if surprise is None and verdict is not None:
                surprise = _disagreement(one, verdict)
            self.report.add(case, answers.outcome(case, answer), surprise)

    def _note(self, seconds: float) -> None:
        report = self.report
        valid = report.of(VALID) - report.of(VALID, answers.BY_NAME, answers.CANCELLED)
        accepted = report.of(VALID, answers.ACCEPTED)
        report.notes.append(
            f"{sum(report.counts.values())} requests in {seconds:.0f} s, {self._adds} ADDs judged by vLLM"
        )
        report.notes.append(
            f"valid: {accepted} of {valid} accepted, {report.of(VALID, answers.BY_NAME)} refused by name"
        )


def _ids(content: Sequence[Any]) -> Iterator[int]:
    """Every id of an ADD that a worker looks up or indexes the logits with."""
    sampling = content[SAMPLING]
    yield from content[PROMPT]
    for name in ("stop_token_ids", "_all_stop_token_ids", "logit_bias", "allowed_token_ids"):
        yield from sampling.get(name) or ()
    for word in sampling.get("_bad_words_token_ids") or ():
        yield from word


def _disagreement(one: Asked, verdict: Verdict) -> str | None:
    """Where the bridge and vLLM do not see a case alike."""
    case, answer = one.case, one.answer
    if verdict.undecodable:
        return f"vLLM's engine would wedge: {verdict.undecodable[0]}"
    outcome = answers.outcome(case, answer)
    if outcome == answers.CANCELLED:
        return None
    if outcome == answers.ACCEPTED:
        if verdict.refusal is not None:
            return f"accepted, but vLLM says {verdict.refusal}"
        if verdict.differs:
            return f"not what vLLM would send: {'; '.join(verdict.differs)}"
        return None
    if one.adds:
        return "refused after an ADD was sent"
    if verdict.refusal is None and case.message is not None and outcome != answers.BY_NAME:
        return None if any(re.match(begins, answer.text) for begins, _ in STRICTER) else f"vLLM takes it; {answer.text}"
    if case.kind == VALID and verdict.refusal is not None:
        return f"meant to be valid, but vLLM says {verdict.refusal}"
    return None


def _good() -> Case:
    request = pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[5, 6, 7]))
    message = request.SerializeToString()
    return Case(number=-1, kind=VALID, name="good", method=GENERATE, body=poison.framed(message), message=message)
