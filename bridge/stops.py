"""Stop strings: text made token by token with the model's tokenizer, matched as it grows.

Engines match token ids only (vLLM, SGLang with skip-tokenizer-init), so the front end decodes what a sequence emits and
ends it at the token that completes a stop string. What the match means for text (trimmed or kept) is for whoever renders
text; token ids are kept up to and including the completing token, as vLLM's own output has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PROMPT_TAIL = 64
"""Prompt tokens that prime a decoder: enough for the text of what follows them, whatever the prompt's length."""

INVALID_PREFIX = "Invalid prefix encountered"
"""How `tokenizers` begins its error for output that is not valid UTF-8 at a place where it was before."""


class StopRules:
    """The stop strings of one request and how its tokens become text; shared by its sequences.

    A match counts only from output token `min_tokens` + 1 on.
    """

    __slots__ = ("added", "longest", "min_tokens", "prompt", "skip_special_tokens", "strings", "tokenizer")

    def __init__(
        self,
        tokenizer: Tokenizer,
        strings: Sequence[str],
        prompt: Sequence[int],
        *,
        min_tokens: int,
        skip_special_tokens: bool,
        spaces_between_special_tokens: bool,
    ) -> None:
        self.tokenizer = tokenizer
        self.strings = tuple(strings)
        self.longest = max(map(len, self.strings))
        self.prompt = list(prompt[-PROMPT_TAIL:])
        self.min_tokens = min_tokens
        self.skip_special_tokens = skip_special_tokens
        self.added: dict[int, str] = {}
        if not (skip_special_tokens or spaces_between_special_tokens):
            self.added = {number: token.content for number, token in tokenizer.get_added_tokens_decoder().items()}


class StopMatcher:
    """Decodes one sequence and finds the first stop string in it."""

    __slots__ = ("_after_added", "_count", "_rules", "_stream", "_tail")

    def __init__(self, rules: StopRules) -> None:
        from tokenizers.decoders import DecodeStream

        self._rules = rules
        self._stream = DecodeStream(ids=rules.prompt, skip_special_tokens=rules.skip_special_tokens)
        self._tail = ""
        self._count = 0
        self._after_added = False

    def feed(self, tokens: Sequence[int]) -> tuple[int, str] | None:
        """Take new output tokens; (how many of them to keep, the stop string) once one is complete.

        Of strings that complete with the same token, the one that ends first wins, then the one listed first.
        """
        rules = self._rules
        for index, token in enumerate(tokens):
            piece = self._decode(token)
            self._count += 1
            if not piece:
                continue
            text = self._tail + piece
            if self._count > rules.min_tokens:
                found = _first(text, len(self._tail), rules.strings)
                if found is not None:
                    return index + 1, found
            self._tail = text[1 - rules.longest :] if rules.longest > 1 else ""
        return None

    def _decode(self, token: int) -> str:
        piece = self._step(token)
        if self._rules.added:
            added = self._rules.added.get(token)
            if added is not None and self._after_added:
                piece = added
            self._after_added = added is not None
        return piece

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


def _first(text: str, old: int, strings: Sequence[str]) -> str | None:
    """The string that ends first in `text`, among those that end behind its first `old` characters."""
    best: str | None = None
    best_end = len(text) + 1
    for string in strings:
        start = text.find(string, max(0, old - len(string) + 1))
        if start >= 0 and start + len(string) < best_end:
            best, best_end = string, start + len(string)
    return best
