"""Requests that `vllm.Inference` is compared with vllm-rs by: fields of vllm.GenerateRequest, greedy unless they say."""

from __future__ import annotations

from typing import Any

from tests.gateways import chat_text

Case = tuple[str, dict[str, Any]]

IDS = {"output_text": False, "output_token_ids": True}
BOTH = {"output_token_ids": True}

PROMPTS = (
    "The history of the lighthouse begins",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at",
    "In 1969, the crew of",
    "A binary search tree is",
    "La capitale de la France",
    "1, 1, 2, 3, 5, 8,",
    "日本の首都は",
    "Emoji: 😀😃😄😁",
)
QUESTIONS = (
    "What is the capital of France?",
    "What is an atom?",
    "What is bread made of?",
)
SCHEMA = (
    '{"type":"object","properties":{"city":{"type":"string","maxLength":12},"warm":{"type":"boolean"}},'
    '"required":["city","warm"],"additionalProperties":false}'
)
GRAMMAR = 'root ::= "yes" | "no" | "perhaps"'
LONG = list(range(2000, 2300))
FULL = list(range(2000, 3000))
"""Leaves room for 24 tokens."""


def stopping(count: int, **more: Any) -> dict[str, Any]:
    return {"max_new_tokens": count, **more}


def _plain() -> list[Case]:
    cases = [(f"ids {text[:12]!r}", {"text": text, "stopping": stopping(20), "response": IDS}) for text in PROMPTS[:5]]
    cases += [(f"text {text[:12]!r}", {"text": text, "stopping": stopping(28)}) for text in PROMPTS]
    cases += [
        (f"chat {text[:14]!r}", {"text": chat_text(text), "stopping": stopping(48), "response": BOTH})
        for text in QUESTIONS
    ]
    return cases


def _stops() -> list[Case]:
    paris = chat_text(QUESTIONS[0])
    wanted: list[tuple[str, dict[str, Any]]] = [
        ("whole word", {"stop_strings": ["France"]}),
        ("part of a token", {"stop_strings": ["ari"]}),
        ("over two tokens", {"stop_strings": ["is Par"]}),
        ("first of two", {"stop_strings": ["Paris", "of"]}),
        ("two in one token", {"stop_strings": ["ris", "Par"]}),
        ("included", {"stop_strings": ["France"], "include_stop_strings": True}),
        ("included, part of a token", {"stop_strings": ["ari"], "include_stop_strings": True}),
        ("never", {"stop_strings": ["no such words"]}),
        ("held back by min", {"stop_strings": ["capital", "Paris"], "min_new_tokens": 4}),
        ("token id", {"stop_token_ids": [7042]}),
        ("token id included", {"stop_token_ids": [7042], "include_stop_strings": True}),
        ("EOS as a stop id", {"stop_token_ids": [2]}),
        ("EOS ignored", {"ignore_eos": True}),
        ("EOS held back", {"min_new_tokens": 16}),
    ]
    cases = [
        (f"stop: {name}", {"text": paris, "stopping": stopping(24, **more), "response": BOTH}) for name, more in wanted
    ]
    cases.append(("stop: no text", {"text": paris, "stopping": stopping(24, stop_strings=["France"]), "response": IDS}))
    special = {**BOTH, "skip_special_tokens": False}
    cases.append(("special tokens", {"text": paris, "stopping": stopping(14, ignore_eos=True), "response": special}))
    cases.append(("special EOS", {"text": paris, "stopping": stopping(24), "response": special}))
    return cases


def _scored() -> list[Case]:
    text = PROMPTS[0]
    seeded = {"temperature": 1.3, "sampling": {"seed": 11}}
    cases: list[Case] = []
    for name, response in (
        ("logprobs", {"output_logprobs": True}),
        ("logprobs, 1 candidate", {"output_logprobs": True, "output_candidates": {"top_n": 1}}),
        ("logprobs, 5 candidates", {"output_logprobs": True, "output_candidates": {"top_n": 5}}),
        ("candidates alone", {"output_candidates": {"top_n": 3}}),
        ("prompt logprobs", {"prompt_logprobs": True, "prompt_token_ids": True}),
        ("prompt logprobs, 3 candidates", {"prompt_logprobs": True, "prompt_candidates": {"top_n": 3}}),
        ("both logprobs", {"prompt_logprobs": True, "output_logprobs": True, "output_candidates": {"top_n": 2}}),
    ):
        cases.append((name, {"text": text, "stopping": stopping(8), "response": {**BOTH, **response}}))
        cases.append(
            (f"{name}, sampled", {"text": text, "stopping": stopping(8), "response": {**BOTH, **response}, **seeded})
        )
    return cases


