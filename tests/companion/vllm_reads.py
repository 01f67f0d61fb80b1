"""Runs in vLLM's Python: `python -m tests.companion.vllm_reads MODEL`. For each good constraint, what vLLM's own front end
sends against what the companion and the wire make of it, read by vLLM's own decoder. Prints `equal NAME` or what differs.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from bridge.plugins.vllm.facts import load
from bridge.plugins.vllm.grammar import FIELDS, judge_for
from bridge.wire.codec import Constraint, GenerateCall, Sampling
from bridge.wire.companion import Accepted, Check
from bridge.wire.engines import codec_for
from tests.companion.cases import GOOD, OTHER_BACKEND


def main(model: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to standard output
    loaded = load([model])
    judge = judge_for(loaded)
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams
    from vllm.tokenizers import cached_tokenizer_from_config
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.serial_utils import MsgpackDecoder

    tokenizer = cached_tokenizer_from_config(loaded.model)
    config = loaded.engine_args.structured_outputs_config
    codec = codec_for("vllm", {"vllm_version": loaded.facts.engine_version}, loaded.facts.layouts, 0)
    decoder = MsgpackDecoder(EngineCoreRequest)

    def theirs(kind: str, value: Any) -> Any:
        params = SamplingParams(structured_outputs=StructuredOutputsParams(**{FIELDS[kind]: value}))
        params.verify(loaded.model, None, config, tokenizer)
        return params.structured_outputs

    def ours(kind: str, value: Any) -> Any:
        verdict = judge(Check(id=1, kind=kind, value=value))
        assert isinstance(verdict, Accepted), verdict
        constraint = Constraint(
            kind=verdict.kind,
            value=verdict.value,
            backend=verdict.backend,
            backend_was_auto=verdict.backend_was_auto,
        )
        call = GenerateCall(
            wire_id="w", prompt_token_ids=[1], sampling=Sampling(constraint=constraint), arrival_time=1.0
        )
        return decoder.decode(codec.add(call)[1:]).sampling_params.structured_outputs

    for name, (kind, value, *_) in {**GOOD, **OTHER_BACKEND}.items():
        wanted, sent = theirs(kind, value), ours(kind, value)
        same = wanted == sent and type(wanted) is type(sent)
        answers.write(f"equal {name}\n" if same else f"{name}: {sent} is not {wanted}\n")
    answers.flush()


if __name__ == "__main__":
    main(sys.argv[1])
