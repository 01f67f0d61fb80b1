"""`python -m tests.bench.bench`: the cells in turn on every server, several times; the table, bench.json, the verdict."""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
from pathlib import Path

from tests.bench import admission, report
from tests.bench.cells import ENGINE_CONTRACT, INFERENCE, OURS, PER_SERVER, listen_ms
from tests.bench.servers import KINDS, VLLM_RS, BenchError, Server, vllm_rs

ROUNDS = 5
LISTENS = 5


def main() -> int:
    """Exit code 1 when a target that was measured is missed."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.bench", description=__doc__, allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="one round of the cells of 256 streams")
    parser.add_argument(
        "--only",
        default="",
        help="cells to run, with commas: " + ", ".join((*PER_SERVER, *ENGINE_CONTRACT, *INFERENCE, *OURS)),
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", type=Path, default=Path("bench.json"))
    given = parser.parse_args()
    wanted = (
        given.only.split(",")
        if given.only
        else [*PER_SERVER, *ENGINE_CONTRACT, *INFERENCE, *OURS, "admission", "listen"]
    )
    if given.quick:
        wanted = ["cpu_token_256", "saturation", "admission"]
    try:
        return run(wanted, 1 if given.quick else given.rounds, given.json)
    except BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1


def run(wanted: list[str], rounds: int, path: Path) -> int:
    samples: report.Samples = {}
    absolute: dict[str, float] = {}
    kinds = [kind for kind in KINDS if kind.name != "vllm_rs" or vllm_rs()]
    if len(kinds) < len(KINDS):
        print(f"vllm-rs is not measured: name its binary with {VLLM_RS}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="bench-") as name, contextlib.ExitStack() as running:
        folder = Path(name)
        servers = [running.enter_context(Server(kind, folder / kind.name)) for kind in kinds]
        for number in range(rounds):
            for cell, measure in {**PER_SERVER, **ENGINE_CONTRACT, **INFERENCE}.items():
                if cell not in wanted:
                    continue
                for server in _measured(cell, servers):
                    for figure, value in measure(server).items():
                        samples.setdefault(server.kind.name, {}).setdefault(figure, []).append(value)
                        print(f"round {number + 1}: {figure} {server.kind.name} {value:,.4g}", file=sys.stderr)
        for cell, ours in OURS.items():
            if cell in wanted:
                absolute.update(ours(servers[0]))
        if "listen" in wanted:
            absolute["listen_ms"] = statistics.median(listen_ms(folder) for _ in range(LISTENS))
    if "admission" in wanted:
        absolute.update(admission.measure())
    ratio = report.ratios(samples)
    report.write(path, samples, ratio, absolute)
    print(report.table(samples))
    for key, value in sorted(absolute.items()):
        print(f"{key:44}{value:24,.4g}")
    ours_p99 = samples.get("bridge", {}).get("p99_256")
    lines, good = report.verdict(ratio, absolute, statistics.median(ours_p99) if ours_p99 else None)
    print("\n".join(lines))
    return 0 if good else 1


def _measured(cell: str, servers: list[Server]) -> list[Server]:
    """The servers that run a cell; the bridge is the first."""
    if cell in INFERENCE:
        return [server for server in servers if server.kind.name in ("bridge", "vllm_rs")]
    return servers if cell in PER_SERVER else servers[:2]


if __name__ == "__main__":
    sys.exit(main())
