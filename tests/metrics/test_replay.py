"""What measuring costs: no work a token, so next to nothing."""

from __future__ import annotations

from bridge.metrics import Meters
from tests.metrics.replay import STREAMS, costs, replay

ALLOWED = 1.02


def test_a_replay_of_steps_takes_as_many_instructions_with_metrics_as_without() -> None:
    measured, bare = costs(150)
    assert measured <= bare * ALLOWED, f"{measured / bare:.4f} of the instructions"


def test_the_replay_measures_everything() -> None:
    meters = Meters()
    replay(meters, 10)
    assert meters.ends == {("/package.Service/Generate", "length"): STREAMS}
    assert (meters.prompt_tokens, meters.steps, sum(meters.render.counts)) == (STREAMS * 128, 10, 10)
    latencies = meters.latencies["/package.Service/Generate"]
    for histogram in (latencies.first_token, latencies.inter_token, latencies.end_to_end):
        assert sum(histogram.counts) == STREAMS
