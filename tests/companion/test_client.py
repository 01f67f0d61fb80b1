"""The front end's client: verdicts are kept, the backend is latched, an absent companion is told and comes back."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

import bridge.companion
from bridge.companion import KEPT_BYTES, KEPT_VERDICTS, MAX_CONSTRAINT, CompanionGrammar, Latch, Verdicts
from bridge.grpc.status import Code
from bridge.refusal import Refusal
from bridge.wire.companion import Accepted
from tests.companion.conftest import Connect, toy_at


async def refused(grammar: CompanionGrammar, kind: str, value: object) -> Refusal:
    with pytest.raises(Refusal) as raised:
        await grammar.prepare(kind, value)
    return raised.value


async def test_an_identical_constraint_is_checked_once(toy: Path, connect: Connect) -> None:
    grammar = connect(toy)
    first = await grammar.prepare("regex", "slow 1")
    started = time.monotonic()
    assert await grammar.prepare("regex", "slow 1") == first
    assert time.monotonic() - started < 0.1


async def test_identical_constraints_that_come_together_are_checked_once(toy: Path, connect: Connect) -> None:
    grammar = connect(toy)
    started = time.monotonic()
    answers = await asyncio.gather(*(grammar.prepare("regex", "slow together") for _ in range(50)))
    assert len({answer.value for answer in answers}) == 1 and time.monotonic() - started < 8


async def test_one_that_gives_up_waiting_leaves_the_verdict_to_the_others(toy: Path, connect: Connect) -> None:
    grammar = connect(toy)
    gone, stays = (asyncio.ensure_future(grammar.prepare("regex", "slow both")) for _ in range(2))
    await asyncio.sleep(0.05)
    gone.cancel()
    assert (await stays).value == "slow both"


async def test_a_refusal_is_kept_and_a_maybe_is_not(toy: Path, connect: Connect) -> None:
    grammar = connect(toy)
    assert "CPU time" in (await refused(grammar, "regex", "spin")).message
    started = time.monotonic()
    for _ in range(2):
        assert "CPU time" in (await refused(grammar, "regex", "spin")).message
    assert time.monotonic() - started < 1.5
    before = time.monotonic()
    for _ in range(2):
        assert "exited" in (await refused(grammar, "regex", "exit")).message
    assert time.monotonic() - before < 5


def test_kept_verdicts_are_bounded_in_number_and_bytes() -> None:
    verdict = Accepted(id=1, kind="regex", value="", backend="b")
    kept = Verdicts()
    for number in range(KEPT_VERDICTS + 10):
        kept.put(str(number).encode(), verdict, 1)
    assert kept.get(b"0") is None and kept.get(str(KEPT_VERDICTS + 9).encode()) is verdict
    kept.put(b"large", verdict, KEPT_BYTES)
    assert kept.get(b"large") is verdict and kept.get(str(KEPT_VERDICTS + 9).encode()) is None


@pytest.mark.parametrize(
    ("kind", "value", "says"),
    [
        ("regex", "x" * MAX_CONSTRAINT, "the size of regex is 1048577; it must be at most 1048576 bytes"),
        ("choice", [""] * (MAX_CONSTRAINT + 1), "the size of choice is 1048577"),
        ("choice", "yes", "choice is 'yes'; it must be a list"),
        ("json_object", "yes", "json_object is 'yes'; it must be a bool"),
        ("poem", "a", "poem is no constraint that is checked here; known: json_schema,"),
    ],
)
async def test_what_no_engine_takes_is_refused_here(connect: Connect, kind: str, value: object, says: str) -> None:
    grammar = connect(Path("/nowhere"))
    assert (await refused(grammar, kind, value)).message.startswith(says)


async def test_the_first_backend_is_kept(toy: Path, connect: Connect) -> None:
    grammar = connect(toy)
    assert (await grammar.prepare("regex", "wants large")).backend == "large"
    assert (await grammar.prepare("regex", "any")).backend == "large"
    error = await refused(grammar, "regex", "wants small")
    assert error.code is Code.FAILED_PRECONDITION
    assert error.message.startswith("regex cannot be enforced: it needs the backend small; an engine keeps the backend")


async def test_a_refused_constraint_latches_nothing(toy: Path, connect: Connect) -> None:
    grammar = connect(toy)
    await refused(grammar, "regex", "abort")
    assert (await grammar.prepare("regex", "wants small")).backend == "small"


async def test_two_first_constraints_at_once_get_one_backend(toy: Path, connect: Connect) -> None:
    grammar = connect(toy)
    wanted = ["wants large", "wants small"]
    answers = await asyncio.gather(*(grammar.prepare("regex", one) for one in wanted), return_exceptions=True)
    accepted = [answer for answer in answers if not isinstance(answer, BaseException)]
    assert len(accepted) == 1
    assert (await grammar.prepare("regex", "any")).backend == accepted[0].backend


async def test_the_latch_is_one_for_all_front_ends_and_outlives_them(toy: Path, tmp_path: Path) -> None:
    path = str(tmp_path / "backend")
    one, other = (CompanionGrammar(str(toy), Latch(path), lambda waited_s: None) for _ in range(2))
    assert (await one.prepare("regex", "wants large")).backend == "large"
    assert (await other.prepare("regex", "any")).backend == "large"
    assert (await refused(other, "regex", "wants small")).code is Code.FAILED_PRECONDITION
    one.close(), other.close()
    later = CompanionGrammar(str(toy), Latch(path), lambda waited_s: None)
    assert (await later.prepare("regex", "any")).backend == "large"
    later.close()
    assert os.listdir(tmp_path).count("backend") == 1 and not [
        name for name in os.listdir(tmp_path) if name.startswith("backend.")
    ]


async def test_without_a_companion_constraints_are_unavailable(connect: Connect, tmp_path: Path) -> None:
    error = await refused(connect(tmp_path / "none"), "regex", "a")
    assert error.code is Code.UNAVAILABLE and "is down and being restarted" in error.message


async def test_a_companion_that_dies_fails_what_waits_and_another_is_found(connect: Connect, tmp_path: Path) -> None:
    path = tmp_path / "c"
    grammar = connect(path)
    with toy_at(path) as process:
        assert (await grammar.prepare("regex", "wants large")).backend == "large"
        waiting = asyncio.ensure_future(grammar.prepare("regex", "sleep"))
        await asyncio.sleep(0.2)
        process.kill()
        with pytest.raises(Refusal, match="down and being restarted"):
            await waiting
    assert (await refused(grammar, "regex", "b")).code is Code.UNAVAILABLE
    assert (await grammar.prepare("regex", "wants large")).backend == "large", "a kept verdict needs no companion"
    with toy_at(path):
        assert (await grammar.prepare("regex", "b")).backend == "large", "the latch outlives the companion"


async def test_a_companion_that_hangs_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silences: list[float] = []
    grammar = CompanionGrammar(str(tmp_path / "c"), Latch(), silences.append)
    with toy_at(tmp_path / "c") as process:
        await grammar.prepare("regex", "a")
        process.send_signal(signal.SIGSTOP)
        with monkeypatch.context() as patched:
            patched.setattr(bridge.companion, "ANSWER_LIMIT_S", 0.5)
            assert (await refused(grammar, "regex", "b")).code is Code.UNAVAILABLE
        assert silences == [0.5]
        process.send_signal(signal.SIGCONT)
        assert (await grammar.prepare("regex", "b")).value == "b"
    grammar.close()


async def test_a_companion_of_another_version_is_not_used(
    connect: Connect, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with toy_at(tmp_path / "c", "import bridge; bridge.__version__ = '0.0.1'"):
        assert (await refused(connect(tmp_path / "c"), "regex", "slow a")).code is Code.UNAVAILABLE
    assert "the companion is of headless-bridge 0.0.1" in caplog.text


async def test_a_companion_of_another_version_is_found_before_it_is_needed(tmp_path: Path) -> None:
    found: list[str] = []
    with toy_at(tmp_path / "c", "import bridge; bridge.__version__ = '0.0.1'"):
        grammar = CompanionGrammar(str(tmp_path / "c"), Latch(), lambda waited_s: None, found.append)
        await grammar.meet()
        async with asyncio.timeout(5):
            while not found:
                await asyncio.sleep(0.01)
    assert found == ["0.0.1"]
    await grammar.meet()  # nobody is there, and nobody minds
