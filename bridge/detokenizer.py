"""Output text made token by token with the model's tokenizer."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.decoders import DecodeStream

PROMPT_TAIL = 64
"""Prompt tokens that prime a decoder: enough for the text of what follows them, whatever the prompt's length."""

INVALID_PREFIX = "Invalid prefix encountered"
"""How `tokenizers` begins its error for output that is not valid UTF-8 at a place where it was before."""


class TextRules:
    """How the tokens of one request become text; shared by its sequences."""

    __slots__ = ("added", "prompt", "skip_special_tokens", "tokenizer")

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        *,
        skip_special_tokens: bool,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self.tokenizer = tokenizer
        self.prompt = list(prompt[-PROMPT_TAIL:])
        self.skip_special_tokens = skip_special_tokens
        self.added: dict[int, str] = {}
        if not (skip_special_tokens or spaces_between_special_tokens):
            self.added = {number: token.content for number, token in tokenizer.get_added_tokens_decoder().items()}


REPLACEMENT = "\ufffd"
"""What bytes become that are no character."""


class Pieces:
    """What each token of a byte-level vocabulary is: its bytes, and its text where those are whole characters.

    Tokens of such a vocabulary are strings in which each character stands for a byte (GPT-2's table), so text is made by
    joining bytes; tokens that were added are themselves.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = frozenset(
            number
            for number, token in tokenizer.get_added_tokens_decoder().items()
            if skip_special_tokens and token.special
        )
        self.texts: dict[int, str | None] = {}
        """Token → its text; None where it has to be joined with its neighbours. Filled by `text`."""

    def text(self, token: int) -> str | None:
        """What `texts` holds for a token, made on first use."""
        try:
            text: str | None = self.bytes(token).decode()
        except UnicodeDecodeError:
            text = None
        self.texts[token] = text
        return text

    def bytes(self, token: int) -> bytes:
        """The token's bytes; none for a token that is skipped or that the tokenizer does not know."""
        if token in self._skipped:
            return b""
        word = self._tokenizer.id_to_token(token)
        if word is None:
            return b""
        try:
            return bytes([BYTE_OF[character] for character in word])
        except KeyError:
            return word.encode()


def _byte_characters() -> dict[str, int]:
    """GPT-2's table: printable Latin-1 characters stand for themselves, the other bytes for characters from 256 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {chr(256 + index): byte for index, byte in enumerate(others)}


BYTE_OF = _byte_characters()


@functools.lru_cache(maxsize=8)
def pieces_of(tokenizer: Tokenizer, *, skip_special_tokens: bool) -> Pieces | None:
    """The pieces of a tokenizer's vocabulary; None where text is not made of its tokens' bytes alone."""
    if type(tokenizer.decoder).__name__ != "ByteLevel":
        return None
    return Pieces(tokenizer, skip_special_tokens=skip_special_tokens)


class Detokenizer:
    """The text of one sequence. What a token only begins (a character's first bytes) comes with the one that ends it."""

    __slots__ = ("_after_added", "_begun", "_pending", "_pieces", "_rules", "_stream", "_texts")

    def __init__(self, rules: TextRules) -> None:
        self._rules = rules
        self._after_added = False
        self._pieces = pieces_of(rules.tokenizer, skip_special_tokens=rules.skip_special_tokens)
        self._texts = self._pieces.texts if self._pieces is not None else {}
        self._begun = b""
        """Bytes of a character that is not complete (byte-level vocabularies)."""
        self._pending: list[int] = []
        """The last tokens, which have completed no text yet (others)."""
        self._stream: DecodeStream | None = None

    def text(self, tokens: Sequence[int]) -> str:
        """The text that these tokens complete."""
        if len(tokens) == 1:
            return self.piece(tokens[0])
        return "".join([self.piece(token) for token in tokens])

    def piece(self, token: int) -> str:
        """The text that `token` completes."""
        if not self._begun:
            text = self._texts.get(token)
            if text is not None and not self._rules.added:
                return text
        piece = self._joined(token) if self._pieces is not None else self._step(token)
        if self._rules.added:
            added = self._rules.added.get(token)
            if added is not None and self._after_added:
                piece = added
            self._after_added = added is not None
        return piece

    def rest(self) -> str:
        """What stands for a character that the last tokens began and did not complete."""
        if self._begun:
            return self._begun.decode(errors="replace")
        if not self._pending:
            return ""
        rules = self._rules
        text = rules.tokenizer.decode(self._pending, skip_special_tokens=rules.skip_special_tokens)
        return text if text.endswith(REPLACEMENT) else ""

    def _joined(self, token: int) -> str:
        """The text that `token` completes, by its bytes. As `tokenizers` does it, what ends in no character waits."""
        assert self._pieces is not None
        if not self._begun:
            text = self._pieces.text(token)
            if text is not None:
                return text
        data = self._begun + self._pieces.bytes(token)
        text = data.decode(errors="replace")
        if text.endswith(REPLACEMENT):
            self._begun = data
            return ""
        self._begun = b""
        return text

    def _step(self, token: int) -> str:
        """The text that `token` completes. A stream that met output that is no text starts over, as vLLM's does."""
        from tokenizers.decoders import DecodeStream

        rules = self._rules
        if self._stream is None:
            self._stream = DecodeStream(ids=rules.prompt, skip_special_tokens=rules.skip_special_tokens)
        try:
            piece = self._stream.step(rules.tokenizer, token) or ""
        except Exception as error:
            if not str(error).startswith(INVALID_PREFIX):
                raise
            self._stream = DecodeStream(skip_special_tokens=rules.skip_special_tokens)
            piece = self._stream.step(rules.tokenizer, token) or ""
        if piece:
            self._pending.clear()
        else:
            self._pending.append(token)
        return piece
