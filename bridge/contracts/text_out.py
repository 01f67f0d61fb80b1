"""The text of a sequence as a contract may show it: delta by delta, without what could become a stop string."""

from __future__ import annotations

from bridge.detokenizer import Detokenizer, TextRules
from bridge.requests import Sequence
from bridge.stops import StopMatcher, StopRules


class TextOut:
    """The text of one sequence as it may be shown: what could become a stop string is held back."""

    __slots__ = ("_decoder", "_held", "_hold", "_matcher", "_shown")

    def __init__(self, decoder: Detokenizer | None, matcher: StopMatcher | None, hold: int) -> None:
        """One of `decoder` and `matcher` (which decodes already) is given; `hold` characters may be a stop string's."""
        self._decoder = decoder
        self._matcher = matcher
        self._hold = hold
        self._held = ""
        self._shown = 0

    def next(self, tokens: list[int]) -> str:
        """What these tokens let be shown."""
        hold = self._hold
        text = self._new(tokens)
        if hold:
            text = self._held + text
            text, self._held = text[:-hold], text[-hold:]
        self._shown += len(text)
        return text

    def last(self, tokens: list[int], stop_string: str | None, *, keep_stop: bool) -> str:
        """What is left to show of a sequence that ends with these tokens, `stop_string` included or not."""
        text = self._held + self._new(tokens)
        source = self._decoder or self._matcher
        if stop_string is None or self._matcher is None or self._matcher.cut is None:
            return text if source is None else text + source.rest()
        end = self._matcher.cut + (len(stop_string) if keep_stop else 0)
        return text[: max(0, end - self._shown)]

    def _new(self, tokens: list[int]) -> str:
        if self._decoder is not None:
            return self._decoder.text(tokens)
        assert self._matcher is not None and self._matcher.pieces is not None
        text = "".join(self._matcher.pieces)
        self._matcher.pieces.clear()
        return text


def text_out(sequence: Sequence, rules: TextRules, *, keep_stop: bool) -> TextOut:
    """The text of `sequence`; its stop matcher, where it has one, decodes already."""
    matcher = sequence.rich.stops if sequence.rich is not None else None
    if matcher is None:
        return TextOut(Detokenizer(rules), None, 0)
    assert isinstance(rules, StopRules)
    return TextOut(None, matcher, 0 if keep_stop else rules.longest - 1)
