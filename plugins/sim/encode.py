"""Engine output messages as bytes: EngineCoreOutputs and EngineCoreOutput in the field order of one vLLM release.

The plain output (some tokens, nothing else) is two byte strings: a prefix made once for each request and a body
looked up by token id. Everything richer is put together field by field.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

encode = msgspec.msgpack.encode

NIL = b"\xc0"
ENGINE_CORE_DEAD = b"ENGINE_CORE_DEAD"

_float = struct.Struct(">Bd").pack


def array_header(length: int) -> bytes:
    """The msgpack header of an array."""
    if length < 16:
        return bytes((0x90 | length,))
    if length < 1 << 16:
        return b"\xdc" + length.to_bytes(2, "big")
    return b"\xdd" + length.to_bytes(4, "big")


class OutputEncoder:
    """Encodes for one layout, engine index and vocabulary.

    `outputs_fields` and `output_fields` are the field orders of EngineCoreOutputs and EngineCoreOutput.
    """

    def __init__(
        self, outputs_fields: Sequence[str], output_fields: Sequence[str], engine_index: int, vocab_size: int
    ) -> None:
        if tuple(output_fields[:2]) != ("request_id", "new_token_ids"):
            raise ValueError(f"an output layout that starts with {output_fields[:2]} cannot be encoded")
        self._outputs_fields = list(outputs_fields)
        self._header = array_header(len(outputs_fields))
        self._index = encode(engine_index)
        self._output_header = array_header(len(output_fields))
        self._rest = list(output_fields[2:])
        self._plain_tail = self.tail({})
        self._tokens = [encode(token) for token in range(vocab_size)]
        self._plain_bodies = [b"\x91" + token + self._plain_tail for token in self._tokens]

    def tail(self, values: Mapping[str, bytes]) -> bytes:
        """The encoded fields after `new_token_ids`; those not in `values` hold their defaults."""
        return b"".join(values.get(name, b"\x00" if name == "num_nans_in_logits" else NIL) for name in self._rest)

    def prefix(self, request_id: str) -> bytes:
        """What every output of a request starts with."""
        return self._output_header + encode(request_id)

    def bodies(self, tokens: Sequence[int], per_step: int, trace_headers: bytes | None) -> list[bytes]:
        """One output body for each step that emits `per_step` of `tokens` (the last may hold fewer)."""
        if per_step == 1 and trace_headers is None:
            plain = self._plain_bodies
            return [plain[token] for token in tokens]
        tail = self._plain_tail if trace_headers is None else self.tail({"trace_headers": trace_headers})
        return [self.body(tokens[start : start + per_step], tail) for start in range(0, len(tokens), per_step)]

    def body(self, tokens: Sequence[int], tail: bytes) -> bytes:
        """An output without its prefix."""
        encoded = self._tokens
        return b"%b%b%b" % (array_header(len(tokens)), b"".join([encoded[token] for token in tokens]), tail)

    def retail(self, body: bytes, trace_headers: bytes | None, values: Mapping[str, bytes]) -> bytes:
        """`body`, as `bodies` made it, with other values after its tokens."""
        tail = self._plain_tail if trace_headers is None else self.tail({"trace_headers": trace_headers})
        fields = dict(values)
        if trace_headers is not None:
            fields["trace_headers"] = trace_headers
        return body[: len(body) - len(tail)] + self.tail(fields)

    def message(
        self, timestamp: float, values: Mapping[str, bytes], parts: Sequence[bytes] = (), count: int = 0
    ) -> bytes:
        """An EngineCoreOutputs with `count` outputs, the join of `parts`; `values` are other fields, encoded.

        `timestamp` is in seconds of the monotonic clock.
        """
        out = [self._header]
        append = out.append
        for name in self._outputs_fields:
            if name == "outputs":
                append(array_header(count))
                out.extend(parts)
            elif name == "timestamp":
                append(_float(0xCB, timestamp))
            elif name == "engine_index":
                append(self._index)
            else:
                append(values.get(name, NIL))
        return b"".join(out)

    def reply(self, timestamp: float, call_id: Any, failure: str | None, value: Any) -> bytes:
        """The answer to a utility call."""
        result = None if failure is not None else [None, value]
        return self.message(timestamp, {"utility_output": encode([call_id, failure, result])})

    def finished(self, timestamp: float, request_ids: Sequence[str], reason: int) -> bytes:
        """Outputs that end requests outside a step; `finished_requests` is filled, as vLLM does there."""
        tail = self.tail({"finish_reason": encode(reason)})
        parts = [self.prefix(request_id) + b"\x90" + tail for request_id in request_ids]
        return self.message(timestamp, {"finished_requests": encode(list(request_ids))}, parts, len(parts))
