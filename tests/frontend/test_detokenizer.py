"""Text out of tokens: piece by piece the same as `tokenizers` makes of all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from tokenizers.decoders import DecodeStream

from bridge.detokenizer import Detokenizer, TextRules, pieces_of

VOCABULARY = 49152
TEXTS = (
    "The quick brown fox jumps over the lazy dog.\n\n\tAnd so on — “quoted” …",
    "日本の首都は東京です。 中文 한국어 العربية",
    "😀😃😄😁 👩‍👩‍👧‍👦 🇫🇷",
    "<|im_start|>user\nHi<|im_end|>\n",
)


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2 / "tokenizer.json"))


def rules(tokenizer: Tokenizer, prompt: list[int], *, skip: bool = True) -> TextRules:
    return TextRules(tokenizer, prompt, skip_special_tokens=skip)


def pieces(tokenizer: Tokenizer, ids: list[int], *, skip: bool = True) -> list[str]:
    decoder = Detokenizer(rules(tokenizer, [1], skip=skip))
    return [decoder.piece(token) for token in ids] + [decoder.rest()]


def test_a_byte_level_vocabulary_is_seen_as_one(tokenizer: Tokenizer) -> None:
    assert pieces_of(tokenizer, skip_special_tokens=True) is not None
    other = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    other.decoder = decoders.WordPiece()
    assert pieces_of(other, skip_special_tokens=True) is None
    assert "".join(pieces(other, [1, 2, 1])) == other.decode([1, 1, 2, 1]).removeprefix(other.decode([1]))


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_add_up_to_the_text(tokenizer: Tokenizer, text: str, skip: bool) -> None:
    ids = tokenizer.encode(text).ids
    assert "".join(pieces(tokenizer, ids, skip=skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("skip", [True, False])
def test_every_token_of_the_vocabulary(tokenizer: Tokenizer, skip: bool) -> None:
    for token in range(VOCABULARY):
        assert "".join(pieces(tokenizer, [token], skip=skip)) == tokenizer.decode([token], skip_special_tokens=skip)


@given(st.data())
def test_any_tokens_come_in_the_pieces_that_tokenizers_makes(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Half of them from the first ids, which are single bytes for the most part, so that characters break."""
    token = st.integers(3, 300) | st.integers(0, VOCABULARY - 1)
    ids = data.draw(st.lists(token, max_size=40))
    skip = data.draw(st.booleans())
    ours = pieces(tokenizer, ids, skip=skip)
    assert "".join(ours) == tokenizer.decode(ids, skip_special_tokens=skip)
    stream, theirs = DecodeStream(skip_special_tokens=skip), []
    try:
        theirs = [stream.step(tokenizer, token) or "" for token in ids]
    except Exception as error:
        assert "Invalid prefix" in str(error)
        return
    assert ours[:-1] == theirs
