"""Families, their sums, and their text as Prometheus' own parser reads it."""

from __future__ import annotations

import math

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from bridge.supervisor.measures import (
    COUNTER,
    GAUGE,
    HISTOGRAM,
    Family,
    Histogram,
    Sample,
    exposition,
    folded,
    lasting,
    single,
)


def read(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every series of an exposition, as another implementation reads it."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@given(st.text(max_size=20), st.floats(allow_nan=False, allow_infinity=False), st.text(alphabet='ab\\\n"', max_size=20))
def test_any_label_help_and_value_reads_back(label: str, value: float, help: str) -> None:
    label = label.replace("\r", "")
    text = exposition([Family("x_total", COUNTER, help, [Sample([label], value)], ["name"])])
    assert read(text) == {("x_total", (("name", label),)): value}


@given(st.lists(st.floats(min_value=0, max_value=10), max_size=50))
def test_a_histogram_counts_what_is_at_most_its_bound(values: list[float]) -> None:
    bounds = (0.1, 1.0, 5.0)
    histogram = Histogram(bounds)
    for value in values:
        histogram.observe(value)
    found = read(exposition([Family("s", HISTOGRAM, "h", [histogram.sample()], [], list(bounds))]))
    for bound in bounds:
        assert found["s_bucket", (("le", str(bound)),)] == sum(value <= bound for value in values)
    assert found["s_bucket", (("le", "+Inf"),)] == found["s_count", ()] == len(values)
    assert math.isclose(found["s_sum", ()], sum(values), abs_tol=1e-9)


def test_a_bound_belongs_to_the_bucket_below_it() -> None:
    histogram = Histogram((1.0, 2.0))
    histogram.observe(1.0)
    assert histogram.counts == [1, 0, 0]


def test_two_front_ends_fold_into_one_picture() -> None:
    one = [
        Family("n_total", COUNTER, "n", [Sample(["a"], 1), Sample(["b"], 2)], ["x"]),
        Family("h", HISTOGRAM, "h", [Sample([], 0.5, [1, 0])], [], [1.0]),
        single("calls", GAUGE, "c", 3),
        single("load", GAUGE, "l", 3, fold="max"),
    ]
    two = [
        Family("n_total", COUNTER, "n", [Sample(["b"], 5)], ["x"]),
        Family("h", HISTOGRAM, "h", [Sample([], 2.5, [0, 1])], [], [1.0]),
        single("calls", GAUGE, "c", 4),
        single("load", GAUGE, "l", 2, fold="max"),
        single("newer", GAUGE, "only this one knows it", 1),
    ]
    found = read(exposition(folded([one, two])))
    assert found["n_total", (("x", "a"),)] == 1 and found["n_total", (("x", "b"),)] == 7
    assert found["h_sum", ()] == 3.0 and found["h_count", ()] == 2
    assert (found["calls", ()], found["load", ()], found["newer", ()]) == (7, 3, 1)
    assert one[0].samples[1].value == 2, "what was folded is not changed"


def test_families_that_do_not_fit_are_left_out() -> None:
    one = [Family("h", HISTOGRAM, "h", [Sample([], 1, [1, 0])], [], [1.0])]
    other = [Family("h", HISTOGRAM, "h", [Sample([], 1, [1, 0, 0])], [], [1.0, 2.0])]
    assert folded([one, other]) == one


def test_an_ended_front_end_leaves_its_counts_and_not_its_gauges() -> None:
    assert [family.name for family in lasting([single("a", GAUGE, "", 1), single("b", COUNTER, "", 1)])] == ["b"]


def test_families_travel_as_msgpack() -> None:
    families = [Family("h", HISTOGRAM, "h", [Sample(["a"], 0.5, [1, 0])], ["x"], [1.0], "max")]
    encoded = msgspec.msgpack.encode(families)
    assert msgspec.msgpack.decode(encoded, type=list[Family]) == families
