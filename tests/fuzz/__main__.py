"""`python -m tests.fuzz`: see the package's docstring. Exit status 1 when there was a surprise."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import uvloop

from tests.fuzz.cases import CLASSES
from tests.fuzz.judged import Judged
from tests.fuzz.live import Live
from tests.fuzz.report import Report
from tests.fuzz.vllm_python import vllm

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Fuzz a vllm.grpc.engine worker.")
    parser.add_argument("--target", metavar="HOST:PORT", help="a worker to send to")
    parser.add_argument(
        "--judge", choices=["vllm"], help="no worker: a front end here, its ADDs judged by vLLM's classes"
    )
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--classes", default=",".join(CLASSES), help="of valid, near and hostile (default all)")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="only the batch that holds this case")
    parser.add_argument(
        "--without",
        default="",
        metavar="FIELDS",
        help="fields that the target's engine lacks, as SamplingParams.logprobs,…",
    )
    parser.add_argument("--engine-python", type=Path, default=ROOT / ".envs/vllm/bin/python", help="for --judge")
    parser.add_argument("--model", type=Path, default=ROOT / ".models/tiny-llama", help="for --judge")
    parser.add_argument("engine_flags", nargs="*", metavar="-- FLAGS", help="of vllm serve, for --judge")
    options = parser.parse_args()
    kinds = options.classes.split(",")
    if not set(kinds) <= set(CLASSES) or bool(options.target) == bool(options.judge):
        parser.error("name --target or --judge vllm, and classes of " + ", ".join(CLASSES))
    report = _live(options, kinds) if options.target else _judged(options, kinds)
    print(report)
    return 1 if report.surprises else 0


def _live(options: argparse.Namespace, kinds: list[str]) -> Report:
    host, _, port = options.target.rpartition(":")

    async def run() -> Report:
        without = filter(None, options.without.split(","))
        return await Live(host, int(port), without).run(options.seed, options.requests, kinds, only=options.only)

    return asyncio.run(run())


def _judged(options: argparse.Namespace, kinds: list[str]) -> Report:
    async def run() -> Report:
        with TemporaryDirectory(prefix="fuzz-") as folder:
            place = Path(folder)
            async with vllm(options.engine_python, options.model, options.engine_flags, place) as (judge, companion):
                run = Judged(judge, companion)
                return await run.run(place, options.seed, options.requests, kinds, only=options.only)

    return uvloop.run(run())


if __name__ == "__main__":
    sys.exit(main())
