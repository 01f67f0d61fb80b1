"""What the plugin costs the scheduler."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from tests.conftest import ROOT
from tests.sglang.engines import ENVIRONMENT


def test_our_egress_costs_no_more_than_sglangs_own(sglang_python: Path, tiny_llama: Path) -> None:
    """At batch 64 and 256, the median of five rounds in which both take turns."""
    command = [str(sglang_python), "-m", "tests.bench.sglang_egress", str(tiny_llama)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout)
    assert set(result) == {"64", "256"}
    assert all(one["ratio"] <= 1.0 for one in result.values()), result
