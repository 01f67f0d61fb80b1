"""Runs in vLLM's Python: `python -m tests.fuzz.vllm_judge MODEL FLAGS OF vllm serve`. No engine, no weights.

Answers each `Question` with a `Verdict`: whether vLLM's decoder takes the ADDs that the bridge sent for a request, whether
vLLM's own front end (`SamplingParams`, `InputProcessor`) takes the request, and where the ADDs differ from what that front
end would have sent. Messages are MessagePack, each behind its length in four bytes.
"""

from __future__ import annotations

import json
import os
import struct
import sys
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import msgspec
from smg_grpc_proto.generated import vllm_engine_pb2 as pb


class Question(msgspec.Struct):
    """A request as it was sent, None for one that is no request; the payloads of the ADDs it led to."""

    number: int
    request: bytes | None
    adds: list[bytes]


class Verdict(msgspec.Struct):
    """`refusal` is why vLLM's front end refuses, `undecodable` what its engine's decoder says, one text an ADD at fault."""

    number: int
    refusal: str | None
    undecodable: list[str]
    differs: list[str]


NOT_COMPARED = frozenset(
    (
        "n",
        "stop",
        "include_stop_str_in_output",
        "output_text_buffer_length",
        "detokenize",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "output_kind",
        "watermarking",
        "_watermarking_skipped",
    )
)
"""Sampling fields that only vLLM's own front end reads: the engine core looks at none of them."""


def messages(source: BinaryIO) -> Iterator[bytes]:
    while head := source.read(4):
        yield source.read(int(struct.unpack(">I", head)[0]))


def framed(message: Any) -> bytes:
    body = msgspec.msgpack.encode(message)
    return struct.pack(">I", len(body)) + body


class Judge:
    """vLLM's front end for one model, and its engine's decoder."""

    def __init__(self, model: str, flags: Sequence[str]) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.engine.input_processor import InputProcessor
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

        parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
        given = parser.parse_args(["--model", model, *flags])
        config = AsyncEngineArgs.from_cli_args(given).create_engine_config()
        self._model = config.model_config
        self._processor = InputProcessor(config)
        self._defaults = self._model.get_diff_sampling_param()
        self._decoder = MsgpackDecoder(EngineCoreRequest)
        self._encoder = MsgpackEncoder()

    def verdict(self, question: Question) -> Verdict:
        undecodable, decoded = [], []
        for add in question.adds:
            try:
                decoded.append(self._decoded(add))
            except Exception as error:
                undecodable.append(repr(error))
        refusal, differs = None, []
        if question.request is not None:
            try:
                wanted = self._front_end(pb.GenerateRequest.FromString(question.request))
            except Exception as error:
                refusal = f"{type(error).__name__}: {error}"
            else:
                if decoded:
                    differs = [*_differences(wanted, decoded, self._model.get_vocab_size())]
        return Verdict(question.number, refusal, undecodable, differs)

    def _decoded(self, add: bytes) -> Any:
        """The request as the engine's input thread decodes it, and as far as it prepares one there."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        request = self._decoder.decode([add])
        sent = msgspec.msgpack.decode(add)[3]
        unknown = set(sent) - set(SamplingParams.__struct_fields__)
        if unknown or {"n", "stop", "bad_words"} & set(sent):
            raise ValueError(f"sampling keys that mean nothing to an engine core: {sorted(sent)}")
        Request.from_engine_core_request(request, None)
        return request

    def _front_end(self, message: pb.GenerateRequest) -> list[Any]:
        """What vLLM's own front end sends for a request, one entry a sample; raises what that front end raises."""
        from vllm.v1.engine.parallel_sampling import ParentRequest

        rank = message.data_parallel_rank if message.HasField("data_parallel_rank") else None
        prompt = self._prompt(message)
        params = self._params(message, len(prompt))
        request = self._processor.process_inputs(
            "r", {"type": "token", "prompt_token_ids": prompt}, params, ("generate",), data_parallel_rank=rank
        )
        if params.n == 1:
            return [self._through_the_wire(request)]
        request.external_req_id = "r"
        parent = ParentRequest(request)
        children = []
        for index in range(params.n):
            child = msgspec.structs.replace(request, external_req_id=None)
            child.request_id, child.sampling_params = parent.get_child_info(index)
            children.append(self._through_the_wire(child))
        return children

    def _through_the_wire(self, request: Any) -> Any:
        return self._decoder.decode(self._encoder.encode(request))

    def _prompt(self, message: pb.GenerateRequest) -> list[int]:
        from vllm.exceptions import VLLMValidationError

        if message.HasField("mm_inputs") or message.extra_mm_inputs or message.HasField("media_refs"):
            raise VLLMValidationError("this model takes no media")
        kind = message.WhichOneof("input")
        if kind == "text":
            tokenizer = self._processor.get_tokenizer()
            ids = list(tokenizer.encode(message.text))
        elif kind == "tokenized":
            ids = list(message.tokenized.input_ids)
        else:
            raise VLLMValidationError("no prompt")
        params = message.sampling_params
        return self._truncated(ids, params.truncate_prompt_tokens) if params.HasField("truncate_prompt_tokens") else ids

    def _truncated(self, ids: list[int], limit: int) -> list[int]:
        """By vLLM's own tokenization parameters, with the checks of its HTTP server (-1 or more) before them."""
        from vllm.exceptions import VLLMValidationError
        from vllm.renderers.params import TokenizeParams

        if limit < -1:
            raise VLLMValidationError("truncate_prompt_tokens must be at least -1")
        params = TokenizeParams(
            max_total_tokens=self._model.max_model_len,
            max_output_tokens=1,
            truncate_prompt_tokens=limit,
            truncation_side="left",
        )
        kept: list[int] = params.apply_post_tokenization(self._processor.get_tokenizer(), {"prompt_token_ids": ids})[
            "prompt_token_ids"
        ]
        return kept

    def _params(self, message: pb.GenerateRequest, prompt_tokens: int) -> Any:
        """SamplingParams as vLLM's HTTP server makes them: an unset value is the model's default, then vLLM's."""
        from vllm.entrypoints.serve.utils.api_utils import get_max_tokens
        from vllm.sampling_params import SamplingParams

        asked = message.sampling_params
        given: dict[str, Any] = {}
        for name, last in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0), ("repetition_penalty", 1.0)):
            given[name] = getattr(asked, name) or self._defaults.get(name, last)
        temperature = self._defaults.get("temperature", 1.0)
        max_tokens = asked.max_tokens if asked.HasField("max_tokens") else None
        return SamplingParams.from_optional(
            n=asked.n or 1,
            temperature=asked.temperature if asked.HasField("temperature") else temperature,
            max_tokens=get_max_tokens(self._model.max_model_len, max_tokens, prompt_tokens, self._defaults),
            min_tokens=asked.min_tokens,
            frequency_penalty=asked.frequency_penalty,
            presence_penalty=asked.presence_penalty,
            seed=asked.seed if asked.HasField("seed") else None,
            stop=list(asked.stop),
            stop_token_ids=list(asked.stop_token_ids),
            ignore_eos=asked.ignore_eos,
            logprobs=asked.logprobs if asked.HasField("logprobs") else None,
            prompt_logprobs=asked.prompt_logprobs if asked.HasField("prompt_logprobs") else None,
            logit_bias=dict(asked.logit_bias) or None,
            structured_outputs=_constraint(asked),
            extra_args=_transfer(message),
            include_stop_str_in_output=asked.include_stop_str_in_output,
            skip_special_tokens=asked.skip_special_tokens,
            spaces_between_special_tokens=asked.spaces_between_special_tokens,
            **given,
        )


