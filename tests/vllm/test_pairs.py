"""vLLM's own server and three contracts of the bridge, each against each other."""

from __future__ import annotations

from tokenizers import Tokenizer

from tests.parity.cases import CASES
from tests.parity.compare import compare
from tests.parity.speakers import SPEAKERS
from tests.running import Worker


def test_every_pair_gives_the_same_answers(vllm_http: str, served: Worker, tokenizer: Tokenizer) -> None:
    speakers = {"vllm": SPEAKERS["vllm"](vllm_http)}
    for name in ("vllm.grpc.engine", "vllm.Inference", "vllm.engine.v1"):
        speakers[name] = SPEAKERS[name](served.address)
    found = compare(speakers, CASES, tokenizer)
    assert len(found) == 6
    assert not any(found.values()), found
