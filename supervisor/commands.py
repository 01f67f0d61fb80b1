"""Orders to a running supervisor: a unix socket in its state folder, for its user alone.

A client sends one word and a newline. Lines come back as the order goes on: `: TEXT` tells, `ok` or `error TEXT` ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path

from bridge.supervisor.errors import SupervisorError, UsageError
from bridge.supervisor.state import COMMANDS, FLAG, PREFIX, base_folder

MAX_ORDER = 64
ORDER_LIMIT_S = 10.0
"""For a client to say what it wants."""

Order = Callable[[Callable[[str], None]], Awaitable[None]]
"""What an order does: it may `say` lines, and raises `SupervisorError` when it cannot."""

_log = logging.getLogger(__name__)


class CommandServer:
    """The supervisor's end."""

    def __init__(self, orders: Mapping[str, Order]) -> None:
        self._orders = orders
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()

    @classmethod
    async def listen(cls, path: Path, orders: Mapping[str, Order]) -> CommandServer:
        """Take orders at `path`, in a folder that is this user's alone and locked by this process."""
        server = cls(orders)
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        server._server = await asyncio.start_unix_server(server._serve, str(path), limit=MAX_ORDER)
        return server

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._open):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            line = await asyncio.wait_for(reader.readline(), ORDER_LIMIT_S)
            word = line.decode("ascii", "replace").strip()
            order = self._orders.get(word)
            if order is None:
                raise SupervisorError(f"there is no order {word!r}; there are: {', '.join(self._orders)}")
            _log.debug("ordered: %s", word)
            await order(lambda text: writer.write(f": {text}\n".encode()))
            writer.write(b"ok\n")
        except SupervisorError as error:
            writer.write(f"error {error.reason}\n".encode())
        except (TimeoutError, OSError, ValueError) as error:
            _log.warning("an order did not arrive: %s", error)
        finally:
            self._open.discard(task)
            writer.close()


def order(folder: Path, word: str, limit_s: float | None = None) -> Iterator[str]:
    """Send an order to the supervisor of a state folder; the lines it says, until it is done.

    Raises `UsageError` where none listens, `SupervisorError` when it refuses or ends; TimeoutError after `limit_s`
    seconds without a line.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.settimeout(limit_s)
        try:
            link.connect(str(folder / COMMANDS))
        except OSError as error:
            raise UsageError(f"no supervisor takes orders in {folder}: {error.strerror}; is it serving?") from None
        link.sendall(word.encode() + b"\n")
        with link.makefile("r") as lines:
            for line in lines:
                kind, _, text = line.rstrip("\n").partition(" ")
                if kind == "ok":
                    return
                if kind == "error":
                    raise SupervisorError(text)
                yield text
    raise SupervisorError(f"the supervisor of {folder} ended before it was done")


def find_folder(asked: Path | None, base: Path | None = None) -> Path:
    """The state folder of the supervisor meant: `asked`, else the only run's of this user; raises `UsageError`."""
    if asked is not None:
        return asked
    found = [path for path in (base or base_folder()).glob(f"{PREFIX}*") if _ours(path / COMMANDS)]
    if len(found) == 1:
        return found[0]
    if not found:
        raise UsageError(f"no running supervisor was found; name its state folder with {FLAG}")
    raise UsageError(f"{len(found)} supervisors run ({', '.join(map(str, found))}); name one with {FLAG}")


def _ours(path: Path) -> bool:
    try:
        return path.stat().st_uid == os.geteuid()
    except OSError:
        return False
