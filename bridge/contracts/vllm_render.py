"""Renders `vllm.grpc.engine` replies: byte templates for what is sent each step, protobuf objects for the rest.

Field numbers are those of vllm_engine.proto in smg-grpc-proto 0.4.28; tests parse every template with protobuf.
"""

from __future__ import annotations

import asyncio
import json

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from bridge.grpc.call import Call
from bridge.grpc.framing import prefix
from bridge.grpc.status import Code, GrpcError
from bridge.logprobs import Columns
from bridge.requests import Sequence
from bridge.template import Template
from bridge.varint import PADDED_BYTES, VARINT, varints
from bridge.wire.codec import Finish

COUNT = b"\x18"
"""The key of completion_tokens."""

FINISH = {Finish.STOP: "stop", Finish.LENGTH: "length", Finish.ABORT: "abort", Finish.ERROR: "error"}


class PlainSink:
    """Renders one Generate call of one sequence that reports nothing but tokens.

    Once a chunk is out, the ones that follow need only the template: prompt_tokens and cached_tokens lead, the key of
    completion_tokens links.
    """

    __slots__ = ("_call", "_prompt", "template")

    def __init__(self, call: Call, prompt_tokens: int) -> None:
        self._call = call
        self._prompt = b"\x10" + VARINT[prompt_tokens]
        self.template: Template | None = None

    def chunk(self, sequence: Sequence, tokens: list[int]) -> None:
        fields = counts(self._prompt, sequence)
        body = plain_chunk(fields, tokens, sequence.sent)
        self._call.send(b"\x0a%b%b" % (VARINT[len(body)], body))
        if self.template is None:
            self.template = chunk_template(b"\x0a", fields)

    def complete(self, sequence: Sequence) -> None:
        self._call.send(complete_reply(sequence).SerializeToString())

    def close(self) -> None:
        self._call.finish()

    def fail(self, code: Code, message: str) -> None:
        self._call.finish(code, message)


class RichSink(PlainSink):
    """Renders several samples, and log-probabilities; its chunks have no template."""

    __slots__ = ()

    def chunk(self, sequence: Sequence, tokens: list[int]) -> None:
        varint = VARINT
        sent = sequence.sent
        start = sent - len(tokens)
        ids = b"".join(varints(tokens))
        body = b"".join(
            (
                b"\x0a",
                varint[len(ids)],
                ids,
                self._prompt,
                b"\x18",
                varint[sent],
                b"\x20" + varint[sequence.cached_tokens] if sequence.cached_tokens else b"",
                logprob_fields(sequence, 5, 6, start, sent, prompt=start == 0),
                b"\x38" + varint[sequence.index] if sequence.index else b"",
            )
        )
        self._call.send(b"".join((b"\x0a", varint[len(body)], body)))

    def complete(self, sequence: Sequence) -> None:
        fields = logprob_fields(sequence, 6, 7, 0, len(sequence.output_ids), prompt=True)
        body = complete_reply(sequence).complete.SerializeToString() + fields
        self._call.send(b"\x12%b%b" % (VARINT[len(body)], body))


def counts(prompt: bytes, sequence: Sequence) -> bytes:
    """prompt_tokens, which is `prompt`, and cached_tokens: the same in every chunk of a sequence."""
    return prompt + b"\x20" + VARINT[sequence.cached_tokens] if sequence.cached_tokens else prompt


def plain_chunk(fields: bytes, tokens: list[int], sent: int) -> bytes:
    """A chunk of nothing but tokens; `fields` are its `counts`."""
    ids = b"".join(varints(tokens))
    return b"\x0a%b%b%b%b%b" % (VARINT[len(ids)], ids, fields, COUNT, VARINT[sent])


def chunk_template(reply: bytes, chunk: bytes) -> Template:
    """`reply` is the reply up to the chunk's key, `chunk` the chunk's fields but token_ids and completion_tokens."""
    token_ids = b"\x0a%c" % PADDED_BYTES
    rest = PADDED_BYTES + len(COUNT) + PADDED_BYTES
    lead = b"%b%b%b%b" % (reply, VARINT[len(chunk) + len(token_ids) + rest], chunk, token_ids)
    return Template(prefix(len(lead) + rest) + lead, COUNT)


class EmbedSink:
    """Collects the vector of one Embed call; `result` raises the error that ended it instead."""

    template = None

    def __init__(self) -> None:
        self.result: asyncio.Future[list[float]] = asyncio.get_running_loop().create_future()

    def chunk(self, sequence: Sequence, tokens: list[int]) -> None:
        """An embedding has no tokens."""

    def complete(self, sequence: Sequence) -> None:
        vector = sequence.rich.vector if sequence.rich is not None else None
        if self.result.done():
            return
        if vector is None:
            self.result.set_exception(GrpcError(Code.ABORTED, "the request was aborted"))
        else:
            self.result.set_result(vector)

    def close(self) -> None:
        """The handler ends the call."""

    def fail(self, code: Code, message: str) -> None:
        if not self.result.done():
            self.result.set_exception(GrpcError(code, message))


