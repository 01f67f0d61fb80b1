"""What a gateway is asked, whichever way it reaches the engine."""

from __future__ import annotations

import contextlib
import http.client
import json
import urllib.parse
from collections.abc import Iterator
from typing import Any

from tests.gateways import post_events, post_json

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "population": {"type": "integer", "minimum": 0, "maximum": 9999},
    },
    "required": ["city", "population"],
    "additionalProperties": False,
}


def chat(model: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": QUESTION, "temperature": 0, "max_tokens": 24, **more}


def chat_says_paris(base: str, model: str) -> str:
    """Whole and streamed, the same text, in pieces, with a usage that adds up; the text."""
    reply = post_json(f"{base}/v1/chat/completions", chat(model))
    choice, usage = reply["choices"][0], reply["usage"]
    whole = choice["message"]["content"]
    assert "Paris" in whole and choice["finish_reason"] == "stop"
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] > 0
    events = list(post_events(f"{base}/v1/chat/completions", chat(model)))
    pieces = [event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"]]
    assert "".join(pieces) == whole
    assert len([piece for piece in pieces if piece]) > 3, "the answer did not come in pieces"
    assert [event["choices"][0]["finish_reason"] for event in events if event["choices"]][-1] == "stop"
    return str(whole)


def logprobs_come_once(base: str, model: str) -> int:
    """Each token has its three likeliest; how many tokens have."""
    whole = post_json(f"{base}/v1/chat/completions", chat(model, logprobs=True, top_logprobs=3))
    entries = whole["choices"][0]["logprobs"]["content"]
    assert len(entries) >= whole["usage"]["completion_tokens"] - 1
    for entry in entries:
        assert len(entry["top_logprobs"]) == 3
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"] <= 0, "greedy takes the likeliest"
    return len(entries)


def a_schema_shapes_the_answer(base: str, model: str) -> dict[str, Any]:
    """The answer, which fits the schema."""
    wanted = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
    reply = post_json(f"{base}/v1/chat/completions", chat(model, response_format=wanted, max_tokens=80))
    answer = json.loads(reply["choices"][0]["message"]["content"])
    assert set(answer) == {"city", "population"} and isinstance(answer["population"], int)
    return dict(answer)


@contextlib.contextmanager
def streaming(base: str, model: str) -> Iterator[None]:
    """A long streamed answer, begun; its client disconnects at the end."""
    address = urllib.parse.urlparse(base)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=30)
    body = json.dumps(chat(model, max_tokens=900, stream=True, ignore_eos=True))
    connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    reply = connection.getresponse()
    reply.readline()
    try:
        yield
    finally:
        connection.close()
        reply.close()
