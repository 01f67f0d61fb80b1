"""Every pair of speakers, case by case."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import combinations

from tokenizers import Tokenizer

from tests.parity.cases import Case
from tests.parity.speakers import Speaker

Pair = tuple[str, str]


def compare(speakers: Mapping[str, Speaker], cases: Iterable[Case], tokenizer: Tokenizer) -> dict[Pair, list[str]]:
    """What differs between each two speakers, one line a case; each is asked each case once, one after the other."""
    found: dict[Pair, list[str]] = {pair: [] for pair in combinations(speakers, 2)}
    for case in cases:
        ids = tokenizer.encode(case.prompt).ids
        answers = {name: speaker.ask(case, ids) for name, speaker in speakers.items()}
        for one, other in found:
            differences = answers[one].differs(answers[other])
            if differences:
                found[one, other].append(f"{case.name}: {'; '.join(differences)}")
    return found
