"""vLLM's companion, in vLLM's environment, with the vocabulary of a real model: what it accepts, rewrites and refuses."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bridge.companion import CompanionGrammar, Latch
from bridge.grpc.status import Code
from bridge.refusal import Refusal
from tests.companion.cases import BAD, GOOD, HOSTILE, OTHER_BACKEND
from tests.companion.conftest import Connect
from tests.conftest import ROOT
from tests.running import Running


@pytest.mark.parametrize("name", GOOD)
async def test_every_kind_is_accepted(vllm_companion: Path, connect: Connect, name: str) -> None:
    kind, value = GOOD[name]
    constraint = await connect(vllm_companion).prepare(kind, value)
    assert (constraint.backend, constraint.backend_was_auto) == ("xgrammar", True)
    if kind == "choice":
        escaped = '"red" | "gr\\"e\\n\\\\en" | "blåbær" | ""'
        assert (constraint.kind, constraint.value) == ("grammar", f"root ::= {escaped}")
    else:
        assert (constraint.kind, constraint.value) == (kind, value)


@pytest.mark.parametrize("name", OTHER_BACKEND)
async def test_the_backend_is_the_one_that_vllm_falls_back_to(
    vllm_companion: Path, connect: Connect, name: str
) -> None:
    kind, value, backend = OTHER_BACKEND[name]
    assert (await connect(vllm_companion).prepare(kind, value)).backend == backend


@pytest.mark.parametrize("name", OTHER_BACKEND)
async def test_what_the_latched_backend_does_not_enforce_is_refused(
    vllm_companion: Path, connect: Connect, name: str
) -> None:
    kind, value, backend = OTHER_BACKEND[name]
    with pytest.raises(Refusal) as refused:
        await connect(vllm_companion, "xgrammar").prepare(kind, value)
    assert refused.value.code is Code.FAILED_PRECONDITION
    says = f"{kind} cannot be enforced: it needs the backend {backend}; xgrammar answers: "
    assert refused.value.message.startswith(says)


async def test_a_latched_backend_gets_what_it_can_enforce_in_its_own_form(
    vllm_companion: Path, connect: Connect
) -> None:
    grammar = connect(vllm_companion, "guidance")
    constraint = await grammar.prepare("choice", ["red", "green"])
    assert (constraint.kind, constraint.value, constraint.backend) == ("choice", ["red", "green"], "guidance")
    assert constraint.backend_was_auto
    assert (await grammar.prepare("json_schema", "{}")).backend == "guidance"
    outlines = connect(vllm_companion, "outlines")
    assert (await outlines.prepare("regex", "[ab]")).backend == "outlines"
    with pytest.raises(Refusal, match="outlines answers: Outlines structured outputs backend does not support json_ob"):
        await outlines.prepare("json_object", True)


@pytest.mark.parametrize("backend", ["", "xgrammar"])
@pytest.mark.parametrize("name", BAD)
async def test_what_vllm_refuses_is_refused_with_its_reason(
    vllm_companion: Path, connect: Connect, name: str, backend: str
) -> None:
    kind, value, says = BAD[name]
    grammar = connect(vllm_companion, backend)
    with pytest.raises(Refusal) as refused:
        await grammar.prepare(kind, value)
    assert refused.value.code is Code.INVALID_ARGUMENT
    assert refused.value.message.startswith(f"{kind} cannot be enforced: {says}"), refused.value.message
    assert "\n" not in refused.value.message and len(refused.value.message) < 500


@pytest.mark.parametrize("name", HOSTILE)
async def test_what_would_hurt_the_engine_is_refused_and_the_next_is_answered(
    vllm_companion: Path, connect: Connect, name: str
) -> None:
    backend, kind, value, says = HOSTILE[name]
    grammar = connect(vllm_companion, backend or "xgrammar")
    hostile = asyncio.ensure_future(grammar.prepare(kind, value))
    await asyncio.sleep(0.1)
    started = time.monotonic()
    assert (await grammar.prepare("regex", f"beside {name}")).backend == (backend or "xgrammar")
    beside = time.monotonic() - started
    with pytest.raises(Refusal) as refused:
        await hostile
    assert refused.value.code is Code.INVALID_ARGUMENT
    assert refused.value.message.startswith(f"{kind} cannot be enforced: {says}"), refused.value.message
    assert beside < 5
    assert (await grammar.prepare("regex", f"after {name}")).backend == (backend or "xgrammar")


async def test_many_at_once(vllm_companion: Path, connect: Connect) -> None:
    grammar = connect(vllm_companion)
    answers = await asyncio.gather(*(grammar.prepare("regex", f"[a-z]{{{n}}}") for n in range(1, 101)))
    assert [answer.value for answer in answers] == [f"[a-z]{{{n}}}" for n in range(1, 101)]


def test_vllms_own_decoder_reads_what_its_own_front_end_would_send(vllm_python: Path, smollm2: Path) -> None:
    command = [vllm_python, "-m", "tests.companion.vllm_reads", smollm2]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = done.stdout.splitlines()
    assert len(lines) == len(GOOD) + len(OTHER_BACKEND)
    assert [line for line in lines if not line.startswith("equal ")] == []


@pytest.fixture(scope="module")
def fixed(vllm_python: Path, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The socket of a companion whose engine was started with guidance as its backend."""
    folder = tmp_path_factory.mktemp("fixed")
    command = [vllm_python, "-m", "bridge.plugins.vllm.companion", "serve", folder / "c", "--", tiny_llama]
    with Running([*command, "--structured-outputs-config.backend", "guidance"], folder / "log") as running:
        running.wait_for('"engine":"vllm"', 180)
        yield folder / "c"


async def test_a_backend_that_was_asked_for_is_used(fixed: Path) -> None:
    grammar = CompanionGrammar(str(fixed), Latch(), lambda waited_s: None)
    constraint = await grammar.prepare("choice", ["a", "b"])
    assert (constraint.kind, constraint.backend, constraint.backend_was_auto) == ("choice", "guidance", False)
    constraint = await grammar.prepare("json_schema", '{"type": "integer", "multipleOf": 3}')
    assert constraint.backend == "guidance"
    grammar.close()
