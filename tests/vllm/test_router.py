"""The real vllm-router in front of the bridge and a real vLLM engine, beside the real smg in front of the same bridge."""

from __future__ import annotations

import http.client
import json
import threading
import time
import urllib.error
import urllib.parse
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.gateways import get_json, post_events, post_json, vllm_router
from tests.running import Worker, unused_port
from tests.vllm.conftest import CONTRACTS, ENGINE_FLAGS

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


def chat(**more: object) -> dict[str, object]:
    return {"model": "smol", "messages": QUESTION, "temperature": 0, "max_tokens": 24, **more}


def streamed(base: str, body: dict[str, object]) -> tuple[list[str], str]:
    """(pieces of text, finish reason) of a streamed chat."""
    choices = [event["choices"][0] for event in post_events(f"{base}/v1/chat/completions", body) if event["choices"]]
    return [one["delta"].get("content") or "" for one in choices], choices[-1]["finish_reason"]


def test_the_router_lists_the_served_model(router: str) -> None:
    assert [model["id"] for model in get_json(f"{router}/v1/models")["data"]] == ["smol"]
    info = get_json(f"{router}/get_server_info")
    assert info["engine_version"].startswith("0.32.0") and info["max_model_len"] == 1024


def test_chat_answers_paris(router: str) -> None:
    reply = post_json(f"{router}/v1/chat/completions", chat())
    choice, usage = reply["choices"][0], reply["usage"]
    assert "Paris" in choice["message"]["content"] and choice["finish_reason"] == "stop"
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] > 0


def test_streamed_chat_is_the_same_text(router: str) -> None:
    whole = post_json(f"{router}/v1/chat/completions", chat())["choices"][0]["message"]["content"]
    pieces, finish = streamed(router, chat())
    assert "".join(pieces) == whole and finish == "stop"
    assert len([piece for piece in pieces if piece]) > 3, "the answer did not come in pieces"


def test_completions_of_token_ids(router: str, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("The capital of France is").ids
    body = {"model": "smol", "prompt": ids, "temperature": 0, "max_tokens": 12}
    whole = post_json(f"{router}/v1/completions", body)["choices"][0]
    assert "Paris" in whole["text"] and whole["finish_reason"] == "length"


@pytest.mark.parametrize("word", ["France", "is Par"])
def test_a_stop_string_ends_and_is_not_shown(router: str, word: str) -> None:
    expected = "The capital of France is Paris.".partition(word)[0]
    reply = post_json(f"{router}/v1/chat/completions", chat(stop=[word]))["choices"][0]
    assert reply["message"]["content"] == expected and reply["finish_reason"] == "stop"
    pieces, finish = streamed(router, chat(stop=[word]))
    assert "".join(pieces) == expected and finish == "stop"


def test_a_json_schema_shapes_the_answer(router: str) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
    body = chat(response_format=wanted, max_tokens=80)
    answer = json.loads(post_json(f"{router}/v1/chat/completions", body)["choices"][0]["message"]["content"])
    assert set(answer) == {"city", "population"} and isinstance(answer["population"], int)
    assert json.loads("".join(streamed(router, body)[0])) == answer


def test_a_limit_above_the_context_is_no_error(router: str) -> None:
    reply = post_json(f"{router}/v1/chat/completions", chat(max_tokens=100000))
    assert reply["choices"][0]["finish_reason"] == "stop"


def test_a_model_that_is_not_served_is_an_error_of_the_client(router: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as error:
        post_json(f"{router}/v1/chat/completions", chat(model="nope"))
    assert 400 <= error.value.code < 500
    error.value.close()


def test_a_client_that_disconnects_frees_the_engine(router: str, served: Worker) -> None:
    served.wait_idle(5)
    address = urllib.parse.urlparse(router)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=30)
    body = json.dumps(chat(max_tokens=900, stream=True, ignore_eos=True))
    connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    reply = connection.getresponse()
    reply.readline()
    assert served.running() == 1
    connection.close()
    reply.close()
    served.wait_idle(1.0)


def test_both_gateways_at_once_get_the_same_answers(router: str, smg: str) -> None:
    answers: dict[tuple[str, int], str] = {}

    def ask(base: str, index: int) -> None:
        answers[base, index] = "".join(streamed(base, chat(max_tokens=16 + index))[0])

    threads = [threading.Thread(target=ask, args=(base, index)) for base in (router, smg) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(answers) == 8
    for index in range(4):
        assert answers[router, index] == answers[smg, index] != ""


def test_two_workers_share_and_one_may_die(
    router_binary: Path, served: Worker, vllm_python: Path, smollm2: Path, tmp_path: Path
) -> None:
    """Streams of the worker that dies end, and every later request is answered by the one that lives."""
    port = unused_port()
    command = [vllm_python, "-m", "bridge", "serve", "vllm", smollm2, "--port", port, *CONTRACTS]
    with Worker([*command, "--served-model-name", "smol", *ENGINE_FLAGS], port, tmp_path / "second.log") as second:
        second.wait_until_serving()
        with vllm_router(router_binary, smollm2, tmp_path / "router.log", served, second) as router:
            expected = streamed(router.base, chat())[0]
            long = chat(max_tokens=900, ignore_eos=True)
            ends: list[str] = []

            def run() -> None:
                try:
                    ends.append(str(streamed(router.base, long)[1]))
                except (OSError, http.client.HTTPException, ValueError, KeyError, IndexError) as error:
                    ends.append(type(error).__name__)

            threads = [threading.Thread(target=run) for _ in range(2)]
            for thread in threads:
                thread.start()
            _until(lambda: served.running() == 1 and second.running() == 1, 10)
            for process in second.tree():
                process.kill()
            for thread in threads:
                thread.join(60)
            assert ends.count("length") == 1 and len(ends) == 2, ends
            for _ in range(6):
                assert "".join(streamed(router.base, chat())[0]) == "".join(expected)


def _until(condition: Callable[[], bool], limit_s: float) -> None:
    until = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < until, "it did not come about"
        time.sleep(0.05)
