"""Renders `vllm.Inference` replies: bytes for what is sent each step, protobuf objects for what is sent once.

Field numbers are those of `proto/vllm_inference.proto`; tests parse what is rendered with protobuf. As vllm-rs 0.33.0
does it: `prompt_info` first and alone in a stream, only what is new afterwards, and the last tokens of a sequence with
its `finish_info`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

from bridge.contracts.proto import enum, message
from bridge.contracts.text_out import TextOut, text_out
from bridge.detokenizer import TextRules
from bridge.grpc.call import Call
from bridge.grpc.framing import prefix
from bridge.grpc.status import Code
from bridge.logprobs import Columns
from bridge.requests import Rich, Sequence
from bridge.stops import StopMatcher, StopRules
from bridge.template import Template
from bridge.varint import PADDED_BYTES, VARINT, varints
from bridge.wire.codec import Finish, Logprobs

GenerateResponse = message("vllm.GenerateResponse")
PromptInfo = message("vllm.PromptInfo")
FinishInfo = message("vllm.FinishInfo")

_REASONS = enum("vllm.FinishInfo.FinishReason")
FINISH = {Finish.STOP: _REASONS["STOP"], Finish.LENGTH: _REASONS["LENGTH"], Finish.ABORT: _REASONS["ABORTED"]}

PROMPT_INFO, OUTPUTS = b"\x0a", b"\x12"
"""Keys of GenerateResponse."""
INDEX, TEXT, NUM_TOKENS, TOKEN_IDS, LOGPROBS, RANKS, CANDIDATES, FINISH_INFO = (
    b"\x08",
    b"\x12",
    b"\x18",
    b"\x22",
    b"\x2a",
    b"\x32",
    b"\x3a",
    b"\x42",
)
"""Keys of SequenceOutput."""
TOKENS = b"\x0a"
"""Key of CandidateTokenInfo."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What a request wants to see. `logprobs` is the number of candidates a token, None without log-probabilities."""

    token_ids: bool = False
    text: bool = True
    logprobs: int | None = None
    prompt_token_ids: bool = False
    prompt_logprobs: int | None = None
    keep_stop_text: bool = False

    @property
    def only_ids(self) -> bool:
        """Nothing but token ids comes out, so chunks depend on nothing but their tokens."""
        return self.token_ids and not self.text and self.logprobs is None and self.prompt_logprobs is None


class RankedColumns(Columns):
    """Columns with the rank of each row's own token."""

    __slots__ = ("ranks",)

    def __init__(self, k: int) -> None:
        super().__init__(k)
        self.ranks: list[int] = []

    def extend(self, rows: Logprobs, count: int) -> None:
        super().extend(rows, count)
        self.ranks += rows.ranks[:count]


_PLAIN_LEAD = b"%b%c%b\x01%b%c" % (OUTPUTS, 4 + PADDED_BYTES, NUM_TOKENS, TOKEN_IDS, PADDED_BYTES)
PLAIN = Template(prefix(len(_PLAIN_LEAD) + PADDED_BYTES) + _PLAIN_LEAD, None)
"""Chunks that show nothing but a token's id."""


