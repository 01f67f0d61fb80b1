"""Long prompts on their way to the engine.

A hundred thousand token ids take 3 ms to become Python numbers, be checked and be encoded, and other streams would wait
for all of it. So it is done in pieces, with a turn of the loop between them, and the ids never exist all at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import cast, overload

import msgspec

LONG = 16384
"""A prompt of more ids than this is prepared in pieces."""
PIECE = 4096
"""Ids of a piece: about 0.1 ms."""

_encode = msgspec.msgpack.Encoder().encode


class LongPrompt(Sequence[int]):
    """Ids that passed the check of `checked_by`; `encoded` is what an engine gets for them."""

    __slots__ = ("_ids", "_span", "checked_by", "encoded")

    def __init__(self, ids: Sequence[int], start: int, encoded: msgspec.Raw, checked_by: object) -> None:
        """The prompt is `ids` from `start` on; `ids` may be a protobuf field and make each number when it is asked for."""
        self._ids = ids
        self._span = range(start, len(ids))
        self.encoded = encoded
        self.checked_by = checked_by

    def __len__(self) -> int:
        return len(self._span)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        picked = self._span[index]
        if isinstance(picked, int):
            return self._ids[picked]
        if picked.step == 1:
            return list(self._ids[picked.start : picked.stop])
        return [self._ids[at] for at in picked]


async def encode_long(ids: Sequence[int], start: int, check: Callable[[list[int], int], None]) -> msgspec.Raw:
    """`ids` from `start` on as a msgpack array.

    `check(piece, first)` gets each piece as a list with the position of its first id in the prompt, and raises for ids
    that may not be sent.
    """
    pieces = [b"\xdd" + (len(ids) - start).to_bytes(4, "big")]
    for at in range(start, len(ids), PIECE):
        piece = ids[at : at + PIECE]
        check(cast("list[int]", piece), at - start)
        head = 3 if len(piece) > 15 else 1
        pieces.append(_encode(piece)[head:])
        del piece
        await asyncio.sleep(0)
    return msgspec.Raw(b"".join(pieces))


def kept_ids(prompt: Sequence[int], keep: bool) -> list[int]:
    """What a `Request` is made with: the ids where it keeps them, else anything that has their number."""
    if isinstance(prompt, list):
        return prompt
    return prompt[:] if keep and isinstance(prompt, LongPrompt) else cast("list[int]", prompt)


def wire_ids(prompt: Sequence[int], copies: int = 1) -> list[int] | msgspec.Raw:
    """What stands for `prompt` in each of `copies` engine calls: the list, or its encoding where there is or will be one."""
    if isinstance(prompt, LongPrompt):
        return prompt.encoded
    return cast("list[int]", prompt) if copies == 1 else msgspec.Raw(_encode(prompt))
