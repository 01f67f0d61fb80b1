"""What a front end measures. Per request, per step and per reading only: no token pays for it.

The request table and the engine tell `Meters` when a request is sent, when a sequence has its first output and when it
ends, and when a drain of steps was rendered; everything else is read from counters that exist anyway, when `families`
makes the picture that the supervisor (or `attach`) serves.
"""

from __future__ import annotations

import resource
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from bridge.supervisor.measures import COUNTER, GAUGE, HISTOGRAM, Family, Histogram, Sample, folded, single

if TYPE_CHECKING:
    from bridge.engine import Engine
    from bridge.grpc.stats import ServerStats
    from bridge.requests import Request
    from bridge.requests import Sequence as Generation

PREFIX = "headless_bridge_"

FIRST_TOKEN_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)
INTER_TOKEN_S = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 1.0)
END_TO_END_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0, 2500.0)
RENDER_S = (2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1)


class Latencies:
    """The histograms of one gRPC method, in seconds."""

    __slots__ = ("end_to_end", "first_token", "inter_token")

    def __init__(self) -> None:
        self.first_token = Histogram(FIRST_TOKEN_S)
        self.inter_token = Histogram(INTER_TOKEN_S)
        self.end_to_end = Histogram(END_TO_END_S)


class Meters:
    """Counts of one front end. A sequence is what counts: a request for n samples counts n times."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time) -> None:
        """`clock` never goes back; `wall` is the clock of `Request.arrived`."""
        self.clock = clock
        self._wall = wall
        self.ends: Counter[tuple[str, str]] = Counter()
        """Sequences that ended, by the path of their method and how they ended."""
        self.latencies: dict[str, Latencies] = {}
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        """Of the sequences that ended."""
        self.strangers = 0
        self.steps = 0
        self.render = Histogram(RENDER_S)
        self.received_at = clock()
        """When the engine last sent output."""

    def admitted(self, request: Request) -> None:
        """A request is about to be sent to the engine."""
        request.began = self.clock() - max(self._wall() - request.arrived, 0.0)
        self.prompt_tokens += request.prompt_tokens

    def first(self, sequence: Generation) -> None:
        """The first output of a sequence is here."""
        sequence.first_at = now = self.clock()
        self.cached_tokens += sequence.cached_tokens
        self._of(sequence).first_token.observe(now - sequence.request.began)

    def ended(self, sequence: Generation, end: str) -> None:
        """A sequence ended, by `end`. Its tokens' mean distance is known now, and nothing was kept to know it."""
        now = self.clock()
        self.ends[sequence.out.method, end] += 1
        latencies = self._of(sequence)
        latencies.end_to_end.observe(now - sequence.request.began)
        tokens = len(sequence.output_ids)
        self.output_tokens += tokens
        if tokens > 1:
            latencies.inter_token.observe((now - sequence.first_at) / (tokens - 1))

    def rendered(self, began: float, steps: int) -> None:
        """`steps` waiting steps were rendered and written since `began`."""
        now = self.clock()
        self.received_at = now
        self.steps += steps
        self.render.observe(now - began)

    def _of(self, sequence: Generation) -> Latencies:
        path = sequence.out.method
        latencies = self.latencies.get(path)
        if latencies is None:
            latencies = self.latencies[path] = Latencies()
        return latencies


def families(meters: Meters, engine: Engine, servers: Iterable[ServerStats]) -> list[Family]:
    """Everything this front end knows, its gRPC servers as one, in one picture; O(live requests)."""
    calls = folded(_calls(stats) for stats in servers)
    return [*_requests(meters, engine), *_latencies(meters), *_engine(meters, engine), *calls, *_process()]


def _requests(meters: Meters, engine: Engine) -> Iterable[Family]:
    table = engine.requests
    yield Family(
        PREFIX + "requests_total",
        COUNTER,
        "Sequences that ended, by how: stop, length, abort, error, or cancelled by the client.",
        [Sample([*_split(path), end], count) for (path, end), count in meters.ends.items()],
        ["service", "method", "finish"],
    )
    live = 0 if table is None else len(table)
    yield single(PREFIX + "requests_in_flight", GAUGE, "Requests sent to the engine that have not ended.", live)
    waiting = 0 if table is None else sum(table.waiting_prompt_tokens.values())
    yield single(
        PREFIX + "waiting_prompt_tokens", GAUGE, "Prompt tokens of sequences that have no output yet.", waiting
    )
    yield single(PREFIX + "prompt_tokens_total", COUNTER, "Prompt tokens sent to the engine.", meters.prompt_tokens)
    yield single(
        PREFIX + "cached_prompt_tokens_total",
        COUNTER,
        "Prompt tokens that the engine found in its prefix cache.",
        meters.cached_tokens,
    )
    output = meters.output_tokens + (0 if table is None else table.tokens_live)
    yield single(PREFIX + "output_tokens_total", COUNTER, "Output tokens received from the engine.", output)


