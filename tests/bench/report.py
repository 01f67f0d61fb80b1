"""Figures to bench.json, to a table on the terminal, and to the verdict on the targets."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from pathlib import Path

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
    "one_stream": "µs CPU a token, one stream",
    "request_4096_16": "ms CPU a request, 4,096 in, 16 out",
    "p99_256": "ms from step to client, p99, 256 streams",
    "saturation": "tokens/s, as fast as it can",
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
