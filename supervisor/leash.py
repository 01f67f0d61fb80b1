"""The leash: a process that outlives the supervisor by seconds, to end what the supervisor started.

Run as a script with `python -I -S`, so it imports nothing of ours. It reads commands from standard input, one a line,
and takes its end as the supervisor's death: nobody else holds the pipe's write end.

    watch SID      end this session when the supervisor is gone
    forget SID     that session ended by itself
    folder PATH    remove this folder, and the files in it, when the supervisor is gone
    release        the supervisor stopped everything; end without doing anything
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

TERM_GRACE_S = 2.0
"""Between SIGTERM and SIGKILL. vLLM's launcher clears its tree in about two seconds."""
KILL_WAIT_S = 2.0
POLL_S = 0.05


def session_members(sid: int) -> list[int]:
    """Living processes of a session (zombies are not), in no order. Without /proc, its leader's group stands for it."""
    if not os.path.exists("/proc/self/stat"):
        try:
            os.killpg(sid, 0)
        except ProcessLookupError:
            return []
        except PermissionError:
            pass
        return [sid]
    members = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:
                # The command in parentheses may hold any byte; after it: state, ppid, pgrp, session.
                fields = stat.read().rpartition(b")")[2].split()
                if int(fields[3]) == sid and fields[0] not in (b"Z", b"X"):
                    members.append(int(name))
    return members


def signal_session(sid: int, number: int) -> None:
    """Signal the leader's group, and each member that has a group of its own. An empty session is left alone."""
    members = session_members(sid)
    if not members:
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(sid, number)
    for pid in members:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgid(pid) != sid:
                os.kill(pid, number)


def end_sessions(sids: set[int]) -> None:
    """SIGTERM, at most `TERM_GRACE_S`, then SIGKILL until nothing is left or `KILL_WAIT_S` passed."""
    for sid in sids:
        signal_session(sid, signal.SIGTERM)
    if _wait_empty(sids, TERM_GRACE_S):
        return
    for sid in sids:
        signal_session(sid, signal.SIGKILL)
    _wait_empty(sids, KILL_WAIT_S, kill=True)


def _wait_empty(sids: set[int], limit_s: float, *, kill: bool = False) -> bool:
    end = time.monotonic() + limit_s
    while True:
        left = [sid for sid in sids if session_members(sid)]
        if not left or time.monotonic() > end:
            return not left
        if kill:
            for sid in left:
                signal_session(sid, signal.SIGKILL)
        time.sleep(POLL_S)


def remove_folder(path: str) -> None:
    with contextlib.suppress(OSError):
        for name in os.listdir(path):
            os.unlink(os.path.join(path, name))
        os.rmdir(path)


def main() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sessions: set[int] = set()
    folders: set[str] = set()
    for line in sys.stdin:
        command, _, value = line.rstrip("\n").partition(" ")
        if command == "watch":
            sessions.add(int(value))
        elif command == "forget":
            sessions.discard(int(value))
        elif command == "folder":
            folders.add(value)
        elif command == "release":
            return
    end_sessions(sessions)
    for path in folders:
        remove_folder(path)


if __name__ == "__main__":
    main()
