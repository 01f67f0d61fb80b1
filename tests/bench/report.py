"""Figures to bench.json, to a table on the terminal, and to the verdict on the targets.

`python -m tests.bench.report bench.json` prints a run as Markdown.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.bench.servers import KINDS
from tests.bench.targets import ABSOLUTE, MOST_P99_GROWTH, RATIOS

Samples = dict[str, dict[str, list[float]]]
"""Server → figure → one value a round."""

UNITS = {
    "cpu_token_64": "µs CPU a token, 64 streams",
    "cpu_token_256": "µs CPU a token, 256 streams",
    "cpu_token_1024": "µs CPU a token, 1,024 streams",
    "cpu_token_logprobs": "µs CPU a token, 256 streams, logprobs=5",
    "cpu_token_stop": "µs CPU a token, 256 streams, a stop string",
    "cpu_token_inference": "µs CPU a token, 256 streams, vllm.Inference",
    "cpu_token_inference_stop": "the same with a stop string, so with text",
    "one_stream": "µs CPU a token, one stream",
    "request_4096_16": "ms CPU a request, 4,096 in, 16 out",
    "p99_256": "ms from step to client, p99, 256 streams",
    "saturation": "tokens/s, as fast as it can",
}

ABSOLUTE_UNITS = {
    "admission_us_128_idle": "µs from a request's last byte to its send, 128 tokens",
    "admission_us_128_1024_open": "the same with 1,024 streams open",
    "admission_us_100k": "the same for 100,000 tokens",
    "p99_ms_256_while_100k_prompts": "ms from step to client, p99, while 100,000-token prompts arrive",
    "rss_mb_idle": "MiB resident, all processes",
    "rss_mb_10k_streams": "MiB resident with 10,000 open streams",
    "listen_ms": "ms from exec to the first HealthCheck",
}


def ratios(samples: Samples) -> dict[str, float]:
    """`<figure>_vs_<peer>`: the bridge's median over the peer's, of the rounds of one run."""
    found = {}
    for peer, figures in samples.items():
        if peer == "bridge":
            continue
        for figure, values in figures.items():
            ours = samples["bridge"].get(figure)
            if ours:
                found[f"{figure}_vs_{peer}"] = statistics.median(ours) / statistics.median(values)
    return found


def table(samples: Samples) -> str:
    """One row a figure, one column a server: median, and the spread of the rounds."""
    kinds = [kind for kind in KINDS if kind.name in samples]
    lines = [f"{'':44}" + "".join(f"{kind.name:>32}" for kind in kinds)]
    for figure, unit in UNITS.items():
        cells = []
        for kind in kinds:
            values = samples[kind.name].get(figure)
            if not values:
                cells.append(f"{'-':>32}")
                continue
            middle, low, high = statistics.median(values), min(values), max(values)
            cells.append(f"{f'{middle:.3g} ({low:.3g}-{high:.3g})':>32}")
        lines.append(f"{unit:44}" + "".join(cells))
    return "\n".join(lines)


def verdict(ratio: Mapping[str, float], absolute: Mapping[str, float], p99: float | None) -> tuple[list[str], bool]:
    """A line a target that was measured, and whether all of those were met."""
    lines, good = [], True
    for targets, figures in ((RATIOS, ratio), (ABSOLUTE, absolute)):
        for target in targets:
            if target.key in figures:
                value = figures[target.key]
                good &= target.met(value)
                lines.append(f"{'met ' if target.met(value) else 'MISS'} {target.key:32} {value:9.3f} {target.bound}")
    busy = absolute.get("p99_ms_256_while_100k_prompts")
    if busy is not None and p99:
        growth = busy / p99
        good &= growth <= MOST_P99_GROWTH
        word = "met " if growth <= MOST_P99_GROWTH else "MISS"
        lines.append(f"{word} {'p99 growth with long prompts':32} {growth:9.3f} ≤ {MOST_P99_GROWTH:g}")
    return lines, good


def write(path: Path, samples: Samples, ratio: Mapping[str, float], absolute: Mapping[str, float]) -> None:
    """bench.json: `ratio`, `absolute`, and every round's value under `samples`."""
    body = {"ratio": dict(sorted(ratio.items())), "absolute": dict(sorted(absolute.items())), "samples": samples}
    path.write_text(json.dumps(body, indent=1, sort_keys=True) + "\n")


def markdown(run: Mapping[str, Any]) -> str:
    """The table of a run: medians, and in brackets the peer's figure over the bridge's."""
    samples, absolute = run["samples"], run["absolute"]
    kinds = [kind for kind in KINDS if kind.name in samples]
    lines = ["| | " + " | ".join(kind.title for kind in kinds) + " |", "|---" * (len(kinds) + 1) + "|"]
    for figure, unit in UNITS.items():
        cells = []
        for kind in kinds:
            values = samples[kind.name].get(figure)
            middle = statistics.median(values) if values else None
            share = run["ratio"].get(f"{figure}_vs_{kind.name}")
            against = f" ({1 / share:.1f} x)" if share else ""
            cells.append("" if middle is None else f"{_short(middle)}{against}")
        if any(cells):
            lines.append(f"| {unit} | " + " | ".join(cells) + " |")
    for key, unit in ABSOLUTE_UNITS.items():
        if key in absolute:
            lines.append(f"| {unit} | {_short(absolute[key])} |" + " |" * (len(kinds) - 1))
    return "\n".join(lines)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


if __name__ == "__main__":
    print(markdown(json.loads(Path(sys.argv[1]).read_text())))