def _latencies(meters: Meters) -> Iterable[Family]:
    shown: Sequence[tuple[str, str, Callable[[Latencies], Histogram], Sequence[float]]] = (
        (
            "time_to_first_token_seconds",
            "From a request's arrival to the first output of a sequence.",
            lambda of: of.first_token,
            FIRST_TOKEN_S,
        ),
        (
            "inter_token_seconds",
            "Mean time between the output tokens of a sequence, one observation a sequence.",
            lambda of: of.inter_token,
            INTER_TOKEN_S,
        ),
        (
            "request_seconds",
            "From a request's arrival to the end of a sequence.",
            lambda of: of.end_to_end,
            END_TO_END_S,
        ),
    )
    for name, help, choose, bounds in shown:
        samples = [choose(of).sample(_split(path)) for path, of in meters.latencies.items()]
        yield Family(PREFIX + name, HISTOGRAM, help, samples, ["service", "method"], list(bounds))


def _engine(meters: Meters, engine: Engine) -> Iterable[Family]:
    yield Family(
        PREFIX + "render_seconds",
        HISTOGRAM,
        "Time to render and write what one drain of the engine's socket held, one step as a rule.",
        [meters.render.sample()],
        [],
        list(RENDER_S),
    )
    yield single(PREFIX + "steps_total", COUNTER, "Engine messages that held output.", meters.steps)
    table = engine.requests
    oldest = None if table is None else table.oldest()
    silence = 0.0 if oldest is None else max(meters.clock() - max(meters.received_at, oldest), 0.0)
    yield single(
        PREFIX + "engine_silence_seconds",
        GAUGE,
        "Time since the engine's last output while requests are in flight; 0 without any.",
        silence,
        fold="max",
    )
    loads: Sequence[tuple[str, str, list[float]]] = (
        ("engine_running", "Sequences the engine's rank runs.", [rank.load.running for rank in engine.ranks]),
        ("engine_waiting", "Sequences that wait in the engine's rank.", [rank.load.waiting for rank in engine.ranks]),
        (
            "engine_kv_cache_usage",
            "Share of the rank's KV cache that is in use, 0 to 1.",
            [rank.load.kv_cache_usage for rank in engine.ranks],
        ),
    )
    for name, help, values in loads:
        samples = [Sample([str(rank.index)], value) for rank, value in zip(engine.ranks, values, strict=True)]
        yield Family(PREFIX + name, GAUGE, help, samples, ["rank"], fold="max")
    yield single(
        PREFIX + "link_strangers_total",
        COUNTER,
        "Outputs for sequences that this front end never had.",
        meters.strangers,
    )
    yield single(
        PREFIX + "link_undecodable_total",
        COUNTER,
        "Engine messages that did not fit the wire layout.",
        engine.undecodable_total,
    )


def _calls(stats: ServerStats) -> Iterable[Family]:
    for name, help, counter in (
        ("calls_total", "gRPC calls that ended, by status.", stats.codes),
        ("refusals_total", "Calls refused before anything was sent to the engine, by status.", stats.refused),
    ):
        samples = [Sample([*_split(path), code], count) for (path, code), count in counter.items()]
        yield Family(PREFIX + name, COUNTER, help, samples, ["service", "method", "code"])
    yield Family(
        PREFIX + "grpc_refusals_total",
        COUNTER,
        "Calls and connections that a limit of the server or a malformed request ended.",
        [Sample([reason], count) for reason, count in stats.refusals.items()],
        ["reason"],
    )
    yield Family(
        PREFIX + "grpc_cancelled_total",
        COUNTER,
        "Calls that ended before they were answered.",
        [Sample([reason.lower()], count) for reason, count in stats.cancelled.items()],
        ["reason"],
    )
    yield single(PREFIX + "grpc_connections_total", COUNTER, "Connections accepted.", stats.connections_total)
    yield single(PREFIX + "grpc_connections", GAUGE, "Connections open.", stats.connections)
    yield single(PREFIX + "grpc_calls", GAUGE, "Calls open.", stats.calls_open)
    yield single(
        PREFIX + "grpc_buffered_bytes", GAUGE, "Bytes kept of requests that are not complete.", stats.buffered_bytes
    )


def _process() -> Iterable[Family]:
    yield single(
        PREFIX + "measured_time_seconds",
        GAUGE,
        "When the front end's figures were taken, since the epoch.",
        time.time(),
        fold="max",
    )
    used = resource.getrusage(resource.RUSAGE_SELF)
    yield single(
        PREFIX + "front_end_cpu_seconds_total", COUNTER, "CPU time of the front end.", used.ru_utime + used.ru_stime
    )


def _split(path: str) -> list[str]:
    """`/package.Service/Method` as service and method."""
    service, _, method = path.lstrip("/").partition("/")
    return [service, method]