def _constraint(asked: pb.SamplingParams) -> Any:
    from vllm.sampling_params import StructuredOutputsParams

    kind = asked.WhichOneof("constraint")
    if kind is None:
        return None
    name = "json" if kind == "json_schema" else kind
    value = list(asked.choice.choices) if kind == "choice" else getattr(asked, kind)
    return StructuredOutputsParams(**{name: value})


def _transfer(message: pb.GenerateRequest) -> dict[str, Any] | None:
    if message.HasField("kv_transfer_params_json"):
        params = json.loads(message.kv_transfer_params_json)
        if not isinstance(params, dict):
            raise ValueError("kv_transfer_params is no object")
        return {"kv_transfer_params": params}
    if message.HasField("kv_transfer_params"):
        pair = message.kv_transfer_params
        params = {"do_remote_prefill": True, "remote_host": pair.remote_host, "remote_port": pair.remote_port}
        return {"kv_transfer_params": params}
    return None


def _differences(wanted: Sequence[Any], sent: Sequence[Any], vocab_size: int) -> Iterator[str]:
    """Where what the bridge sent is not what vLLM's front end would have sent.

    EOS ids outside the vocabulary aside: vLLM sends them, and with min_tokens its worker dies of them.
    """
    if len(wanted) != len(sent):
        yield f"{len(sent)} ADDs, not {len(wanted)}"
    for index, (ours, theirs) in enumerate(zip(sent, wanted, strict=False)):
        for name in ("prompt_token_ids", "cache_salt", "priority", "lora_request", "pooling_params"):
            if getattr(ours, name) != getattr(theirs, name):
                yield f"sample {index}: {name} is {getattr(ours, name)!r}, not {getattr(theirs, name)!r}"
        for name in ours.sampling_params.__struct_fields__:
            if name in NOT_COMPARED:
                continue
            mine, own = getattr(ours.sampling_params, name), getattr(theirs.sampling_params, name)
            if name in ("stop_token_ids", "_all_stop_token_ids"):
                mine, own = set(mine), {token for token in own if token < vocab_size}
            if mine != own and repr(mine) != repr(own):  # NaN is not NaN
                yield f"sample {index}: {name} is {mine!r}, not {own!r}"


def main(arguments: Sequence[str]) -> int:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # vLLM and what it imports log to standard output
    judge = Judge(arguments[0], arguments[1:])
    decode = msgspec.msgpack.Decoder(list[Question]).decode
    for message in messages(sys.stdin.buffer):
        answers.write(framed([judge.verdict(question) for question in decode(message)]))
        answers.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
