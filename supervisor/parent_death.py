"""Execs a command that gets a signal when the process that started it dies (PR_SET_PDEATHSIG; Linux).

Run as a script with `python -I -S`: `parent_death.py PARENT_PID SIGNAL COMMAND …`. A wrapper, because a hook between
fork and exec is neither safe beside libzmq's threads nor as fast. The setting survives exec. Elsewhere than on Linux it
only execs, and the leash is what ends the command.
"""

from __future__ import annotations

import os
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, number, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
        if os.getppid() != parent:  # it died before the signal was armed
            sys.exit(f"the parent process {parent} is gone")
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"cannot run {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