class IdsSink:
    """Renders one call that shows nothing but the token ids of one sequence: what vllm-router asks for."""

    _plain: Template | None = PLAIN
    __slots__ = ("_call", "_eos", "_last", "_prompt_sent", "_stream", "shown", "template")

    def __init__(self, call: Call, shown: Shown, eos: frozenset[int], *, stream: bool) -> None:
        self._call = call
        self._eos = eos
        self._stream = stream
        self._prompt_sent = False
        self._last: list[int] = []
        self.shown = shown
        self.template: Template | None = None

    def chunk(self, sequence: Sequence, tokens: list[int]) -> None:
        if sequence.finish is not None:
            self._last = tokens
            return
        if not self._prompt_sent:
            self._send_prompt(sequence)
            self.template = self._plain
        self._send_output(self.body(sequence, tokens, sequence.sent - len(tokens), ended=False))

    def complete(self, sequence: Sequence) -> None:
        tokens = self._last if self._stream else sequence.output_ids.tolist()
        body = self.body(sequence, tokens, len(sequence.output_ids) - len(tokens), ended=True)
        finish = finish_info(sequence, self._eos)
        output = b"%b%b%b%b" % (body, FINISH_INFO, VARINT[len(finish)], finish)
        if self._stream:
            self._last = []
            if not self._prompt_sent:
                self._send_prompt(sequence)
            self._send_output(output)
        else:
            prompt = prompt_info(sequence, self.shown)
            self._call.send(
                b"%b%b%b%b%b%b" % (PROMPT_INFO, VARINT[len(prompt)], prompt, OUTPUTS, VARINT[len(output)], output)
            )

    def close(self) -> None:
        self._call.finish()

    def fail(self, code: Code, text: str) -> None:
        self._call.finish(code, text)

    def body(self, sequence: Sequence, tokens: list[int], start: int, *, ended: bool) -> bytes:
        """SequenceOutput of tokens [start, start + len(tokens)), without its finish_info."""
        if not tokens:
            return b""
        ids = VARINT[tokens[0]] if len(tokens) == 1 else b"".join(varints(tokens))
        return b"%b%b%b%b%b" % (NUM_TOKENS, VARINT[len(tokens)], TOKEN_IDS, VARINT[len(ids)], ids)

    def _send_prompt(self, sequence: Sequence) -> None:
        self._prompt_sent = True
        prompt = prompt_info(sequence, self.shown)
        self._call.send(b"%b%b%b" % (PROMPT_INFO, VARINT[len(prompt)], prompt))

    def _send_output(self, output: bytes) -> None:
        self._call.send(b"%b%b%b" % (OUTPUTS, VARINT[len(output)], output))


class FullSink(IdsSink):
    """Renders everything else: text, log-probabilities and candidates, several sequences."""

    _plain = None
    __slots__ = ("_quick", "_rules", "_texts")

    def __init__(
        self, call: Call, shown: Shown, eos: frozenset[int], rules: TextRules | None, *, stream: bool, sequences: int
    ) -> None:
        """`rules` make tokens text; None where no text is shown. Stop strings are found in any case, by `maker`."""
        super().__init__(call, shown, eos, stream=stream)
        self._rules = rules
        self._texts: dict[int, TextOut] = {}
        self._quick = sequences == 1 and shown.token_ids and shown.logprobs is None and rules is not None

    def chunk(self, sequence: Sequence, tokens: list[int]) -> None:
        """What vllm-router asks for with stop strings, id and text of one token, is written in one go."""
        if not self._quick or len(tokens) != 1 or sequence.finish is not None or not self._prompt_sent:
            super().chunk(sequence, tokens)
            return
        text, id_ = self._texts[0].next(tokens).encode(), VARINT[tokens[0]]
        part = b"\x12%b%b" % (VARINT[len(text)], text) if text else b""
        body = b"%b\x18\x01\x22%b%b" % (part, VARINT[len(id_)], id_)
        self._call.send(b"\x12%b%b" % (VARINT[len(body)], body))

    def body(self, sequence: Sequence, tokens: list[int], start: int, *, ended: bool) -> bytes:
        shown, varint, rich = self.shown, VARINT, sequence.rich
        parts = [INDEX, varint[sequence.index]] if sequence.index else []
        if self._rules is not None:
            text = self._text(sequence, tokens, ended=ended).encode()
            if text:
                parts += (TEXT, varint[len(text)], text)
        if tokens:
            parts += (NUM_TOKENS, varint[len(tokens)])
            if shown.token_ids:
                ids = b"".join(varints(tokens))
                parts += (TOKEN_IDS, varint[len(ids)], ids)
            if shown.logprobs is not None and rich is not None and isinstance(rich.logprobs, RankedColumns):
                parts += scored(rich.logprobs, start, start + len(tokens))
        return b"".join(parts)

    def _text(self, sequence: Sequence, tokens: list[int], *, ended: bool) -> str:
        keep, out = self.shown.keep_stop_text, self._texts.get(sequence.index)
        if out is None:
            assert self._rules is not None
            out = self._texts[sequence.index] = text_out(sequence, self._rules, keep_stop=keep)
        if not ended:
            return out.next(tokens)
        if sequence.finish is Finish.STOP and sequence.stop_string is None and not keep:
            tokens = tokens[:-1]  # the token that made the engine stop is no text
        return out.last(tokens, sequence.stop_string, keep_stop=keep)


