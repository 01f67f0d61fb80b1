"""A real vLLM engine behind `serve`: constraints are enforced, and the companion may die without anybody else noticing."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from tokenizers import Tokenizer

from tests.companion.cases import OLD_TAG, TAG
from tests.running import Worker, unused_port

FLAGS = ("--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "8", "--enforce-eager")
PROMPT = "<|im_start|>user\nTell me about a person, with their age.<|im_end|>\n<|im_start|>assistant\n"
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


class Asker:
    """The engine, and a prompt to give it with constraints."""

    def __init__(self, worker: Worker, tokenizer: Tokenizer) -> None:
        self.worker = worker
        self.tokenizer = tokenizer
        self._prompt = tokenizer.encode(PROMPT).ids
        self._count = 0

    def ask(self, *, tokens: int = 60, **constraint: Any) -> tuple[str, str]:
        """(text, finish reason)."""
        self._count += 1
        request = pb.GenerateRequest(
            request_id=f"c{threading.get_ident()}-{self._count}",
            tokenized=pb.TokenizedInput(input_ids=self._prompt),
            sampling_params=pb.SamplingParams(temperature=0.0, max_tokens=tokens, **constraint),
        )
        (answer,) = self.worker.stub.Generate(request, timeout=60)
        return self.tokenizer.decode(list(answer.complete.output_ids)), answer.complete.finish_reason

    def companion(self) -> psutil.Process:
        """The companion itself, not its workers."""
        found = [one for one in self.worker.tree() if "bridge.plugins.vllm.companion" in " ".join(one.cmdline())]
        return next(one for one in found if one.ppid() not in {other.pid for other in found})


@pytest.fixture(scope="module")
def asker(vllm_python: Path, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asker]:
    folder = tmp_path_factory.mktemp("serve")
    port = unused_port()
    command = [vllm_python, "-m", "bridge", "serve", "vllm", smollm2, "--port", port, "--state-dir", folder / "state"]
    command += [*FLAGS, "--kv-cache-memory-bytes", "268435456"]
    with Worker([str(word) for word in command], port, folder / "log") as worker:
        worker.wait_until_serving()
        yield Asker(worker, Tokenizer.from_file(str(smollm2 / "tokenizer.json")))


def test_every_kind_is_enforced(asker: Asker) -> None:
    text, finish = asker.ask(json_schema=json.dumps(PERSON))
    person = json.loads(text)
    assert finish == "stop" and set(person) == {"name", "age"} and 0 <= person["age"] <= 120
    text, _ = asker.ask(json_object=True, tokens=8)
    assert text.startswith("{")
    assert asker.ask(regex=r"\d{3}-\d{4}")[0].replace("-", "").isdigit()
    assert asker.ask(grammar='root ::= "yes" | "no"')[0] in ("yes", "no")
    assert asker.ask(grammar='start: "yes" | "no"')[0] in ("yes", "no")
    assert asker.ask(choice=pb.ChoiceConstraint(choices=["red", "green"]))[0] in ("red", "green")
    text, _ = asker.ask(structural_tag=json.dumps({"type": "structural_tag", "format": TAG}))
    assert text.startswith("<f>{")
    assert asker.ask(structural_tag=json.dumps(OLD_TAG))[1] in ("stop", "length")


def test_what_cannot_be_enforced_is_refused_and_the_engine_serves_on(asker: Asker) -> None:
    refusals = [
        (
            {"json_schema": '{"type": "integer", "multipleOf": 3}'},
            "FAILED_PRECONDITION",
            "it needs the backend guidance",
        ),
        ({"regex": "(.{1,20}a?){20}"}, "INVALID_ARGUMENT", "one token takes"),
        ({"regex": "(unbalanced"}, "INVALID_ARGUMENT", "Grammar error"),
        ({"json_object": False}, "INVALID_ARGUMENT", "json_object must be True"),
        ({"choice": pb.ChoiceConstraint()}, "INVALID_ARGUMENT", "cannot be an empty list"),
    ]
    for constraint, code, says in refusals:
        with pytest.raises(grpc.RpcError) as refused:
            asker.ask(**constraint)
        assert (refused.value.code().name, says in refused.value.details()) == (code, True), refused.value.details()
        assert refused.value.details().startswith(next(iter(constraint)))
    assert asker.ask(regex="[ab]")[0] in ("a", "b")


def test_a_companion_that_is_killed_costs_constraints_only_and_for_a_while(asker: Asker) -> None:
    plain: list[str] = []
    stop = threading.Event()

    def load() -> None:
        while not stop.is_set():
            plain.append(asker.ask(tokens=4)[1])

    threads = [threading.Thread(target=load) for _ in range(3)]
    for thread in threads:
        thread.start()
    dead = asker.companion()
    dead.kill()
    dead.wait(5)
    with pytest.raises(grpc.RpcError) as refused:
        asker.ask(regex="never asked before")
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "down and being restarted; requests without one are served" in refused.value.details()
    assert asker.ask(regex="[ab]")[0] in ("a", "b"), "a constraint that was checked before needs no companion"
    before = len(plain)
    until = time.monotonic() + 120
    while True:
        try:
            assert asker.ask(regex="[cd]")[0] in ("c", "d")
            break
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE and time.monotonic() < until
            time.sleep(0.5)
    stop.set()
    for thread in threads:
        thread.join()
    assert len(plain) > before and set(plain) == {"length"}
    assert asker.companion().pid != dead.pid
    with pytest.raises(grpc.RpcError, match="it needs the backend guidance"):
        asker.ask(json_schema='{"type": "integer", "multipleOf": 5}')
