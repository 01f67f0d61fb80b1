"""How an engine's limits on request values are written down: one `Rule` a field, data that the guard reads."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

Kind = Literal["float", "int", "bool", "ids", "words", "word", "bias"]
"""`ids`: a list of integers; `words`: a list of strings, none empty; `bias`: a map of integer to finite number."""

Harm = Literal["wedge", "death", "error"]
"""What a value outside the limits does when it reaches the engine: its input thread dies in silence, the engine dies
for everybody, the one request fails."""

Bound = float | str | None
"""A number, or the name of the `Facts` field that holds it; `resolved` fills those in."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The values of one request field that an engine takes.

    `low` and `high` bound a number, each id of a list, and each key of a map; `min_items` and `max_items` a list's or a
    map's length. `also` are values outside the range that have a meaning of their own. `choices` are the only words.
    """

    kind: Kind
    low: Bound = None
    high: Bound = None
    low_exclusive: bool = False
    high_exclusive: bool = False
    also: tuple[int, ...] = ()
    min_items: Bound = None
    max_items: Bound = None
    choices: tuple[str, ...] = ()
    harm: Harm
    note: str = ""

    def resolved(self, facts: object) -> Rule:
        """This rule with the bounds that name a fact read from `facts`."""
        names = ("low", "high", "min_items", "max_items")
        bounds = {name: getattr(self, name) for name in names}
        return dataclasses.replace(
            self, **{name: getattr(facts, bound) for name, bound in bounds.items() if isinstance(bound, str)}
        )

    def allows(self, value: Any) -> bool:
        """Whether the engine takes `value`. A bound that still names a fact is not checked."""
        return _CHECKS[self.kind](self, value)

    @property
    def limit(self) -> str:
        """What a value must be, for people: reads after "must be"."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        text = _NOUNS[self.kind]
        ends = [
            self._end(self.low, "above" if self.low_exclusive else "at least"),
            self._end(self.high, "below" if self.high_exclusive else "at most"),
        ]
        span = " and ".join(end for end in ends if end)
        text = f"{text} {span}" if span else text
        if self.also:
            text += " or " + " or ".join(map(str, self.also))
        counts = [self._end(self.min_items, "at least"), self._end(self.max_items, "at most")]
        count = " and ".join(end for end in counts if end)
        return f"{text} ({count} of them)" if count else text

    @staticmethod
    def _end(bound: Bound, word: str) -> str:
        return "" if bound is None else f"{word} {bound:g}" if isinstance(bound, float) else f"{word} {bound}"

    def _in_range(self, value: float) -> bool:
        if value in self.also:
            return True
        low, high = self.low, self.high
        if isinstance(low, (int, float)) and (value <= low if self.low_exclusive else value < low):
            return False
        return not (isinstance(high, (int, float)) and (value >= high if self.high_exclusive else value > high))

    def _right_length(self, length: int) -> bool:
        least, most = self.min_items, self.max_items
        if isinstance(least, (int, float)) and length < least:
            return False
        return not (isinstance(most, (int, float)) and length > most)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_int(value) or (isinstance(value, float) and math.isfinite(value))


def _ids(rule: Rule, value: Any) -> bool:
    return (
        isinstance(value, (list, tuple))
        and rule._right_length(len(value))
        and all(_is_int(item) and rule._in_range(item) for item in value)
    )


def _words(rule: Rule, value: Any) -> bool:
    return (
        isinstance(value, (list, tuple))
        and rule._right_length(len(value))
        and all(isinstance(item, str) and item for item in value)
    )


def _bias(rule: Rule, value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and rule._right_length(len(value))
        and all(_is_int(key) and rule._in_range(key) and _is_number(bias) for key, bias in value.items())
    )


_CHECKS: Mapping[Kind, Callable[[Rule, Any], bool]] = {
    "float": lambda rule, value: _is_number(value) and rule._in_range(value),
    "int": lambda rule, value: _is_int(value) and rule._in_range(value),
    "bool": lambda rule, value: isinstance(value, bool),
    "ids": _ids,
    "words": _words,
    "word": lambda rule, value: isinstance(value, str) and (value in rule.choices if rule.choices else bool(value)),
    "bias": _bias,
}

_NOUNS: Mapping[Kind, str] = {
    "float": "a number",
    "int": "an integer",
    "bool": "true or false",
    "ids": "a list of integers",
    "words": "a list of strings that are not empty",
    "word": "a string that is not empty",
    "bias": "a map from integers to finite numbers, the integers",
}
