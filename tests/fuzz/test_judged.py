"""20,000 requests through the real front end, each judged by vLLM's own classes in vLLM's own Python."""

from __future__ import annotations

from pathlib import Path

import uvloop

from tests.fuzz import answers
from tests.fuzz.cases import CLASSES, HOSTILE, VALID
from tests.fuzz.judged import Judged
from tests.fuzz.report import Report
from tests.fuzz.vllm_python import vllm

REQUESTS = 20_000


def test_vllm_and_the_bridge_see_20000_requests_alike(
    vllm_python: Path, tiny_with_defaults: Path, short_folder: Path
) -> None:
    """No ADD that vLLM's decoder refuses, nothing hostile sent on, and no request that only one of the two takes."""

    async def run() -> Report:
        flags = ["--max-model-len", "1024", "--dtype", "float32"]
        async with vllm(vllm_python, tiny_with_defaults, flags, short_folder) as (judge, companion):
            return await Judged(judge, companion).run(short_folder, 20, REQUESTS, CLASSES)

    report = uvloop.run(run())
    print(report)
    assert not report.surprises
    assert sum(report.counts.values()) == REQUESTS
    accepted, by_name = report.of(VALID, answers.ACCEPTED), report.of(VALID, answers.BY_NAME)
    assert accepted >= 0.9 * report.of(VALID)
    assert accepted + by_name + report.of(VALID, answers.CANCELLED) == report.of(VALID)
    assert report.of(HOSTILE, answers.ACCEPTED) == 0
