"""Chunks of one token as byte templates, for all streams of a step at once.

A framed chunk is a head that only depends on the sizes of its parts, the token's id, a middle that is the same in every
chunk of a stream, and the number of tokens so far; or, in contracts that count nothing, a head and the id.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, cast

from bridge.varint import VARINT, varints

Heads = Sequence[Sequence[bytes]]
"""`heads[i][n]` goes before an id of `i` bytes that a count of `n` bytes ends."""

BareHeads = Sequence[bytes]
"""`heads[i]` goes before an id of `i` bytes that ends the chunk."""


class Template(NamedTuple):
    """One stream's chunks; `middle` is None, and the heads are bare, where no count ends them."""

    heads: Heads | BareHeads
    middle: bytes | None


def render(heads: Heads | BareHeads, middle: bytes | None, token: int, count: int) -> bytes:
    """One framed chunk; `count` includes the token."""
    id_ = VARINT[token]
    if middle is None:
        return cast(BareHeads, heads)[len(id_)] + id_
    number = VARINT[count]
    return b"".join((cast(Heads, heads)[len(id_)][len(number)], id_, middle, number))


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


def render_any(
    heads: Iterable[Heads | BareHeads],
    middles: Sequence[bytes | None],
    tokens: Sequence[int],
    counts: Sequence[int],
) -> list[bytes]:
    """As `render_each`, for streams whose chunks may end without a count."""
    if middles.count(None) == len(middles):
        bare = cast(Iterable[BareHeads], heads)
        return [head[len(id_)] + id_ for head, id_ in zip(bare, varints(tokens), strict=True)]
    return [render(*chunk) for chunk in zip(heads, middles, tokens, counts, strict=True)]
