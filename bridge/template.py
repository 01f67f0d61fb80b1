"""Chunks of one token as byte templates, for all streams of a step at once.

A framed chunk is a head that only depends on the sizes of its parts, the token's id, a middle that is the same in every
chunk of a stream, and the number of tokens so far; or, in contracts that count nothing, it is told by the token alone.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, cast

from bridge.varint import VARINT, varints

Heads = Sequence[Sequence[bytes]]
"""`heads[i][n]` goes before an id of `i` bytes that a count of `n` bytes ends."""


KEPT = 1 << 16
"""Framed chunks that a `Frames` keeps: some 6 MB."""


class Frames(dict[int, bytes]):
    """Token → its framed chunk, made by `make` when it is first asked for."""

    def __init__(self, make: Callable[[int], bytes]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, token: int) -> bytes:
        chunk = self._make(token)
        if len(self) < KEPT:
            self[token] = chunk
        return chunk


class Template(NamedTuple):
    """One stream's chunks; `middle` is None where they depend on nothing but the token."""

    heads: Heads | Frames
    middle: bytes | None


def render(heads: Heads | Frames, middle: bytes | None, token: int, count: int) -> bytes:
    """One framed chunk; `count` includes the token."""
    if isinstance(heads, Frames):
        return heads[token]
    assert middle is not None
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


def render_any(
    heads: Iterable[Heads | Frames],
    middles: Sequence[bytes | None],
    tokens: Sequence[int],
    counts: Sequence[int],
) -> list[bytes]:
    """As `render_each`, for streams whose contracts may count nothing."""
    if middles.count(None) == len(middles):
        return list(map(operator.getitem, cast(Iterable[Frames], heads), tokens))
    return [render(*chunk) for chunk in zip(heads, middles, tokens, counts, strict=True)]
