"""The state folder: slot sockets, their locks, and what must survive a front end. One supervisor at a time."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import tempfile
from pathlib import Path

from bridge.supervisor.errors import UsageError
from bridge.supervisor.leash import remove_folder
from bridge.wire.link import LinkError, private_folder, slot_addresses

_log = logging.getLogger(__name__)

STATE_VERSION = 1
"""Of the folder's contents; a supervisor refuses a folder of another version."""

FLAG = "--state-dir"
COMMANDS = "ctl"
PREFIX = "hb-"
"""Starts the name of a folder made for one run."""


class StateFolder:
    """An open, locked state folder. One that was made for this run alone is removed with it."""

    def __init__(self, path: Path, lock: int, *, temporary: bool) -> None:
        self.path = path
        self.temporary = temporary
        self._incarnations: dict[int, int] = {}
        self._lock = lock

    @classmethod
    def open(cls, path: Path | None, base: Path | None = None) -> StateFolder:
        """Take `path`, or make a folder for this run under `base`, else XDG_RUNTIME_DIR or the temporary folder.

        Raises `UsageError` when it cannot be ours alone, another supervisor holds it, or its name is too long for the
        sockets in it.
        """
        temporary = path is None
        try:
            if path is None:
                parent = base_folder() if base is None else private_folder(Path(os.path.abspath(base)))
                path = parent / f"{PREFIX}{os.getpid()}-{os.urandom(4).hex()}"
            path = private_folder(Path(os.path.abspath(path)))
            slot_addresses(path, 0)
        except LinkError as error:
            raise UsageError(str(error)) from None
        except OSError as error:
            raise UsageError(
                f"the state folder {path or base} cannot be made: {error.strerror}; name one with {FLAG}"
            ) from None
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise UsageError(f"another supervisor uses the state folder {path}; name another with {FLAG}") from None
        state = cls(path, lock, temporary=temporary)
        try:
            state._check_version()
        except BaseException:
            os.close(lock)
            raise
        return state

    def slot(self, index: int) -> tuple[str, str]:
        """The (input, output) ipc addresses of a slot."""
        return slot_addresses(self.path, index)

    @property
    def companion(self) -> Path:
        """Where the companion's socket is bound."""
        return self.path / "c"

    @property
    def commands(self) -> Path:
        """Where the supervisor takes commands."""
        return self.path / COMMANDS

    @property
    def latch(self) -> Path:
        """Names what enforces constraints in the engine; written by the front end whose constraint is the first."""
        return self.path / "backend"

    def next_incarnation(self, slot: int) -> int:
        """A number never given before for this slot in this folder, from 1; on disk before it is returned.

        Where the disk is full it is kept in memory alone: enough, for no engine outlives this process.
        """
        path = self.path / f"incarnation{slot}"
        number = self._incarnations.get(slot, 0)
        try:
            number = max(number, int(path.read_text()))
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            _log.warning("%s cannot be read: %s", path, error)
        number = self._incarnations[slot] = number + 1
        try:
            _write(path, str(number))
        except OSError as error:
            _log.warning("%s cannot be written, going on without: %s", path, error.strerror)
        return number

    def close(self) -> None:
        if self._lock < 0:
            return
        if self.temporary:
            remove_folder(str(self.path))
        os.close(self._lock)
        self._lock = -1

    def _check_version(self) -> None:
        path = self.path / "version"
        with contextlib.suppress(FileNotFoundError):
            found = path.read_text()
            if found != str(STATE_VERSION):
                raise UsageError(
                    f"the state folder {self.path} has version {found[:16]!r}, this bridge reads {STATE_VERSION}; "
                    f"name another with {FLAG}"
                )
            return
        _write(path, str(STATE_VERSION))


def base_folder() -> Path:
    """Where folders of single runs are made unless somebody says otherwise."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.path.isdir(runtime) and os.access(runtime, os.W_OK):
        return Path(runtime)
    return Path(tempfile.gettempdir())


def _write(path: Path, text: str) -> None:
    """Replace a file whole: a reader sees the old text or the new."""
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(text)
    os.replace(temporary, path)
