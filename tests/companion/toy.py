"""A resident companion without an engine: `python -m tests.companion.toy SOCKET`. What a constraint says, its check does.

Words: `spin`, `sleep`, `slow`, `grow`, `abort`, `exit`, `killed`, `pid`; `wants B` needs backend B; the rest is accepted.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import msgspec

from bridge import __version__
from bridge.plugins.resident.pool import Pool
from bridge.plugins.resident.server import listen, serve
from bridge.plugins.resident.worker import Limits
from bridge.wire.companion import Accepted, Cause, Check, Facts, Hello, Refused, Verdict

LIMITS = Limits(cpu_s=1.5, wall_s=9.0, memory=64 << 20)
FACTS = Facts(
    engine="toy",
    engine_version="1",
    bridge_version=__version__,
    model_path="m",
    tokenizer_path="m",
    served_model_name="m",
)


def judge(check: Check) -> Verdict:
    word, _, rest = str(check.value).partition(" ")
    value = check.value
    match word:
        case "spin":
            while True:
                pass
        case "sleep":
            time.sleep(60)
        case "grow":
            try:
                bytearray(256 << 20)
            except MemoryError:
                return Refused(id=check.id, cause=Cause.COST, reason="out of memory")
        case "abort":
            os.abort()
        case "exit":
            os._exit(3)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "pid":
            value = str(os.getpid())
        case "slow":
            time.sleep(0.3)
        case "wants":
            if check.backend not in ("", rest):
                return Refused(id=check.id, cause=Cause.BACKEND, reason=f"it needs the backend {rest}")
            return Accepted(id=check.id, kind=check.kind, value=value, backend=rest, backend_was_auto=True)
    return Accepted(id=check.id, kind=check.kind, value=value, backend=check.backend or "first", backend_was_auto=True)


def main(path: str) -> None:
    listener = listen(Path(path))
    sys.stdout.write(msgspec.json.encode(FACTS).decode() + "\n")
    sys.stdout.flush()
    asyncio.run(serve(listener, Hello(bridge_version=__version__, engine_version="1"), Pool(judge, LIMITS)))


if __name__ == "__main__":
    main(sys.argv[1])
