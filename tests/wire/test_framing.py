"""Messages come out of a byte stream as they went in, however the bytes are cut."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.wire.framing import Framing, FramingError, framed


class Note(msgspec.Struct):
    text: str


@given(st.lists(st.text(max_size=80), max_size=8), st.lists(st.integers(1, 40), min_size=1, max_size=20))
def test_any_cut_of_the_bytes_gives_the_same_messages(texts: list[str], cuts: list[int]) -> None:
    stream = b"".join(framed(Note(text)) for text in texts)
    framing, bodies, at, turn = Framing(1000), [], 0, 0
    while at < len(stream):
        size = cuts[turn % len(cuts)]
        bodies += framing.feed(stream[at : at + size])
        at, turn = at + size, turn + 1
    assert [msgspec.msgpack.decode(body, type=Note).text for body in bodies] == texts


def test_a_length_over_the_limit_is_an_error() -> None:
    with pytest.raises(FramingError, match="of 1001 bytes is over the limit of 1000"):
        Framing(1000).feed((1001).to_bytes(4, "big"))
