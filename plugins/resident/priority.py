"""Low priority, so that a companion takes no CPU time from the engine beside it."""

from __future__ import annotations

import contextlib
import os

NICENESS = 10
"""About a tenth of a busy CPU; all of an idle one."""


def yield_cpu(niceness: int = NICENESS) -> None:
    """Lower the priority of this process and all it starts.

    Linux may weigh sessions against each other first (autogroups); then the session's own niceness is what counts.
    """
    os.nice(niceness)
    with contextlib.suppress(OSError), open("/proc/self/autogroup", "w") as autogroup:
        autogroup.write(str(niceness))
