"""Stop strings: text made token by token with the model's tokenizer, matched as it grows.

Engines match token ids only (vLLM, SGLang with skip-tokenizer-init), so the front end decodes what a sequence emits and
ends it at the token that completes a stop string. What the match means for text (trimmed or kept) is for whoever renders
text; token ids are kept up to and including the completing token, as vLLM's own output has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bridge.detokenizer import Detokenizer, TextRules

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class StopRules(TextRules):
    """The stop strings of one request and how its tokens become text; shared by its sequences.

    A match counts only from output token `min_tokens` + 1 on.
    """

    __slots__ = ("ends", "longest", "min_tokens", "strings")

    def __init__(
        self,
        tokenizer: Tokenizer,
        strings: Sequence[str],
        prompt: Sequence[int],
        *,
        min_tokens: int,
        skip_special_tokens: bool,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        super().__init__(
            tokenizer,
            prompt,
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=spaces_between_special_tokens,
        )
        self.strings = tuple(strings)
        self.longest = max(map(len, self.strings))
        self.ends = frozenset(string[-1] for string in self.strings)
        """The characters one of which comes with the token that completes a string."""
        self.min_tokens = min_tokens


class StopMatcher:
    """Decodes one sequence and finds the first stop string in it.

    With `keep_text`, `pieces` collects the text for whoever renders it, who empties the list, and `cut` is the number
    of characters before the stop string that was found.
    """

    __slots__ = ("_count", "_decoder", "_length", "_rules", "_tail", "cut", "pieces")

    def __init__(self, rules: StopRules, *, keep_text: bool = False) -> None:
        self._rules = rules
        self._decoder = Detokenizer(rules)
        self._tail = ""
        self._count = 0
        self._length = 0
        self.pieces: list[str] | None = [] if keep_text else None
        self.cut: int | None = None

    def feed(self, tokens: Sequence[int]) -> tuple[int, str] | None:
        """Take new output tokens; (how many of them to keep, the stop string) once one is complete.

        Of strings that complete with the same token, the one that ends first wins, then the one listed first.
        """
        rules = self._rules
        for index, token in enumerate(tokens):
            piece = self._decoder.piece(token)
            self._count += 1
            if not piece:
                continue
            if self.pieces is not None:
                self.pieces.append(piece)
            text = self._tail + piece
            if self._count > rules.min_tokens and not rules.ends.isdisjoint(piece):
                found = _first(text, len(self._tail), rules.strings)
                if found is not None:
                    start, string = found
                    self.cut = self._length - len(self._tail) + start
                    return index + 1, string
            self._length += len(piece)
            self._tail = text[1 - rules.longest :] if rules.longest > 1 else ""
        return None

    def rest(self) -> str:
        """What stands for a character that the last tokens began and did not complete."""
        return self._decoder.rest()


def _first(text: str, old: int, strings: Sequence[str]) -> tuple[int, str] | None:
    """(start, string) of the one that ends first in `text`, among those that end behind its first `old` characters."""
    best: tuple[int, str] | None = None
    best_end = len(text) + 1
    for string in strings:
        start = text.find(string, max(0, old - len(string) + 1))
        if start >= 0 and start + len(string) < best_end:
            best, best_end = (start, string), start + len(string)
    return best
