"""The simulated engine against the real vLLM 0.32: its decoders judge ours, and read what we send."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

from bridge.plugins.sim.requests import InputDied, decode_add
from tests.sim.cases import DECODABLE, REQUESTS, UNDECODABLE
from tests.sim.conftest import Start
from tests.sim.front_end import STATS, add_request


class Judge:
    """vLLM's own decoders in vLLM's own Python: a word and bytes in, one line out."""

    def __init__(self, python: Path) -> None:
        self._process = subprocess.Popen(
            [str(python), str(Path(__file__).with_name("vllm_judge.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def ask(self, word: str, payload: bytes) -> str:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(f"{word} {payload.hex()}\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("verdict "):  # vLLM logs to the same stream
                return line.removeprefix("verdict ").rstrip()
        raise AssertionError("vLLM's Python ended")

    def close(self) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


@pytest.fixture(scope="module")
def judge(vllm_python: Path) -> Iterator[Judge]:
    """vLLM 0.32's decoders."""
    made = Judge(vllm_python)
    yield made
    made.close()


def cases() -> list[tuple[str, bytes, bool]]:
    """(name, ADD payload, whether it decodes)."""
    found = [(repr(sampling), add_request("a", [5], sampling), True) for sampling in DECODABLE]
    found += [(repr(sampling), add_request("a", [5], sampling), False) for sampling in UNDECODABLE]
    for fields, decodes in REQUESTS:
        arguments: dict[str, Any] = {"request_id": "a", "prompt": [5], **fields}
        found.append((repr(fields), add_request(**arguments), decodes))
    payloads = [(name, msgpack.packb(request), decodes) for name, request, decodes in found]
    whole = add_request("a", [5], {})
    payloads += [(f"{length} elements", msgpack.packb(whole[:length]), length >= 9) for length in (0, 1, 8, 9, 14)]
    payloads.append(("a longer tail", msgpack.packb([*whole, "later", {}]), True))
    payloads += [("no msgpack", b"\xc1", False), ("a map", msgpack.packb({}), False), ("nothing", b"", False)]
    return payloads


@pytest.mark.parametrize(("payload", "decodes"), [pytest.param(*case[1:], id=case[0]) for case in cases()])
def test_the_decoder_takes_or_refuses(payload: bytes, decodes: bool) -> None:
    if decodes:
        decode_add(payload)
    else:
        with pytest.raises(InputDied):
            decode_add(payload)


def test_vllms_own_decoder_takes_and_refuses_the_same(judge: Judge) -> None:
    verdicts = {name: judge.ask("add", payload) for name, payload, _ in cases()}
    wrong = {name: verdicts[name] for name, _, decodes in cases() if (verdicts[name] == "ok") != decodes}
    assert not wrong


def test_vllms_own_decoder_reads_what_the_simulated_engine_sends(start: Start, judge: Judge) -> None:
    front = start("--eos-after", "20")
    prompt = list(range(100, 140))
    front.add("a", prompt, {"max_tokens": 30, "_eos_token_id": 2}, trace_headers={"traceparent": "00-1"})
    front.add("b", prompt, {"max_tokens": None})
    front.send(3, msgpack.packb([0, 77, "get_supported_tasks", []]))
    payloads = []
    while (payload := front.receive_raw(0.5)) is not None:
        payloads.append(payload)
    ready = judge.ask("ready", msgpack.packb(front.ready[0]))
    assert "max_model_len=32768" in ready and "vllm_version='0.32.0'" in ready
    read = [judge.ask("outputs", payload) for payload in payloads]
    joined = "\n".join(read)
    for wanted in (
        "finish_reason=<FinishReason.STOP: 0>",
        "finish_reason=<FinishReason.ERROR: 3>",
        "PrefillStats(num_prompt_tokens=40, num_computed_tokens=40",
        "EngineCoreEvent(type=<EngineCoreEventType.SCHEDULED: 2>",
        "trace_headers={'traceparent': '00-1'}",
        "UtilityOutput(call_id=77",
        "SchedulerStats(num_running_reqs=1",
    ):
        assert wanted in joined, wanted
    messages = [msgpack.unpackb(payload, strict_map_key=False) for payload in payloads]
    assert [bool(message[STATS]) for message in messages] == ["SchedulerStats(" in line for line in read]
