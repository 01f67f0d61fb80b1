"""The real smg gateway in front of the bridge and a real vLLM engine."""

from __future__ import annotations

import http.client
import json
import urllib.parse

from tests.gateways import get_json, post_events, post_json
from tests.running import Worker

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def chat(**more: object) -> dict[str, object]:
    return {"model": "smol", "messages": QUESTION, "temperature": 0, "max_tokens": 24, **more}


def test_the_gateway_lists_the_served_model(smg: str) -> None:
    assert [model["id"] for model in get_json(f"{smg}/v1/models")["data"]] == ["smol"]


def test_chat_answers_paris(smg: str) -> None:
    reply = post_json(f"{smg}/v1/chat/completions", chat())
    choice, usage = reply["choices"][0], reply["usage"]
    assert "Paris" in choice["message"]["content"]
    assert choice["finish_reason"] == "stop"
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] > 0


def test_streamed_chat_is_the_same_text(smg: str) -> None:
    whole = post_json(f"{smg}/v1/chat/completions", chat())["choices"][0]["message"]["content"]
    events = list(post_events(f"{smg}/v1/chat/completions", chat()))
    pieces = [event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"]]
    assert "".join(pieces) == whole
    assert len([piece for piece in pieces if piece]) > 3, "the answer did not come in pieces"
    assert [event["choices"][0]["finish_reason"] for event in events if event["choices"]][-1] == "stop"


def test_completions_whole_and_streamed(smg: str) -> None:
    body = {"model": "smol", "prompt": "The capital of France is", "temperature": 0, "max_tokens": 12}
    whole = post_json(f"{smg}/v1/completions", body)["choices"][0]
    assert "Paris" in whole["text"] and whole["finish_reason"] == "length"
    pieces = [event["choices"][0]["text"] for event in post_events(f"{smg}/v1/completions", body) if event["choices"]]
    assert "".join(pieces) == whole["text"] and len(pieces) > 3


def test_a_stop_string_ends_and_is_not_shown(smg: str) -> None:
    reply = post_json(f"{smg}/v1/chat/completions", chat(stop=["France"]))["choices"][0]
    assert reply["message"]["content"] == "The capital of " and reply["finish_reason"] == "stop"
    events = list(post_events(f"{smg}/v1/chat/completions", chat(stop=["France"])))
    pieces = [event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"]]
    assert "".join(pieces) == "The capital of "


def test_logprobs_of_each_token_once(smg: str) -> None:
    whole = post_json(f"{smg}/v1/chat/completions", chat(logprobs=True, top_logprobs=3))
    entries = whole["choices"][0]["logprobs"]["content"]
    assert len(entries) >= whole["usage"]["completion_tokens"] - 1
    for entry in entries:
        assert len(entry["top_logprobs"]) == 3
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"] <= 0, "greedy takes the likeliest"
    streamed = []
    for event in post_events(f"{smg}/v1/chat/completions", chat(logprobs=True, top_logprobs=3)):
        for choice in event["choices"]:
            streamed += (choice.get("logprobs") or {}).get("content") or []
    assert [entry["token"] for entry in streamed][: len(entries)] == [entry["token"] for entry in entries]
    assert len(streamed) <= len(entries) + 1, "a token's log-probability came twice"


def test_two_samples_of_one_request(smg: str) -> None:
    body = chat(n=2, temperature=0.9, seed=7)
    choices = post_json(f"{smg}/v1/chat/completions", body)["choices"]
    assert sorted(choice["index"] for choice in choices) == [0, 1]
    assert choices[0]["message"]["content"] != choices[1]["message"]["content"]
    assert sorted(post_json(f"{smg}/v1/chat/completions", body)["choices"], key=lambda one: one["index"]) == sorted(
        choices, key=lambda one: one["index"]
    ), "seeded samples repeat"


def test_a_json_schema_shapes_the_answer(smg: str) -> None:
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 20},
            "population": {"type": "integer", "minimum": 0, "maximum": 9999},
        },
        "required": ["city", "population"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}}
    reply = post_json(f"{smg}/v1/chat/completions", chat(response_format=wanted, max_tokens=80))
    answer = json.loads(reply["choices"][0]["message"]["content"])
    assert set(answer) == {"city", "population"} and isinstance(answer["population"], int)


def test_a_forced_tool_is_called_with_fitting_arguments(smg: str) -> None:
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "weather", "description": "Weather now", "parameters": parameters}}
    choice = {"type": "function", "function": {"name": "weather"}}
    reply = post_json(f"{smg}/v1/chat/completions", chat(tools=[tool], tool_choice=choice, max_tokens=80))
    (called,) = reply["choices"][0]["message"]["tool_calls"]
    assert called["function"]["name"] == "weather"
    assert set(json.loads(called["function"]["arguments"])) == {"city"}


def test_a_client_that_disconnects_frees_the_engine(smg: str, served: Worker) -> None:
    served.wait_idle(5)
    address = urllib.parse.urlparse(smg)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=30)
    body = json.dumps(chat(max_tokens=900, stream=True, ignore_eos=True))
    connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    reply = connection.getresponse()
    reply.readline()
    assert served.running() == 1
    connection.close()
    reply.close()
    served.wait_idle(1.0)
