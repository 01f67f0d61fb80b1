"""`python -m bridge.plugins.sim`: run one simulated engine. Exit codes: 0 stopped or dead like vLLM, 1 failed, 2 usage."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence

from bridge.plugins.sim.engine import Engine
from bridge.plugins.sim.options import PROGRAM, OptionsError, parse

GC_THRESHOLD = 100_000


def main(argv: Sequence[str] | None = None) -> int:
    try:
        options = parse(sys.argv[1:] if argv is None else argv)
        if options.zmq_handshake_address is None:
            raise OptionsError("--zmq-handshake-address is missing: whom shall the engine dial?")
        engine = Engine(options)
    except OptionsError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)  # steps make no cycles; a collection is a hiccup in somebody's measurement
    return engine.run()


if __name__ == "__main__":
    sys.exit(main())
