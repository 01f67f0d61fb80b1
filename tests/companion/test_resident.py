"""A check may cost its process; it costs nobody else anything."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from bridge.grpc.status import Code
from bridge.refusal import Refusal
from bridge.wire.codec import Constraint
from tests.companion.conftest import Connect


async def test_a_check_is_answered(toy: Path, connect: Connect) -> None:
    assert await connect(toy).prepare("regex", "[a-z]+") == Constraint(
        kind="regex", value="[a-z]+", backend="first", backend_was_auto=True
    )


@pytest.mark.parametrize(
    ("does", "code", "says"),
    [
        ("spin", Code.INVALID_ARGUMENT, "checking it takes more than 1.5 s of CPU time"),
        ("grow", Code.INVALID_ARGUMENT, "out of memory"),
        ("abort", Code.INVALID_ARGUMENT, "it crashes the code that would enforce it (SIGABRT)"),
        ("sleep", Code.UNAVAILABLE, "it was not checked within 9 s; try again"),
        ("exit", Code.UNAVAILABLE, "the process that checked it exited with code 3; try again"),
        ("killed", Code.UNAVAILABLE, "the process that checked it was killed by signal 9; try again"),
    ],
)
async def test_what_a_check_does_to_its_process_is_told_and_the_next_is_answered(
    toy: Path, connect: Connect, does: str, code: Code, says: str
) -> None:
    grammar = connect(toy)
    with pytest.raises(Refusal) as refused:
        await grammar.prepare("regex", does)
    assert (refused.value.code, refused.value.message.partition(": ")[2]) == (code, says)
    assert (await grammar.prepare("regex", "after")).value == "after"


async def test_one_process_answers_many(toy: Path, connect: Connect) -> None:
    grammar = connect(toy)
    pids = {(await grammar.prepare("regex", f"pid {number}")).value for number in range(20)}
    assert len(pids) == 1


async def test_a_spinning_check_leaves_a_place_for_others(toy: Path, connect: Connect) -> None:
    grammar = connect(toy)
    spinning = asyncio.ensure_future(grammar.prepare("regex", "spin"))
    await asyncio.sleep(0.1)
    started = time.monotonic()
    for number in range(5):
        await grammar.prepare("regex", f"beside {number}")
    assert not spinning.done() and time.monotonic() - started < 8
    with pytest.raises(Refusal, match="CPU time"):
        await spinning


async def test_no_more_than_two_are_checked_at_once(toy: Path, connect: Connect) -> None:
    grammar = connect(toy)
    started = time.monotonic()
    await asyncio.gather(*(grammar.prepare("regex", f"slow {number}") for number in range(6)))
    assert time.monotonic() - started > 0.85


async def test_two_front_ends_are_served(toy: Path, connect: Connect) -> None:
    one, other = connect(toy), connect(toy)
    answers = await asyncio.gather(one.prepare("regex", "a"), other.prepare("regex", "b"))
    assert [answer.value for answer in answers] == ["a", "b"]


async def test_a_front_end_that_sends_nonsense_loses_its_connection_alone(toy: Path, connect: Connect) -> None:
    reader, writer = await asyncio.open_unix_connection(str(toy))
    writer.write(b"\x00\x00\x00\x01\xc1")
    await reader.read()  # the greeting, then the end
    writer.close()
    assert (await connect(toy).prepare("regex", "fine")).value == "fine"
