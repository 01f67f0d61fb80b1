"""What is measured, as self-describing families of samples, and their Prometheus text.

A front end makes its families (`bridge.metrics`) and sends them to the supervisor once a second; the supervisor adds its
own, sums those of all its front ends (two during an upgrade), and serves the sum. Families carry their own names and
help, so a supervisor can show what a newer front end counts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

import msgspec

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Prometheus text exposition format 0.0.4."""

COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"


class Sample(msgspec.Struct, array_like=True, gc=False):
    """One time series. `value` is a histogram's sum; `counts` its observations per bucket, the one above all bounds
    last."""

    labels: list[str] = []
    value: float = 0.0
    counts: list[int] = []


class Family(msgspec.Struct, array_like=True, gc=False):
    """The series of one name. `labels` names the values of `Sample.labels`; `bounds` are a histogram's upper bounds.

    `fold` says what becomes of the same series of two front ends: `sum`, or `max` for what both see of one engine.
    """

    name: str
    kind: str
    help: str
    samples: list[Sample]
    labels: list[str] = []
    bounds: list[float] = []
    fold: str = "sum"


class Histogram:
    """Counts observations into buckets; a bound belongs to the bucket below it, as in Prometheus."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds` ascend; one more bucket takes what is above all of them."""
        self.bounds = list(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def sample(self, labels: Sequence[str] = ()) -> Sample:
        return Sample(list(labels), self.total, list(self.counts))


def single(name: str, kind: str, help: str, value: float, *, fold: str = "sum") -> Family:
    """A family of one series without labels."""
    return Family(name, kind, help, [Sample([], value)], fold=fold)


def folded(parts: Iterable[Iterable[Family]]) -> list[Family]:
    """One family a name: samples with the same labels become one.

    A family whose kind, labels or bounds differ from the first of its name is left out: its sums would mean nothing.
    """
    families: dict[str, Family] = {}
    samples: dict[str, dict[tuple[str, ...], Sample]] = {}
    for part in parts:
        for family in part:
            known = families.get(family.name)
            if known is None:
                families[family.name] = Family(
                    family.name, family.kind, family.help, [], list(family.labels), list(family.bounds), family.fold
                )
                samples[family.name] = {}
            elif (known.kind, known.labels, known.bounds) != (family.kind, family.labels, family.bounds):
                continue
            series = samples[family.name]
            for sample in family.samples:
                key = tuple(sample.labels)
                total = series.get(key)
                if total is None:
                    series[key] = Sample(list(sample.labels), sample.value, list(sample.counts))
                elif family.fold == "max":
                    total.value = max(total.value, sample.value)
                else:
                    total.value += sample.value
                    total.counts = [mine + more for mine, more in zip(total.counts, sample.counts, strict=True)]
    for name, family in families.items():
        family.samples = list(samples[name].values())
    return list(families.values())


def lasting(families: Iterable[Family]) -> list[Family]:
    """What stays true of a process that has ended: counters and histograms, not gauges."""
    return [family for family in families if family.kind != GAUGE]


def exposition(families: Iterable[Family]) -> str:
    """Prometheus text, format 0.0.4."""
    lines: list[str] = []
    for family in families:
        lines.append(f"# HELP {family.name} {_escaped(family.help)}")
        lines.append(f"# TYPE {family.name} {family.kind}")
        for sample in family.samples:
            pairs = [f'{name}="{_quoted(value)}"' for name, value in zip(family.labels, sample.labels, strict=True)]
            if family.kind != HISTOGRAM:
                lines.append(f"{family.name}{_braced(pairs)} {_number(sample.value)}")
                continue
            reached = 0
            for bound, count in zip([*family.bounds, float("inf")], sample.counts, strict=True):
                reached += count
                up_to = 'le="+Inf"' if bound == float("inf") else f'le="{float(bound)!r}"'
                lines.append(f"{family.name}_bucket{_braced([*pairs, up_to])} {reached}")
            lines.append(f"{family.name}_sum{_braced(pairs)} {_number(sample.value)}")
            lines.append(f"{family.name}_count{_braced(pairs)} {reached}")
    return "\n".join([*lines, ""])


def _braced(pairs: Sequence[str]) -> str:
    return "{" + ",".join(pairs) + "}" if pairs else ""


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) and abs(value) < 1 << 53 else repr(float(value))


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _quoted(text: str) -> str:
    return _escaped(text).replace('"', '\\"')
