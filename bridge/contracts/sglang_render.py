"""Renders `sglang.grpc.scheduler` replies: byte templates for what is sent each step, protobuf objects for the rest.

Field numbers are those of sglang_scheduler.proto in smg-grpc-proto 0.4.28; tests parse every template with protobuf.
"""

from __future__ import annotations

from typing import Any

from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb

from bridge.contracts.vllm_render import FINISH, chunk_template, counts, input_logprobs, output_logprobs, plain_chunk
from bridge.grpc.call import Call
from bridge.grpc.status import Code
from bridge.requests import Sequence
from bridge.template import Template
from bridge.varint import VARINT, varints
from bridge.wire.sglang.outputs import SglangDelta, scores
from bridge.wire.tensors import packed_floats

LAST_LAYER = b"\x10" + b"\xff" * 9 + b"\x01"
"""`HiddenStates.layer` -1: the lane carries the final layer's rows only."""


class Collected:
    """What one sequence was told beyond tokens and their log-probabilities (`bridge.requests.Extras`)."""

    __slots__ = ("hidden_sent", "hidden_states", "reasoning_tokens", "scored")

    def __init__(self) -> None:
        self.reasoning_tokens = 0
        self.scored: list[bytes] = []
        """The chosen ids' TopLogProbs as field 4 of OutputLogProbs, one an output position."""
        self.hidden_states: list[bytes] = []
        """Packed floats, one row a position."""
        self.hidden_sent = 0
        """Rows of hidden states that went into chunks."""

    def take(self, delta: SglangDelta) -> None:
        found = scores(delta)
        self.reasoning_tokens = max(self.reasoning_tokens, found.reasoning_tokens)
        self.scored += [_scored(*row) for row in found.scored]
        self.hidden_states += [packed_floats(row) for row in found.hidden_states]


class PlainSink:
    """Renders one Generate call of one sequence that reports nothing but tokens.

    Once a chunk is out, the ones that follow need only the template.
    """

    __slots__ = ("_call", "_prefix", "_prompt", "template")

    def __init__(self, call: Call, request_id: str, prompt_tokens: int) -> None:
        self._call = call
        name = request_id.encode()
        self._prefix = b"\x0a%b%b" % (VARINT[len(name)], name) if name else b""
        self._prompt = b"\x10" + VARINT[prompt_tokens]
        self.template: Template | None = None

    def chunk(self, sequence: Sequence, tokens: list[int]) -> None:
        fields = counts(self._prompt, sequence)
        body = plain_chunk(fields, tokens, sequence.sent)
        self._call.send(b"%b\x12%b%b" % (self._prefix, VARINT[len(body)], body))
        if self.template is None:
            self.template = chunk_template(self._prefix + b"\x12", fields)

    def complete(self, sequence: Sequence) -> None:
        self._send_complete(complete_of(sequence).SerializeToString())

    def close(self) -> None:
        self._call.finish()

    def fail(self, code: Code, message: str) -> None:
        self._call.finish(code, message)

    def _send_complete(self, body: bytes) -> None:
        self._call.send(b"%b\x1a%b%b" % (self._prefix, VARINT[len(body)], body))


class RichSink(PlainSink):
    """Renders several samples, log-probabilities, hidden states and reasoning tokens; its chunks have no template."""

    __slots__ = ()

    def chunk(self, sequence: Sequence, tokens: list[int]) -> None:
        varint = VARINT
        ids = b"".join(varints(tokens))
        sent, extras = sequence.sent, _collected(sequence)
        start = sent - len(tokens)
        body = b"\x0a%b%b%b\x18%b%b%b%b%b%b" % (
            varint[len(ids)],
            ids,
            self._prompt,
            varint[sent],
            b"\x20" + varint[sequence.cached_tokens] if sequence.cached_tokens else b"",
            logprob_fields(sequence, 5, 7, start, sent, prompt=start == 0),
            _new_hidden_states(extras),
            b"\x40" + varint[sequence.index] if sequence.index else b"",
            b"\x48" + varint[extras.reasoning_tokens] if extras and extras.reasoning_tokens else b"",
        )
        self._call.send(b"%b\x12%b%b" % (self._prefix, varint[len(body)], body))

    def complete(self, sequence: Sequence) -> None:
        complete, extras = complete_of(sequence), _collected(sequence)
        stop, hidden = len(sequence.output_ids), b""
        if extras is not None:
            complete.reasoning_tokens = extras.reasoning_tokens
            stop = max(stop, len(extras.scored))
            hidden = b"".join([_hidden_state(*row) for row in enumerate(extras.hidden_states)])
        fields = logprob_fields(sequence, 6, 10, 0, stop, prompt=True)
        self._send_complete(b"%b%b%b" % (complete.SerializeToString(), fields, hidden))


def _collected(sequence: Sequence) -> Collected | None:
    extras: Any = sequence.rich.extras if sequence.rich is not None else None
    return extras if isinstance(extras, Collected) else None


def _new_hidden_states(extras: Collected | None) -> bytes:
    """The rows that no chunk had yet, one after the other, as field 6."""
    if extras is None or extras.hidden_sent == len(extras.hidden_states):
        return b""
    values = b"".join(extras.hidden_states[extras.hidden_sent :])
    extras.hidden_sent = len(extras.hidden_states)
    return b"\x32%b%b" % (VARINT[len(values)], values)


def _hidden_state(position: int, row: bytes) -> bytes:
    """One HiddenStates as field 7 of GenerateComplete."""
    body = b"\x0a%b%b%b\x18%b" % (VARINT[len(row)], row, LAST_LAYER, VARINT[position])
    return b"\x3a%b%b" % (VARINT[len(body)], body)


def complete_of(sequence: Sequence) -> pb.GenerateComplete:
    """The terminal of a sequence, with what every request is told."""
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
    return complete


def logprob_fields(sequence: Sequence, output: int, prompt_field: int, start: int, stop: int, *, prompt: bool) -> bytes:
    """OutputLogProbs of positions [start, stop) as field `output`, and InputLogProbs as field `prompt_field`."""
    rich, extras = sequence.rich, _collected(sequence)
    if rich is None:
        return b""
    message = b""
    if rich.logprobs is not None and len(rich.logprobs) > start:
        message = output_logprobs(rich.logprobs, start, min(stop, len(rich.logprobs)))
    if extras is not None and extras.scored:
        message += b"".join(extras.scored[start:stop])
    fields = b"%b%b%b" % (VARINT[output << 3 | 2], VARINT[len(message)], message) if message else b""
    asked = sequence.request.prompt_ids
    if prompt and asked and rich.prompt_logprobs is not None and len(rich.prompt_logprobs) >= len(asked) - 1:
        message = input_logprobs(asked, rich.prompt_logprobs)
        fields += b"%b%b%b" % (VARINT[prompt_field << 3 | 2], VARINT[len(message)], message)
    return fields


def _scored(values: list[float], ids: list[int]) -> bytes:
    """One position's TopLogProbs as field 4."""
    packed, names = packed_floats(values), b"".join(varints(ids))
    body = b"\x0a%b%b\x12%b%b" % (VARINT[len(packed)], packed, VARINT[len(names)], names)
    return b"\x22%b%b" % (VARINT[len(body)], body)
