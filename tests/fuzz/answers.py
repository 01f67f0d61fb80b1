"""Which answers a case may get. Whatever else comes is a surprise."""

from __future__ import annotations

from google.protobuf.message import DecodeError
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from bridge.grpc.status import Code
from tests.fuzz.cases import ENDLESS, HOSTILE, VALID, Case
from tests.fuzz.client import Answer
from tests.fuzz.refused import refused_feature

ACCEPTED = "accepted"
CANCELLED = "cancelled by us"
BY_NAME = "feature refused by name"

NAMED = (
    Code.INVALID_ARGUMENT,
    Code.UNIMPLEMENTED,
    Code.FAILED_PRECONDITION,
    Code.ALREADY_EXISTS,
    Code.OUT_OF_RANGE,
)
"""Refusals that tell the client what is wrong with the request."""

OF_BYTES = (Code.INTERNAL, Code.RESOURCE_EXHAUSTED, Code.UNIMPLEMENTED, Code.INVALID_ARGUMENT)
"""Refusals of bytes that are no message, as gRPC servers give them."""

CUT = ("reset", "refused", "closed", "nothing")
"""What may become of a call with bad headers or frames on a connection of its own."""

CONTRADICTED = "the engine ended the request with an error"
"""How a request ends whose grammar allows only tokens that its other values (min_tokens, stop ids) forbid, in vLLM 0.32."""

FINISHES = ("stop", "length", "abort")


def outcome(case: Case, answer: Answer) -> str:
    """One word for the table."""
    if answer.how == "cancelled":
        return CANCELLED
    if answer.how != "status":
        return answer.how
    if answer.status == Code.OK:
        return ACCEPTED
    if refused_feature(answer.status, answer.text):
        return BY_NAME
    return _code(answer)


def _code(answer: Answer) -> str:
    return Code(answer.status).name if answer.status in {*Code} else f"status {answer.status}"


def surprise(case: Case, answer: Answer) -> str | None:
    """What is wrong with an answer; None when it is one that the case may get."""
    if answer.how == "cancelled":
        return None if case.cancel_after is not None else "cancelled, but not by us"
    if answer.how != "status":
        return None if case.alone and answer.how in CUT else f"{answer.how}: {answer.text}"
    if answer.status == Code.OK:
        if case.kind == HOSTILE:
            return "accepted"
        return wrong_answer(case, answer)
    if not answer.text:
        return f"{_code(answer)} without a message"
    if case.kind == HOSTILE:
        return _wrong_refusal(case, answer)
    if case.kind == VALID:
        return None if refused_feature(answer.status, answer.text) else f"{_code(answer)}: {answer.text}"
    if answer.status in NAMED or (answer.text == CONTRADICTED and _constrained(case)):
        return None
    return f"{_code(answer)}: {answer.text}"


def _constrained(case: Case) -> bool:
    request = case.request
    return request is not None and request.sampling_params.WhichOneof("constraint") is not None


def _wrong_refusal(case: Case, answer: Answer) -> str | None:
    allowed = NAMED if case.says else OF_BYTES
    if case.alone:
        allowed = (*Code,)
    if answer.status not in allowed or "internal error" in answer.text:
        return f"{_code(answer)}: {answer.text}"
    if case.says and not any(word in answer.text for word in case.says):
        return None if refused_feature(answer.status, answer.text) else f"does not name {case.says}: {answer.text}"
    return None


def wrong_answer(case: Case, answer: Answer) -> str | None:
    """What is wrong with the messages of an answer that ended well."""
    if case.method == ENDLESS:
        return None
    request = case.request
    if request is None:
        return None if answer.messages else "no message"
    try:
        replies = [pb.GenerateResponse.FromString(message) for message in answer.messages]
    except DecodeError as error:
        return f"a reply does not parse: {error}"
    return _wrong_generation(request, replies)


def _wrong_generation(request: pb.GenerateRequest, replies: list[pb.GenerateResponse]) -> str | None:
    params = request.sampling_params
    completes = {reply.complete.index: reply.complete for reply in replies if reply.HasField("complete")}
    chunks = [reply.chunk for reply in replies if reply.HasField("chunk")]
    if sorted(completes) != [*range(max(1, params.n))]:
        return f"terminals for the samples {sorted(completes)}, asked for {params.n}"
    if len(completes) + len(chunks) != len(replies):
        return "a sample has two terminals, or a reply is empty"
    if chunks and not request.stream:
        return "chunks, though none were asked for"
    for index, complete in completes.items():
        ids = list(complete.output_ids)
        streamed = [token for chunk in chunks if chunk.index == index for token in chunk.token_ids]
        if request.stream and streamed != ids:
            return f"sample {index}: chunks say {streamed}, the terminal {ids}"
        if complete.finish_reason not in FINISHES:
            return f"sample {index} ended with {complete.finish_reason!r}"
        if complete.completion_tokens != len(ids):
            return f"sample {index}: {complete.completion_tokens} tokens counted, {len(ids)} given"
        if params.HasField("max_tokens") and len(ids) > params.max_tokens:
            return f"sample {index} has {len(ids)} tokens"
        wrong = _wrong_logprobs(params, complete)
        if wrong is not None:
            return f"sample {index}: {wrong}"
        if complete.HasField("matched_token_id") and complete.matched_token_id not in params.stop_token_ids:
            return f"sample {index} matched {complete.matched_token_id}, which was not asked for"
    return None


def _wrong_logprobs(params: pb.SamplingParams, complete: pb.GenerateComplete) -> str | None:
    """What is wrong with the log-probabilities of a sample: a row a token, k alternatives a row."""
    if params.HasField("logprobs"):
        output = complete.output_logprobs
        if list(output.token_ids) != list(complete.output_ids) or len(output.token_logprobs) != len(output.token_ids):
            return f"log-probabilities of {list(output.token_ids)}, tokens {list(complete.output_ids)}"
        widths = {len(row.token_ids) for row in output.top_logprobs}
        if params.logprobs >= 0 and widths - {params.logprobs}:
            return f"{sorted(widths)} alternatives a token, asked for {params.logprobs}"
    if params.HasField("prompt_logprobs") and complete.finish_reason != "abort":
        prompt = complete.input_logprobs
        if len(prompt.token_logprobs) != complete.prompt_tokens:
            return f"{len(prompt.token_logprobs)} prompt log-probabilities for {complete.prompt_tokens} tokens"
        widths = {len(row.token_ids) for row in prompt.top_logprobs[1:]}
        if params.prompt_logprobs > 0 and complete.prompt_tokens > 1 and widths != {params.prompt_logprobs}:
            return f"{sorted(widths)} alternatives a prompt token, asked for {params.prompt_logprobs}"
    return None
