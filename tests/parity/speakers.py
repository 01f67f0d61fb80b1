"""Ways to ask an engine, and what comes back in the same form from all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
from smg_grpc_proto.generated import sglang_scheduler_pb2 as sglang
from smg_grpc_proto.generated import sglang_scheduler_pb2_grpc as sglang_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as smg
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as smg_grpc

from tests.contracts.asking import Stub, engine_v1, inference, joined
from tests.gateways import post_json
from tests.parity.cases import Case

LIMIT_S = 120
BEGUN = "\ufffd"


@dataclass(frozen=True)
class Answer:
    """What an answer says; None where the speaker does not say it."""

    ids: tuple[int, ...]
    finish: str
    text: str | None = None
    usage: tuple[int, int] | None = None
    """Tokens of the prompt and of the output."""

    def differs(self, other: Answer) -> list[str]:
        """The fields that both have and that are not the same.

        A character that the last token only begins is U+FFFD in vllm-rs and left out by vLLM's own server: no difference.
        """
        found = []
        for name in self.__dataclass_fields__:
            one, two = getattr(self, name), getattr(other, name)
            if name == "text" and one is not None and two is not None:
                one, two = one.rstrip(BEGUN), two.rstrip(BEGUN)
            if one is not None and two is not None and one != two:
                found.append(f"{name}: {one!r} and {two!r}")
        return found


class Speaker(Protocol):
    """One way to ask."""

    def ask(self, case: Case, ids: list[int]) -> Answer: ...


class VllmHttp:
    """vLLM's own completions endpoint, by token ids."""

    def __init__(self, address: str) -> None:
        self._base = address

    def ask(self, case: Case, ids: list[int]) -> Answer:
        body = {"prompt": ids, "return_token_ids": True, "max_tokens": case.max_tokens, **_sampling(case)}
        reply = post_json(f"{self._base}/v1/completions", body, timeout=LIMIT_S)
        choice, usage = reply["choices"][0], reply["usage"]
        counts = usage["prompt_tokens"], usage["completion_tokens"]
        return Answer(tuple(choice["token_ids"]), choice["finish_reason"], choice["text"], counts)


class SglangHttp:
    """SGLang's own generate endpoint, by token ids."""

    def __init__(self, address: str) -> None:
        self._base = address

    def ask(self, case: Case, ids: list[int]) -> Answer:
        sampling = {"max_new_tokens": case.max_tokens, **_sampling(case)}
        reply = post_json(f"{self._base}/generate", {"input_ids": ids, "sampling_params": sampling}, timeout=LIMIT_S)
        meta = reply["meta_info"]
        counts = meta["prompt_tokens"], meta["completion_tokens"]
        return Answer(tuple(reply["output_ids"]), meta["finish_reason"]["type"], reply["text"], counts)


class VllmEngine:
    """`vllm.grpc.engine`, streamed: token ids."""

    def __init__(self, address: str) -> None:
        self._stub = smg_grpc.VllmEngineStub(grpc.insecure_channel(address))

    def ask(self, case: Case, ids: list[int]) -> Answer:
        params = smg.SamplingParams(max_tokens=case.max_tokens, skip_special_tokens=True, **_sampling(case))
        request = smg.GenerateRequest(tokenized=smg.TokenizedInput(input_ids=ids), sampling_params=params, stream=True)
        *chunks, last = self._stub.Generate(request, timeout=LIMIT_S)
        done = last.complete
        assert [token for reply in chunks for token in reply.chunk.token_ids] == list(done.output_ids)
        return Answer(tuple(done.output_ids), done.finish_reason, None, (done.prompt_tokens, done.completion_tokens))


class SglangScheduler:
    """`sglang.grpc.scheduler`, streamed: token ids."""

    def __init__(self, address: str) -> None:
        self._stub = sglang_grpc.SglangSchedulerStub(grpc.insecure_channel(address))

    def ask(self, case: Case, ids: list[int]) -> Answer:
        unset = {"top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "n": 1}
        params = sglang.SamplingParams(
            max_new_tokens=case.max_tokens, skip_special_tokens=True, **{**unset, **_sampling(case)}
        )
        tokenized = sglang.TokenizedInput(input_ids=ids)
        request = sglang.GenerateRequest(tokenized=tokenized, sampling_params=params, stream=True, request_id="")
        *_, last = self._stub.Generate(request, timeout=LIMIT_S)
        done = last.complete
        return Answer(tuple(done.output_ids), done.finish_reason, None, (done.prompt_tokens, done.completion_tokens))


class Inference:
    """`vllm.Inference`, streamed: token ids and text."""

    FINISH = {1: "length", 2: "stop", 3: "abort"}

    def __init__(self, address: str) -> None:
        self._stub = Stub(grpc.insecure_channel(address), "vllm.Inference")

    def ask(self, case: Case, ids: list[int]) -> Answer:
        sampling = {"top_p": case.top_p, "top_k": case.top_k}
        if case.seed is not None:
            sampling["seed"] = case.seed
        stopping = {
            "max_new_tokens": case.max_tokens,
            "stop_strings": case.stop,
            "stop_token_ids": case.stop_token_ids,
            "ignore_eos": case.ignore_eos,
        }
        request = inference(
            token_ids={"ids": ids},
            temperature=case.temperature,
            sampling=sampling,
            decoding={"frequency_penalty": case.frequency_penalty, "presence_penalty": case.presence_penalty},
            stopping=stopping,
            response={"output_token_ids": True},
        )
        reply = joined(list(self._stub.GenerateStream(request, timeout=LIMIT_S)))
        out = reply.outputs
        counts = reply.prompt_info.num_prompt_tokens, out.finish_info.num_output_tokens
        return Answer(tuple(out.token_ids), self.FINISH[out.finish_info.finish_reason], out.text, counts)


class EngineV1:
    """`vllm.engine.v1`, streamed: token ids and text."""

    def __init__(self, address: str) -> None:
        self._stub = Stub(grpc.insecure_channel(address), "vllm.engine.v1.VllmEngine")

    def ask(self, case: Case, ids: list[int]) -> Answer:
        sampling = {"max_tokens": case.max_tokens, "stop_sequences": case.stop, **_sampling(case)}
        sampling.pop("stop", None)
        replies = list(
            self._stub.GenerateStream(engine_v1(prompt_token_ids=ids, sampling_params=sampling), timeout=LIMIT_S)
        )
        tokens = tuple(reply.token_id for reply in replies if reply.HasField("token_id"))
        return Answer(tokens, replies[-1].finish_reason, "".join(reply.text_delta for reply in replies))


SPEAKERS: dict[str, Callable[[str], Speaker]] = {
    "vllm": VllmHttp,
    "sglang": SglangHttp,
    "vllm.grpc.engine": VllmEngine,
    "sglang.grpc.scheduler": SglangScheduler,
    "vllm.Inference": Inference,
    "vllm.engine.v1": EngineV1,
}
"""Name → what speaks it to an address: a URL for an engine's own server, HOST:PORT for a contract."""


def _sampling(case: Case) -> dict[str, Any]:
    """What is asked, by the names that most speakers share."""
    values = {
        "temperature": case.temperature,
        "top_p": case.top_p,
        "top_k": case.top_k,
        "frequency_penalty": case.frequency_penalty,
        "presence_penalty": case.presence_penalty,
        "stop": list(case.stop),
        "stop_token_ids": list(case.stop_token_ids),
        "ignore_eos": case.ignore_eos,
    }
    asked = {name: value for name, value in values.items() if value or name == "temperature"}
    return asked if case.seed is None else {**asked, "seed": case.seed}
