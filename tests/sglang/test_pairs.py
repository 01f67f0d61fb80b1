"""SGLang's own server and three contracts of the bridge, each against each other."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from tests.parity.cases import CASES
from tests.parity.compare import compare
from tests.parity.speakers import SPEAKERS
from tests.sglang.worker import SglangWorker


def test_every_pair_gives_the_same_answers(own_server: str, contracts: SglangWorker, smollm2: Path) -> None:
    speakers = {"sglang": SPEAKERS["sglang"](own_server)}
    for name in ("sglang.grpc.scheduler", "vllm.Inference", "vllm.engine.v1"):
        speakers[name] = SPEAKERS[name](contracts.address)
    cases = [case for case in CASES if case.seed is None]
    found = compare(speakers, cases, Tokenizer.from_file(str(smollm2 / "tokenizer.json")))
    assert len(found) == 6
    assert not any(found.values()), found
