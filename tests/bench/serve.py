"""`headless-bridge serve sim` with the bench's engine in the simulated engine's place; the companion is the sim's own.

BENCH_PULSE=FILE python -m tests.bench.serve --port P
"""

from __future__ import annotations

import os
import sys

from bridge.cli import main
from bridge.supervisor.engines import Launch, LaunchSpec, sim
from tests.bench.engine import CONTEXT
from tests.bench.servers import MODEL


class BenchLauncher(sim.SimLauncher):
    """Launches `tests.bench.engine`."""

    def launch(self, spec: LaunchSpec, handshake: str) -> Launch:
        argv = [spec.python, "-m", "tests.bench.engine", "--zmq-handshake-address", handshake]
        return Launch([*argv, "--pulse", os.environ["BENCH_PULSE"]])


if __name__ == "__main__":
    sim.LAUNCHER = BenchLauncher()
    model = ["--model-path", str(MODEL), "--max-model-len", str(CONTEXT), "--num-gpu-blocks", str(1 << 20)]
    sys.exit(main(["serve", "sim", *sys.argv[1:], *model]))
