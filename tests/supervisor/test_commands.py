"""Orders over the socket in the state folder."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from bridge.supervisor.commands import CommandServer, find_folder, order
from bridge.supervisor.errors import SupervisorError, UsageError
from bridge.supervisor.state import COMMANDS


async def well(say: Callable[[str], None]) -> None:
    say("one")
    await asyncio.sleep(0)
    say("two")


async def badly(say: Callable[[str], None]) -> None:
    raise SupervisorError("it cannot be done")


async def ask(folder: Path, word: str) -> list[str]:
    return await asyncio.to_thread(lambda: list(order(folder, word, 5.0)))


async def test_orders_say_lines_and_end_well_or_badly(tmp_path: Path) -> None:
    server = await CommandServer.listen(tmp_path / COMMANDS, {"well": well, "badly": badly})
    assert await ask(tmp_path, "well") == ["one", "two"]
    with pytest.raises(SupervisorError, match=r"^it cannot be done$"):
        await ask(tmp_path, "badly")
    with pytest.raises(SupervisorError, match=r"^there is no order 'else'; there are: well, badly$"):
        await ask(tmp_path, "else")
    await server.close()


async def test_a_supervisor_that_ends_ends_the_order(tmp_path: Path) -> None:
    async def forever(say: Callable[[str], None]) -> None:
        await asyncio.Event().wait()

    server = await CommandServer.listen(tmp_path / COMMANDS, {"forever": forever})
    asking = asyncio.ensure_future(ask(tmp_path, "forever"))
    await asyncio.sleep(0.1)
    await server.close()
    with pytest.raises(SupervisorError, match="ended before it was done"):
        await asking


def test_nobody_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no supervisor takes orders in"):
        list(order(tmp_path, "reload"))


def test_the_only_supervisor_is_found(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no running supervisor was found"):
        find_folder(None, tmp_path)
    for name in ("hb-1", "hb-2"):
        (tmp_path / name).mkdir()
    (tmp_path / "hb-1" / COMMANDS).touch()
    assert find_folder(None, tmp_path) == tmp_path / "hb-1"
    (tmp_path / "hb-2" / COMMANDS).touch()
    with pytest.raises(UsageError, match="2 supervisors run"):
        find_folder(None, tmp_path)
    assert find_folder(tmp_path / "mine", tmp_path) == tmp_path / "mine"
