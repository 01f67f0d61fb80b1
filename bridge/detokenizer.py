"""Output text made token by token with the model's tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

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


class Detokenizer:
    """The text of one sequence. What a token only begins (a character's first bytes) comes with the one that ends it."""

    __slots__ = ("_after_added", "_pending", "_rules", "_stream")

    def __init__(self, rules: TextRules) -> None:
        from tokenizers.decoders import DecodeStream

        self._rules = rules
        self._stream = DecodeStream(ids=rules.prompt, skip_special_tokens=rules.skip_special_tokens)
        self._after_added = False
        self._pending: list[int] = []
        """The last tokens, which have completed no text yet."""

    def text(self, tokens: Sequence[int]) -> str:
        """The text that these tokens complete."""
        if len(tokens) == 1:
            return self.piece(tokens[0])
        return "".join([self.piece(token) for token in tokens])

    def piece(self, token: int) -> str:
        """The text that `token` completes."""
        piece = self._step(token)
        if self._rules.added:
            added = self._rules.added.get(token)
            if added is not None and self._after_added:
                piece = added
            self._after_added = added is not None
        if not piece:
            self._pending.append(token)
        elif self._pending:
            self._pending.clear()
        return piece

    def rest(self) -> str:
        """What stands for a character that the last tokens began and did not complete."""
        if not self._pending:
            return ""
        rules = self._rules
        text = rules.tokenizer.decode(self._pending, skip_special_tokens=rules.skip_special_tokens)
        return text if text.endswith(REPLACEMENT) else ""

    def _step(self, token: int) -> str:
        """The text that `token` completes. A stream that met output that is no text starts over, as vLLM's does."""
        try:
            return self._stream.step(self._rules.tokenizer, token) or ""
        except Exception as error:
            if not str(error).startswith(INVALID_PREFIX):
                raise
        from tokenizers.decoders import DecodeStream

        self._stream = DecodeStream(skip_special_tokens=self._rules.skip_special_tokens)
        return self._stream.step(self._rules.tokenizer, token) or ""
