"""Low priority, so that a companion takes little CPU time from the engine beside it."""

from __future__ import annotations

import contextlib
import os

NICENESS = 5
"""A quarter of a CPU that the engine keeps busy; all of an idle one."""


def yield_cpu(niceness: int = NICENESS) -> None:
    """Lower the priority of this process and all it starts.

    Linux may weigh sessions against each other first (autogroups); then the niceness of the session is what counts, and
    it is lowered too where the session is this process's own.
    """
    os.nice(niceness)
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError), open("/proc/self/autogroup", "w") as autogroup:
            autogroup.write(str(niceness))
