"""The figures that must come out, as ratios to a peer in the same run, or absolute ones of this machine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """A figure of bench.json and its bound: at most `most`, or at least `least`."""

    key: str
    most: float | None = None
    least: float | None = None

    def met(self, value: float) -> bool:
        return (self.most is None or value <= self.most) and (self.least is None or value >= self.least)

    @property
    def bound(self) -> str:
        return f"≤ {self.most:g}" if self.most is not None else f"≥ {self.least:g}"


RATIOS = (
    Target("cpu_token_256_vs_rust", most=0.45),
    Target("cpu_token_256_vs_aio", most=0.10),
    Target("cpu_token_1024_vs_rust", most=0.35),
    Target("saturation_vs_rust", least=1.2),
    Target("one_stream_vs_rust", most=1.2),
    Target("request_4096_16_vs_rust", most=1.0),
    Target("cpu_token_logprobs_vs_rust", most=1.0),
    Target("cpu_token_stop_vs_rust", most=1.0),
    Target("p99_256_vs_rust", most=1.0),
    Target("cpu_token_inference_vs_vllm_rs", most=0.35),
)
ABSOLUTE = (
    Target("admission_us_128_1024_open", most=150),
    Target("rss_mb_10k_streams", most=200),
    Target("listen_ms", most=600),
)
MOST_P99_GROWTH = 3.0
"""p99 of 256 streams while 100,000-token prompts arrive, over p99 without them, in the same run."""