def maker(shown: Shown, stops: StopRules | None) -> Callable[[], Rich] | None:
    """What makes that which each sequence carries beyond its tokens; None when nothing."""
    if stops is None and shown.logprobs is None and shown.prompt_logprobs is None:
        return None

    def make() -> Rich:
        rich = Rich()
        if stops is not None:
            rich.stops = StopMatcher(stops, keep_text=shown.text)
        if shown.logprobs is not None:
            rich.logprobs = RankedColumns(shown.logprobs)
        if shown.prompt_logprobs is not None:
            rich.prompt_logprobs = RankedColumns(shown.prompt_logprobs)
        return rich

    return make


def finish_info(sequence: Sequence, eos: frozenset[int]) -> bytes:
    """FinishInfo of a sequence that ended. EOS is told apart from the stop ids that the request gave."""
    assert sequence.finish is not None
    info = FinishInfo(num_output_tokens=len(sequence.output_ids), finish_reason=FINISH[sequence.finish])
    if sequence.stop_string is not None:
        info.stop_string = sequence.stop_string
    elif sequence.stop_id is not None:
        info.stop_token_id = sequence.stop_id
    elif sequence.finish is Finish.STOP and sequence.output_ids and sequence.output_ids[-1] in eos:
        info.eos_token_id = sequence.output_ids[-1]
    if sequence.transfer_params is not None:
        info.kv_transfer_params.update(sequence.transfer_params)
    if sequence.finish is not Finish.ABORT:
        info.num_cached_prompt_tokens = sequence.cached_tokens
    data: bytes = info.SerializeToString()
    return data


def prompt_info(sequence: Sequence, shown: Shown) -> bytes:
    """PromptInfo; log-probabilities are in it once the engine has sent them, the first token's as a placeholder."""
    request = sequence.request
    info = PromptInfo(num_prompt_tokens=request.prompt_tokens)
    if shown.prompt_token_ids:
        info.token_ids.extend(request.prompt_ids)
    columns = sequence.rich.prompt_logprobs if sequence.rich is not None else None
    if isinstance(columns, RankedColumns) and len(columns) >= request.prompt_tokens - 1:
        width = columns.width or 1
        info.logprobs.append(0.0)
        info.ranks.append(0)
        info.candidate_tokens.add()
        for row in range(request.prompt_tokens - 1):
            at = row * width
            ids, values = columns.ids[at + 1 : at + width], columns.values[at * 4 : (at + width) * 4]
            own, *others = struct.unpack(f"<{width}f", values)
            info.logprobs.append(own)
            info.ranks.append(columns.ranks[row])
            candidates = info.candidate_tokens.add()
            for rank, (token, value) in enumerate(zip(ids, others, strict=True), 1):
                candidates.tokens.add(id=token, logprob=value, rank=rank)
    data: bytes = info.SerializeToString()
    return data


def scored(columns: RankedColumns, start: int, stop: int) -> list[bytes]:
    """Fields logprobs, ranks and candidate_tokens of output tokens [start, stop)."""
    width, varint = columns.width, VARINT
    values = b"".join([columns.values[row * width * 4 : row * width * 4 + 4] for row in range(start, stop)])
    ranks = b"".join(varints(columns.ranks[start:stop]))
    parts = [LOGPROBS, varint[len(values)], values, RANKS, varint[len(ranks)], ranks]
    for row in range(start, stop):
        tokens = b"".join([_candidate(columns, row * width + rank, rank) for rank in range(1, width)])
        parts += (CANDIDATES, varint[len(tokens)], tokens)
    return parts


def _candidate(columns: RankedColumns, at: int, rank: int) -> bytes:
    """TokenInfo of the candidate in cell `at`, as field `tokens` of CandidateTokenInfo."""
    token = columns.ids[at]
    head = b"\x08%b" % VARINT[token] if token else b""
    info = b"%b\x15%b\x18%b" % (head, bytes(columns.values[at * 4 : at * 4 + 4]), VARINT[rank])
    return b"%b%b%b" % (TOKENS, VARINT[len(info)], info)
