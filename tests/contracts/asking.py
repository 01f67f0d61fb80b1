"""Stubs for the contracts whose protos are our own, by grpcio's generic calls."""

from __future__ import annotations

from typing import Any

import grpc

from bridge.contracts import proto
from bridge.contracts.proto import message

STREAMED = ("GenerateStream",)


class Stub:
    """One service over a channel: `stub.Method(request, timeout=…)`; a stream is an iterator of replies."""

    def __init__(self, channel: grpc.Channel, service: str) -> None:
        for name, _, reply in proto.methods(service):
            make = channel.unary_stream if name in STREAMED else channel.unary_unary
            call: Any = make(
                f"/{service}/{name}",
                request_serializer=lambda request: request.SerializeToString(),
                response_deserializer=reply.FromString,
            )
            setattr(self, name, call)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


def inference(**fields: Any) -> Any:
    """A vllm.GenerateRequest; greedy unless it says otherwise."""
    return message("vllm.GenerateRequest")(**{"temperature": 0.0, **fields})


def control(name: str, **fields: Any) -> Any:
    """The request of a vllm.Control method."""
    return message(f"vllm.{name}Request")(**fields)


def engine_v1(**fields: Any) -> Any:
    return message("vllm.engine.v1.GenerateRequest")(**fields)


def joined(replies: list[Any]) -> Any:
    """The replies of a vllm.Inference stream of one sequence as the one reply of Generate.

    Asserts the stream's shape: prompt_info first and alone, finish_info on the last message and on no other.
    """
    head, *rest = replies
    assert head.HasField("prompt_info") and not head.HasField("outputs"), "prompt_info does not come first and alone"
    assert rest and all(reply.HasField("outputs") and not reply.HasField("prompt_info") for reply in rest)
    assert [reply.outputs.HasField("finish_info") for reply in rest] == [False] * (len(rest) - 1) + [True]
    whole = message("vllm.GenerateResponse")(prompt_info=head.prompt_info)
    whole.outputs.SetInParent()
    for reply in rest:
        part = reply.outputs
        assert len(part.token_ids) in (0, part.num_tokens)
        whole.outputs.index = part.index
        whole.outputs.text += part.text
        whole.outputs.num_tokens += part.num_tokens
        whole.outputs.token_ids.extend(part.token_ids)
        whole.outputs.logprobs.extend(part.logprobs)
        whole.outputs.ranks.extend(part.ranks)
        whole.outputs.candidate_tokens.extend(part.candidate_tokens)
    whole.outputs.finish_info.CopyFrom(rest[-1].outputs.finish_info)
    assert whole.outputs.num_tokens == whole.outputs.finish_info.num_output_tokens
    return whole
