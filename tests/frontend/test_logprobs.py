"""Log-probabilities from the wire's rows to the contract's messages, in any cut of chunks."""

from __future__ import annotations

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from bridge.contracts.vllm_render import output_logprobs
from bridge.logprobs import Columns
from bridge.wire.errors import WireError
from bridge.wire.tensors import RAW_VIEW
from bridge.wire.vllm.logprobs import LogprobsReader

POSITIONS = (0, 1, 2)
Row = list[tuple[int, float]]


def wire_rows(rows: list[Row], *, ranks: list[int], dtypes: tuple[str, str, str] = ("<i4", "<f4", "<i8")) -> bytes:
    """LogprobsLists as vLLM 0.32 sends small ones."""
    codes = {"<i4": "i", "<i8": "q", "<f4": "f", "<f8": "d"}
    shape = [len(rows), len(rows[0])]
    columns = ([token for row in rows for token, _ in row], [value for row in rows for _, value in row], ranks)
    tensors = [
        [dtype, size, msgspec.msgpack.Ext(RAW_VIEW, struct.pack(f"<{len(cells)}{codes[dtype]}", *cells))]
        for dtype, size, cells in zip(dtypes, (shape, shape, [len(rows)]), columns, strict=True)
    ]
    return msgspec.msgpack.encode([*tensors, None])


values = st.floats(-50, 0, width=32)
tokens = st.integers(0, 200_000)


@st.composite
def chunks(draw: st.DrawFn) -> tuple[list[list[Row]], int]:
    """(rows by chunk, k), with rows that may be wider than 1 + k."""
    k, extra = draw(st.integers(0, 21)), draw(st.integers(0, 3))
    row = st.lists(st.tuples(tokens, values), min_size=1 + k + extra, max_size=1 + k + extra)
    return draw(st.lists(st.lists(row, min_size=1, max_size=3), min_size=1, max_size=5)), k


def says(message: pb.OutputLogProbs) -> list[Row]:
    first = list(zip(message.token_ids, message.token_logprobs, strict=True))
    if not message.top_logprobs:
        return [[cell] for cell in first]
    return [
        [cell, *zip(top.token_ids, top.values, strict=True)]
        for cell, top in zip(first, message.top_logprobs, strict=True)
    ]


@given(chunks())
def test_chunks_and_the_terminal_say_what_the_engine_said(given_chunks: tuple[list[list[Row]], int]) -> None:
    by_chunk, k = given_chunks
    reader, columns, at = LogprobsReader("LogprobsLists", POSITIONS), Columns(k), 0
    for rows in by_chunk:
        found = reader.read(msgspec.Raw(wire_rows(rows, ranks=[7] * len(rows))), ())
        assert found is not None
        assert list(found.ranks) == [7] * len(rows)
        columns.extend(found, len(rows))
        message = pb.OutputLogProbs.FromString(output_logprobs(columns, at, at + len(rows)))
        assert says(message) == [row[: k + 1] for row in rows]
        at += len(rows)
    whole = pb.OutputLogProbs.FromString(output_logprobs(columns, 0, at))
    assert says(whole) == [row[: k + 1] for rows in by_chunk for row in rows]
    assert len(columns) == at


def test_an_answer_that_is_not_streamed_is_rendered_whole() -> None:
    rows: list[Row] = [[(5, -0.5), (6, -0.25)], [(300, -1.0), (7, -0.75)]]
    columns = Columns(1)
    found = LogprobsReader("LogprobsLists", POSITIONS).read(msgspec.Raw(wire_rows(rows, ranks=[2, 2])), ())
    assert found is not None
    columns.extend(found, 2)
    assert says(pb.OutputLogProbs.FromString(output_logprobs(columns, 0, 2))) == rows


@given(st.lists(st.tuples(tokens, values), min_size=1, max_size=70), st.sampled_from(["<i4", "<i8"]))
def test_a_row_reads_the_same_the_second_time(row: Row, ids: str) -> None:
    """The first row of a width goes through the decoder, the next through the form that was learned from it."""
    reader = LogprobsReader("LogprobsLists", POSITIONS)
    raw = msgspec.Raw(wire_rows([row], ranks=[3], dtypes=(ids, "<f4", "<i8")))
    first, second = reader.read(raw, ()), reader.read(raw, ())
    assert first is not None
    assert second is not None
    for found in (first, second):
        assert (found.width, list(found.token_ids), list(found.ranks)) == (len(row), [token for token, _ in row], [3])
        assert list(struct.unpack(f"<{len(row)}f", found.values)) == [value for _, value in row]


def test_bytes_of_a_known_size_that_are_no_row_are_refused() -> None:
    reader = LogprobsReader("LogprobsLists", POSITIONS)
    raw = wire_rows([[(1, -1.0), (2, -2.0)]], ranks=[1])
    assert reader.read(msgspec.Raw(raw), ()) is not None
    for position, byte in enumerate(raw):
        changed = raw[:position] + bytes([byte ^ 0xFF]) + raw[position + 1 :]
        try:
            found = reader.read(msgspec.Raw(changed), ())
        except WireError:
            continue
        assert found is not None
        assert (found.width, len(found.token_ids), len(found.values)) == (2, 2, 8)


def test_a_pickle_is_refused() -> None:
    raw = msgspec.msgpack.encode([["<i4", [1, 1], msgspec.msgpack.Ext(1, b"\0\0\0\0")], None, None])
    with pytest.raises(WireError, match="ext type 1"):
        LogprobsReader("LogprobsLists", POSITIONS).read(msgspec.Raw(raw), ())
