"""The companion of a vLLM engine, run in vLLM's own Python with the arguments of `vllm serve`.

    python -m bridge.plugins.vllm.companion facts -- ARGUMENTS            print the facts
    python -m bridge.plugins.vllm.companion serve SOCKET -- ARGUMENTS     print the facts, then check constraints

The facts are one JSON object (`bridge.wire.companion.Facts`), the only line on standard output; a failure is one line on
standard error and exit code 1. SOCKET is a path; what is spoken there is in `bridge.wire.companion`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bridge import __version__
from bridge.plugins.resident.pool import Pool
from bridge.plugins.resident.priority import yield_cpu
from bridge.plugins.resident.server import listen, serve
from bridge.plugins.vllm.facts import Loaded, load
from bridge.plugins.vllm.grammar import judge_for
from bridge.plugins.vllm.installed import one_line
from bridge.wire.companion import Facts, Hello

USAGE = (
    "usage: python -m bridge.plugins.vllm.companion facts -- ARGUMENTS OF vllm serve\n"
    "       python -m bridge.plugins.vllm.companion serve SOCKET -- ARGUMENTS OF vllm serve"
)

SINGLE_THREADED = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
"""Workers are forked, and threads do not survive a fork."""


def _stay(loaded: Loaded, path: Path, answer: int) -> None:
    """Bind first: whoever reads the facts may connect at once, and is greeted when the judge is ready."""
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    listener = listen(path)
    _print(loaded.facts, answer)
    pool = Pool(judge_for(loaded))
    _settle()
    hello = Hello(bridge_version=__version__, engine_version=loaded.facts.engine_version)
    asyncio.run(serve(listener, hello, pool))


def _settle() -> None:
    """Give back what the imports left free (28 of 560 MB), and look at the rest no more, so that workers share it."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # glibc's own
        ctypes.CDLL(None).malloc_trim(0)
    gc.freeze()


def _print(facts: Facts, answer: int) -> None:
    with os.fdopen(answer, "wb") as out:
        out.write(msgspec.json.encode(facts) + b"\n")


def main(argv: Sequence[str]) -> int:
    match list(argv):
        case ["facts", "--", *arguments]:
            socket = None
        case ["serve", path, "--", *arguments]:
            socket = Path(path)
        case _:
            print(USAGE, file=sys.stderr)
            return 2
    yield_cpu()
    os.environ.update(SINGLE_THREADED)
    answer = os.dup(1)
    os.dup2(2, 1)  # vLLM and what it imports log to standard output
    try:
        loaded = load(arguments)
        if socket is None:
            _print(loaded.facts, answer)
        else:
            _stay(loaded, socket, answer)
    except Exception as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
