"""All of vLLM's generation through its own HTTP server and through the bridge: ids, text, ends, log-probabilities, usage.

A case is the same sampling values in both vocabularies. Text is what a gateway makes of our token ids: decoded with the
model's tokenizer, without the token that stopped the engine, cut at the stop string we name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from tokenizers import Tokenizer

from tests.gateways import chat_text, post_json
from tests.running import Worker

PROMPTS = {
    "france": chat_text("What is the capital of France?"),
    "story": "Once upon a time, in a village by the sea,",
    "count": "One, two, three, four,",
    "unicode": "Le café du quartier était fermé, car l'été",
    "code": "def add(a, b):\n    return",
}
GREEDY = {"temperature": 0.0}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
GRAMMAR = 'root ::= "SELECT " column " FROM " table\ncolumn ::= "id" | "name"\ntable ::= "users" | "orders"'


@dataclass
class Case:
    """`shared` reads the same in both; `http` and `grpc` are what differs."""

    name: str
    prompt: str
    shared: dict[str, Any]
    http: dict[str, Any] = field(default_factory=dict)
    grpc: dict[str, Any] = field(default_factory=dict)


def cases() -> Iterator[Case]:
    for index, prompt in enumerate(PROMPTS):
        seeded = {"temperature": 0.8, "top_p": 0.9, "seed": 40 + index, "max_tokens": 12}
        greedy = {**GREEDY, "max_tokens": 12}
        for stop in (["."], [",", " a"], ["ris", "ee"], [" the ", "\n\n"], ["é", "…"], ["never to be seen"]):
            yield Case(f"stop {stop} {prompt}", prompt, {**greedy, "max_tokens": 20, "stop": stop})
        kept = {**greedy, "stop": [","], "include_stop_str_in_output": True}
        yield Case(f"stop kept {prompt}", prompt, kept)
        yield Case(f"stop after min_tokens {prompt}", prompt, {**greedy, "stop": [",", " "], "min_tokens": 5})
        yield Case(f"stop seeded {prompt}", prompt, {**seeded, "stop": ["e", "zz"]})
        yield Case(f"n=2 {prompt}", prompt, {**seeded, "n": 2})
        yield Case(f"n=3 with stop {prompt}", prompt, {**seeded, "n": 3, "stop": [" a"]})
        for count in (0, 5):
            yield Case(f"logprobs {count} {prompt}", prompt, {**greedy, "logprobs": count})
            yield Case(
                f"prompt_logprobs {count} {prompt}", prompt, {**greedy, "max_tokens": 2, "prompt_logprobs": count}
            )
        yield Case(f"logprobs 0 seeded {prompt}", prompt, {**seeded, "logprobs": 0})
        yield Case(f"frequency_penalty {prompt}", prompt, {**greedy, "max_tokens": 20, "frequency_penalty": 1.5})
        yield Case(f"presence_penalty {prompt}", prompt, {**greedy, "max_tokens": 20, "presence_penalty": -0.7})
        yield Case(f"repetition_penalty {prompt}", prompt, {**greedy, "max_tokens": 20, "repetition_penalty": 1.3})
        yield Case(f"min_tokens {prompt}", prompt, {**greedy, "max_tokens": 24, "min_tokens": 20})
        yield Case(f"ignore_eos {prompt}", prompt, {**greedy, "max_tokens": 24, "ignore_eos": True})
        yield Case(f"top_k min_p {prompt}", prompt, {**seeded, "top_k": 20, "min_p": 0.05})
        yield Case(
            f"logit_bias {prompt}", prompt, greedy, _bias({28: 4.0, 30: -100.0}), {"logit_bias": {28: 4.0, 30: -100.0}}
        )
    for prompt in ("france", "story"):
        body = {**GREEDY, "max_tokens": 40}
        yield Case(f"json_schema {prompt}", prompt, body, _structured(json=SCHEMA), {"json_schema": json.dumps(SCHEMA)})
        yield Case(f"regex {prompt}", prompt, body, _structured(regex=r"\d{3}-[a-f]{2}"), {"regex": r"\d{3}-[a-f]{2}"})
        yield Case(f"grammar {prompt}", prompt, body, _structured(grammar=GRAMMAR), {"grammar": GRAMMAR})
        choices = ["yes", "no", "maybe so"]
        choice = pb.ChoiceConstraint(choices=choices)
        yield Case(f"choice {prompt}", prompt, body, _structured(choice=choices), {"choice": choice})


def _bias(bias: dict[int, float]) -> dict[str, Any]:
    return {"logit_bias": {str(token): value for token, value in bias.items()}}


def _structured(**constraint: Any) -> dict[str, Any]:
    return {"structured_outputs": constraint}


CASES = list(cases())


def test_there_are_enough_cases() -> None:
    assert len(CASES) >= 120


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_same_answer(vllm_http: str, served: Worker, tokenizer: Tokenizer, case: Case) -> None:
    ids = tokenizer.encode(PROMPTS[case.prompt]).ids
    body = {"prompt": ids, "return_token_ids": True, "return_tokens_as_token_ids": True, **case.shared, **case.http}
    theirs = post_json(f"{vllm_http}/v1/completions", body)
    params = pb.SamplingParams(**{"skip_special_tokens": True, **case.shared, **case.grpc})
    request = pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=ids), sampling_params=params, stream=True)
    replies = list(served.stub.Generate(request, timeout=120))
    ours = {reply.complete.index: reply.complete for reply in replies if reply.HasField("complete")}
    assert sorted(ours) == list(range(len(theirs["choices"])))
    for choice in theirs["choices"]:
        complete = ours[choice["index"]]
        assert list(complete.output_ids) == choice["token_ids"]
        assert complete.finish_reason == choice["finish_reason"]
        assert matched(complete) == choice["stop_reason"]
        assert text_of(complete, case, tokenizer) == choice["text"]
        if "logprobs" in case.shared:
            same_logprobs(complete.output_logprobs, choice["logprobs"], case.shared["logprobs"])
        if "prompt_logprobs" in case.shared:
            same_prompt_logprobs(
                complete.input_logprobs, choice["prompt_logprobs"], ids, case.shared["prompt_logprobs"]
            )
        chunks_add_up(replies, complete)
    assert {complete.prompt_tokens for complete in ours.values()} == {theirs["usage"]["prompt_tokens"]}
    assert sum(one.completion_tokens for one in ours.values()) == theirs["usage"]["completion_tokens"]


def matched(complete: pb.GenerateComplete) -> str | int | None:
    kind = complete.WhichOneof("matched_stop")
    return getattr(complete, kind) if kind else None


def text_of(complete: pb.GenerateComplete, case: Case, tokenizer: Tokenizer) -> str:
    ids = list(complete.output_ids)
    stop = complete.matched_stop_str
    if complete.finish_reason == "stop" and not stop and not case.shared.get("include_stop_str_in_output"):
        ids.pop()
    text = tokenizer.decode(ids, skip_special_tokens=True)
    if stop:
        end = text.index(stop, _earliest(case, tokenizer, ids))
        text = text[: end + len(stop)] if case.shared.get("include_stop_str_in_output") else text[:end]
    return text


def _earliest(case: Case, tokenizer: Tokenizer, ids: list[int]) -> int:
    """Where a stop string may begin: one that ended within the first min_tokens did not count."""
    least = case.shared.get("min_tokens", 0)
    if not least:
        return 0
    longest = max(map(len, case.shared["stop"]))
    return max(0, len(tokenizer.decode(ids[:least], skip_special_tokens=True)) - longest + 1)


def same_logprobs(ours: pb.OutputLogProbs, theirs: dict[str, Any], count: int) -> None:
    assert list(ours.token_ids) == [int(token.removeprefix("token_id:")) for token in theirs["tokens"]]
    close(ours.token_logprobs, theirs["token_logprobs"])
    if not count:
        assert not ours.top_logprobs
        return
    assert len(ours.top_logprobs) == len(theirs["tokens"])
    for row, expected in zip(ours.top_logprobs, theirs["top_logprobs"], strict=True):
        wanted = {int(token.removeprefix("token_id:")): value for token, value in expected.items()}
        best = sorted(wanted.items(), key=lambda item: -item[1])[:count]
        close(row.values, [value for _, value in best])
        assert set(row.token_ids) <= set(wanted)


def same_prompt_logprobs(
    ours: pb.InputLogProbs, theirs: list[dict[str, Any] | None], ids: list[int], count: int
) -> None:
    assert list(ours.token_ids) == ids
    assert not ours.token_logprobs[0].HasField("value") and theirs[0] is None
    for number in range(1, len(ids)):
        row = theirs[number]
        assert row is not None
        close([ours.token_logprobs[number].value], [row[str(ids[number])]["logprob"]])
        if count:
            best = sorted((entry["logprob"] for entry in row.values()), reverse=True)[:count]
            close(ours.top_logprobs[number].values, best)
    assert len(ours.top_logprobs) == (len(ids) if count else 0)


def close(ours: Any, theirs: list[float]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert math.isclose(one, other, abs_tol=1e-4) or (one < -9000 and other < -9000), (list(ours), theirs)


def chunks_add_up(replies: list[pb.GenerateResponse], complete: pb.GenerateComplete) -> None:
    chunks = [reply.chunk for reply in replies if reply.HasField("chunk") and reply.chunk.index == complete.index]
    assert [token for chunk in chunks for token in chunk.token_ids] == list(complete.output_ids)
    values = [value for chunk in chunks for value in chunk.output_logprobs.token_logprobs]
    assert values == list(complete.output_logprobs.token_logprobs)
    assert [chunk.HasField("input_logprobs") for chunk in chunks[1:]] == [False] * (len(chunks) - 1)
    assert chunks[0].input_logprobs == complete.input_logprobs
    counts = [chunk.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == complete.completion_tokens
