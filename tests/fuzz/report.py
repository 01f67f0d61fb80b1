"""What a run saw: a table of kinds and outcomes, and what it takes to see each surprise again."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tests.fuzz.cases import CLASSES, Case

SHOWN_BYTES = 400
"""Bytes of a request that the report repeats; `--only` makes the others again."""


@dataclass
class Surprise:
    """Something that must not be."""

    what: str
    case: Case | None = None

    def lines(self) -> list[str]:
        if self.case is None:
            return [f"! {self.what}"]
        case = self.case
        body = case.body.hex()
        shown = body if len(case.body) <= SHOWN_BYTES else f"{body[: 2 * SHOWN_BYTES]}… ({len(case.body)} bytes)"
        head = f"! {case.kind} {case.number} ({case.name}): {self.what}"
        extra = [f"    headers {dict(case.headers)} path {case.path!r}"] if case.headers or case.path else []
        return [head, *extra, f"    {case.method} {shown}"]


@dataclass
class Report:
    """Counts by kind and outcome, and the surprises. `notes` are figures of the run, one line each."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    surprises: list[Surprise] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, case: Case, outcome: str, surprise: str | None) -> None:
        self.counts[case.kind, outcome] += 1
        if surprise is not None:
            self.surprises.append(Surprise(surprise, case))

    def of(self, kind: str, *outcomes: str) -> int:
        """Cases of a kind, or those of them with one of the outcomes."""
        return sum(
            count
            for (had, outcome), count in self.counts.items()
            if had == kind and (not outcomes or outcome in outcomes)
        )

    def __str__(self) -> str:
        kinds = [kind for kind in CLASSES if self.of(kind)]
        outcomes = sorted(
            {outcome for _, outcome in self.counts}, key=lambda one: -sum(self.of(kind, one) for kind in kinds)
        )
        width = max(map(len, outcomes), default=0)
        lines = [f"{'':{width}}" + "".join(f"{kind:>10}" for kind in kinds)]
        lines += [
            f"{outcome:{width}}" + "".join(f"{self.of(kind, outcome):>10}" for kind in kinds) for outcome in outcomes
        ]
        lines.append(f"{'total':{width}}" + "".join(f"{self.of(kind):>10}" for kind in kinds))
        lines += self.notes
        for surprise in self.surprises:
            lines += surprise.lines()
        return "\n".join(lines)
