"""Chunks of one token as byte templates, for all streams of a step at once.

A framed chunk is a head that only depends on the sizes of its parts, the token's id, a middle that is the same in every
chunk of a stream, and the number of tokens so far.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from bridge.varint import VARINT, varints

Heads = Sequence[Sequence[bytes]]
"""`heads[i][n]` goes before an id of `i` bytes that a count of `n` bytes ends."""


class Template(NamedTuple):
    """One stream's chunks."""

    heads: Heads
    middle: bytes


def render(heads: Heads, middle: bytes, token: int, count: int) -> bytes:
    """One framed chunk; `count` includes the token."""
    id_, number = VARINT[token], VARINT[count]
    return b"".join((heads[len(id_)][len(number)], id_, middle, number))


def render_each(
    heads: Iterable[Heads],
    middles: Iterable[bytes],
    tokens: Sequence[int],
    counts: Sequence[int],
) -> list[bytes]:
    """One framed chunk for each stream, by the columns of their templates; `counts` include the new token."""
    join = b"".join
    return [
        join((head[len(token)][len(count)], token, middle, count))
        for head, token, middle, count in zip(heads, varints(tokens), middles, varints(counts), strict=True)
    ]