def complete_reply(sequence: Sequence) -> pb.GenerateResponse:
    """The terminal of a sequence, without log-probabilities."""
    assert sequence.finish is not None
    complete = pb.GenerateComplete(
        output_ids=sequence.output_ids,
        finish_reason=FINISH[sequence.finish],
        prompt_tokens=sequence.request.prompt_tokens,
        completion_tokens=len(sequence.output_ids),
        cached_tokens=sequence.cached_tokens,
        index=sequence.index,
        spec_accepted_tokens=sequence.spec_accepted,
        spec_draft_tokens=sequence.spec_drafted,
    )
    if sequence.stop_string is not None:
        complete.matched_stop_str = sequence.stop_string
    elif sequence.stop_id is not None:
        complete.matched_token_id = sequence.stop_id
    if sequence.transfer_params is not None:
        complete.kv_transfer_params_json = json.dumps(sequence.transfer_params)
        host, port = sequence.transfer_params.get("remote_host"), sequence.transfer_params.get("remote_port")
        if isinstance(host, str) and isinstance(port, int):
            complete.kv_transfer_params.remote_host = host
            complete.kv_transfer_params.remote_port = port
    return pb.GenerateResponse(complete=complete)


def logprob_fields(sequence: Sequence, output: int, prompt_field: int, start: int, stop: int, *, prompt: bool) -> bytes:
    """OutputLogProbs of tokens [start, stop) as field `output`, and InputLogProbs as field `prompt_field`."""
    rich = sequence.rich
    if rich is None:
        return b""
    fields = b""
    if rich.logprobs is not None and stop > start:
        message = output_logprobs(rich.logprobs, start, stop)
        fields = b"".join((VARINT[output << 3 | 2], VARINT[len(message)], message))
    if prompt and rich.prompt_logprobs is not None and len(rich.prompt_logprobs) >= sequence.request.prompt_tokens - 1:
        message = input_logprobs(sequence.request.prompt_ids, rich.prompt_logprobs)
        fields += b"".join((VARINT[prompt_field << 3 | 2], VARINT[len(message)], message))
    return fields


def output_logprobs(columns: Columns, start: int, stop: int) -> bytes:
    """OutputLogProbs: the value and id of each token, and its k most likely, the likeliest first.

    Chunks come in order, and the terminal repeats them all: each row is rendered once.
    """
    width = columns.width
    first, end = start * width, stop * width
    if width == 1:
        values, tops = columns.values[first * 4 : end * 4], b""
        ids = b"".join(varints(columns.ids[first:end]))
    elif stop - start == 1:
        ids, *others = varints(columns.ids[first:end])
        floats = columns.values[first * 4 : end * 4]
        tops = _top(others, floats[4:])
        if columns.rendered_rows == start:
            columns.rendered += tops
            columns.rendered_rows = stop
        return b"".join((b"\x0a\x04", floats[:4], b"\x12", VARINT[len(ids)], ids, tops))
    else:
        ids = b"".join(varints(columns.ids[first:end:width]))
        values = bytearray(memoryview(columns.values).cast("f")[first:end:width])
        ready = columns.rendered if start == 0 else b""
        rows = range(columns.rendered_rows if ready else start, stop)
        tops = b"".join((ready, *(_top_of(columns, row) for row in rows)))
    if width > 1 and columns.rendered_rows == start:
        columns.rendered += tops
        columns.rendered_rows = stop
    return b"".join((b"\x0a", VARINT[len(values)], values, b"\x12", VARINT[len(ids)], ids, tops))


def input_logprobs(prompt: list[int], columns: Columns) -> bytes:
    """InputLogProbs: one entry a prompt token; the first has no value and no alternatives."""
    width = columns.width
    ids = b"".join(varints(prompt))
    values = [b"\x0a\x00"]
    tops = [b"\x1a\x00"]
    for row in range(len(prompt) - 1):
        start = row * width * 4
        values.append(b"\x0a\x05\x0d" + columns.values[start : start + 4])
        tops.append(_top_of(columns, row))
    top = b"".join(tops) if width > 1 else b""
    return b"%b\x12%b%b%b" % (b"".join(values), VARINT[len(ids)], ids, top)


def _top_of(columns: Columns, row: int) -> bytes:
    width = columns.width
    start, stop = row * width + 1, (row + 1) * width
    return _top(varints(columns.ids[start:stop]), columns.values[start * 4 : stop * 4])


def _top(ids: list[bytes], values: bytearray) -> bytes:
    """One TopLogProbs as field 3, of varints and packed floats."""
    packed = b"".join(ids)
    varint = VARINT
    body = b"".join((b"\x0a", varint[len(values)], values, b"\x12", varint[len(packed)], packed))
    return b"".join((b"\x1a", varint[len(body)], body))