def _sampled() -> list[Case]:
    cases: list[Case] = []
    for number, sampling in enumerate(
        ({}, {"top_p": 0.8}, {"top_k": 20}, {"min_p": 0.1}, {"top_p": 0.9, "top_k": 50, "min_p": 0.02})
    ):
        fields = {"temperature": 0.9, "sampling": {"seed": 100 + number, **sampling}}
        cases.append(
            (f"sampled {sampling}", {"text": PROMPTS[1], "stopping": stopping(20), "response": BOTH, **fields})
        )
    cases.append(
        (
            "default temperature",
            {"text": PROMPTS[1], "stopping": stopping(16), "sampling": {"seed": 7}, "response": IDS},
        )
    )
    for name, decoding in (
        ("presence", {"presence_penalty": 1.5}),
        ("frequency", {"frequency_penalty": 1.5}),
        ("repetition", {"repetition_penalty": 1.3}),
        ("bias", {"logit_bias": {100: 100.0}}),
        ("bias against", {"logit_bias": {7042: -100.0}}),
        ("allowed", {"allowed_token_ids": [100, 101, 102]}),
    ):
        fields = {"text": PROMPTS[5], "stopping": stopping(20), "response": BOTH, "decoding": decoding}
        cases.append((f"decoding: {name}", fields))
    return cases


def _shaped() -> list[Case]:
    paris = chat_text(QUESTIONS[0])
    return [
        (f"shape: {name}", {"text": paris, "stopping": stopping(60), "response": BOTH, "decoding": decoding})
        for name, decoding in (
            ("json", {"json": SCHEMA}),
            ("regex", {"regex": "[a-c]{3}"}),
            ("grammar", {"grammar": GRAMMAR}),
            ("no json object", {"json_object": False}),
        )
    ]


def _prompts() -> list[Case]:
    ids = {"token_ids": {"ids": LONG}, "stopping": stopping(4)}
    return [
        ("truncated", {**ids, "truncate_prompt_tokens": 20, "response": {**IDS, "prompt_token_ids": True}}),
        ("truncated text", {"text": PROMPTS[0] * 5, "truncate_prompt_tokens": 7, "stopping": stopping(4)}),
        ("cached", {**ids, "response": IDS}),
        ("cache passed by", {**ids, "kv": {"bypass_prefix_cache": True}, "response": IDS}),
        ("no output but counts", {**ids, "response": {"output_text": False}}),
        ("priority and session", {**ids, "priority": -3, "session_id": "s", "response": IDS}),
        ("one token", {"token_ids": {"ids": [504]}, "stopping": stopping(1)}),
        ("a limit above the context", {"token_ids": {"ids": FULL}, "stopping": stopping(100000), "response": IDS}),
        ("no limit", {"text": chat_text(QUESTIONS[0]), "response": IDS}),
    ]


EQUAL: list[Case] = [*_plain(), *_stops(), *_scored(), *_sampled(), *_shaped(), *_prompts()]
"""Answered alike, field by field."""

PROMPT = {"token_ids": {"ids": [504, 3575]}, "stopping": stopping(2)}

REFUSED: list[Case] = [
    ("no prompt", {}),
    ("an empty prompt", {"token_ids": {"ids": []}}),
    ("an empty text", {"text": ""}),
    ("a model that is not served", {**PROMPT, "model": "nope"}),
    ("an id outside the vocabulary", {"token_ids": {"ids": [1000000]}}),
    ("a prompt as long as the context", {"token_ids": {"ids": [5] * 1024}}),
    ("a prompt longer than the context", {"token_ids": {"ids": [5] * 2000}}),
    ("a truncation above the context", {**PROMPT, "truncate_prompt_tokens": 100000}),
    ("temperature 3", {**PROMPT, "temperature": 3.0}),
    ("a negative temperature", {**PROMPT, "temperature": -1.0}),
    ("top_p 1.5", {**PROMPT, "sampling": {"top_p": 1.5}}),
    ("min_p 2", {**PROMPT, "sampling": {"min_p": 2.0}}),
    ("presence penalty 3", {**PROMPT, "decoding": {"presence_penalty": 3.0}}),
    ("a bias outside the vocabulary", {**PROMPT, "decoding": {"logit_bias": {1000000: 1.0}}}),
    ("an allowed id outside the vocabulary", {**PROMPT, "decoding": {"allowed_token_ids": [1000000]}}),
    ("an adapter without LoRA", {**PROMPT, "lora_name": "x"}),
    ("min above max", {**PROMPT, "stopping": stopping(2, min_new_tokens=5)}),
    ("a schema that is none", {**PROMPT, "decoding": {"json": "{"}}),
    ("too many candidates", {**PROMPT, "response": {"output_logprobs": True, "output_candidates": {"top_n": 500}}}),
]
"""Refused alike: the same status code."""
