"""The picture of a run: `python -m tests.bench.plot bench.json docs/benchmark.png` (needs matplotlib)."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

TITLES = {"bridge": "headless-bridge", "rust": "Rust servicer", "aio": "grpc.aio", "vllm_rs": "vllm-rs"}
COLOURS = {"bridge": "#1b6ca8", "rust": "#c8553d", "aio": "#8a8d91", "vllm_rs": "#d9a441"}
STREAMS = (64, 256, 1024)
MARKS = (2, 5, 10, 20, 40)


def draw(source: Path, target: Path) -> None:
    """CPU a token by streams, and tokens a second at saturation, one colour a server."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    samples = json.loads(source.read_text())["samples"]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    for number, (server, figures) in enumerate(samples.items()):
        cells = [figures.get(f"cpu_token_{streams}") for streams in STREAMS]
        if all(cells):
            middles = [statistics.median(values) for values in cells]
            errors = [
                [middle - min(values) for middle, values in zip(middles, cells, strict=True)],
                [max(values) - middle for middle, values in zip(middles, cells, strict=True)],
            ]
            left.errorbar(STREAMS, middles, errors, marker="o", capsize=3, label=TITLES[server], color=COLOURS[server])
        if figures.get("saturation"):
            right.bar(number, statistics.median(figures["saturation"]) / 1e3, color=COLOURS[server])
    left.set(xscale="log", yscale="log", xlabel="streams, one step every 20 ms", ylabel="µs CPU a token")
    left.set_xticks(STREAMS, [str(streams) for streams in STREAMS])
    left.set_yticks(MARKS, [str(mark) for mark in MARKS])
    left.minorticks_off()
    left.legend(frameon=False)
    right.set(ylabel="thousand tokens a second", title="as fast as it can, 256 streams")
    right.set_xticks(range(len(samples)), [TITLES[server] for server in samples], fontsize=8)
    figure.tight_layout()
    figure.savefig(target, dpi=120)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
