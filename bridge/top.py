"""`headless-bridge top`: a run's state and load, once a second, from its metrics listener or its state folder's socket.

Series    one scrape, parsed
View      the last scrapes; `lines` is what is shown, from the newest and how it differs from the older ones
Screen    puts lines on a terminal, or prints them where there is none
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import sys
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from bridge.flags import RELOAD, Flag, Values, describe, folders_of, positive, resolve, some_seconds
from bridge.supervisor.commands import find_folder, order
from bridge.supervisor.errors import EXIT_REQUESTED, SupervisorError, UsageError

FLAGS = (
    *RELOAD,
    Flag("interval-secs", 1.0, "between readings", some_seconds, "S"),
    Flag("count", None, "readings to show, the first without rates (default: until q or ^C)", positive, "N"),
)
HELP = """usage: headless-bridge top [http://HOST:PORT] [flags]

Shows what a run does: state, ranks, load, requests, tokens a second, latencies. With an address it reads the metrics
listener of `serve` or `attach` (--metrics-port), without one the socket of the `serve` that this user runs here.

flags:
"""
WINDOW_S = 10.0
"""Latencies are those of the sequences that ended in this time."""
SCRAPE_S = 3.0
PREFIX = "headless_bridge_"
LINE = re.compile(r"(?P<name>\w+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
LABEL = re.compile(r'(?P<name>\w+)="(?P<value>(?:[^"\\]|\\.)*)"')
ESCAPED = {"\\\\": "\\", "\\n": "\n", '\\"': '"'}

Read = Callable[[], str]


class Series:
    """One scrape: values by name and labels, and when its figures were taken, in seconds.

    A front end's figures are up to a second old, so two scrapes a second apart may show the same ones: what they say of
    their own time counts, and `at` only where they say nothing.
    """

    def __init__(self, text: str, at: float) -> None:
        self._values: dict[str, list[tuple[dict[str, str], float]]] = {}
        for line in text.splitlines():
            match = LINE.fullmatch(line)
            if match is not None:
                labels = {
                    one["name"]: re.sub(r"\\.", lambda found: ESCAPED[found[0]], one["value"])
                    for one in LABEL.finditer(match["labels"] or "")
                }
                self._values.setdefault(match["name"].removeprefix(PREFIX), []).append((labels, float(match["value"])))
        self.at = self.total("measured_time_seconds") or at

    def each(self, name: str) -> list[tuple[dict[str, str], float]]:
        """Every series of a name."""
        return self._values.get(name, [])

    def total(self, name: str) -> float:
        """The sum over all labels; 0 where there are none."""
        return sum(value for _, value in self.each(name))

    def by(self, name: str, label: str) -> dict[str, float]:
        """Sums by one label."""
        found: dict[str, float] = {}
        for labels, value in self.each(name):
            found[labels.get(label, "")] = found.get(labels.get(label, ""), 0.0) + value
        return found

    def only(self, name: str, label: str) -> str:
        """The value of a label where the series is 1; "" where there is none."""
        return next((labels.get(label, "") for labels, value in self.each(name) if value == 1), "")


def quantile(new: Series, old: Series, name: str, share: float) -> float | None:
    """The upper bound of the bucket in which this share of the observations since `old` lies; None without any."""
    grown = _grown(new.by(name + "_bucket", "le"), old.by(name + "_bucket", "le"))
    buckets = sorted((float(bound), count) for bound, count in grown.items())
    if not buckets or buckets[-1][1] <= 0:
        return None
    return next(bound for bound, count in buckets if count >= share * buckets[-1][1])


def _grown(new: dict[str, float], old: dict[str, float]) -> dict[str, float]:
    """What was added since; a run that started anew has added all it has."""
    if any(value < old.get(key, 0.0) for key, value in new.items()):
        return dict(new)
    return {key: value - old.get(key, 0.0) for key, value in new.items()}


class View:
    """What is shown of the readings so far."""

    def __init__(self) -> None:
        self._readings: deque[Series] = deque()

    def add(self, series: Series) -> None:
        if self._readings and self._readings[-1].at >= series.at:
            self._readings.pop()
        self._readings.append(series)
        while len(self._readings) > 2 and series.at - self._readings[1].at >= WINDOW_S:
            self._readings.popleft()

    def lines(self) -> list[str]:
        """The picture, one line a string, without colours."""
        if not self._readings:
            return []
        now, before, old = self._readings[-1], self._readings[max(len(self._readings) - 2, 0)], self._readings[0]
        return [
            self._head(now),
            "",
            *self._load(now, before),
            *self._latencies(now, old),
            "",
            *self._ranks(now),
            "",
            *self._trouble(now),
        ]

    def _head(self, now: Series) -> str:
        state = now.only("state", "state") or "unknown"
        ready = "" if now.total("ready") else ", not ready"
        what = " · ".join(part for part in (now.only("info", "engine"), now.only("info", "model")) if part)
        up = _duration(time.time() - now.total("start_time_seconds"))
        return f"headless-bridge {now.only('info', 'version')} · {what} · {state}{ready} · up {up}"

    def _load(self, now: Series, before: Series) -> Iterator[str]:
        def rate(name: str) -> float:
            elapsed = now.at - before.at
            return _grown({"": now.total(name)}, {"": before.total(name)})[""] / elapsed if elapsed > 0 else 0.0

        ends = now.by("requests_total", "finish")
        waiting = now.total("waiting_prompt_tokens")
        yield (
            f"requests   {now.total('requests_in_flight'):.0f} in flight, {rate('requests_total'):.1f}/s ended"
            + (f", {_count(waiting)} prompt tokens wait" if waiting else "")
        )
        yield "ended      " + (", ".join(f"{_count(count)} {end}" for end, count in sorted(ends.items())) or "none")
        prompt, cached = now.total("prompt_tokens_total"), now.total("cached_prompt_tokens_total")
        yield (
            f"tokens     {_count(rate('output_tokens_total'))}/s out, {_count(rate('prompt_tokens_total'))}/s in, "
            f"{cached / prompt if prompt else 0:.0%} cached; {_count(now.total('output_tokens_total'))} out in all"
        )
        steps = rate("steps_total")
        busy = rate("render_seconds_sum")
        yield (
            f"steps      {steps:.0f}/s, {1000 * busy / steps if steps else 0:.2f} ms each to render; "
            f"CPU {rate('front_end_cpu_seconds_total'):.0%} front end, "
            f"{rate('supervisor_cpu_seconds_total'):.1%} supervisor"
        )
        silence = now.total("engine_silence_seconds")
        if silence >= 1:
            yield f"silence    {silence:.0f} s without output from the engine, with requests in flight"

    def _latencies(self, now: Series, old: Series) -> Iterator[str]:
        for label, name in (
            ("first", "time_to_first_token_seconds"),
            ("between", "inter_token_seconds"),
            ("whole", "request_seconds"),
        ):
            values = [quantile(now, old, name, share) for share in (0.5, 0.95, 0.99)]
            shown = "  ".join(f"p{share} {_seconds(value)}" for share, value in zip((50, 95, 99), values, strict=True))
            yield f"{label:<10} {shown}"

    def _ranks(self, now: Series) -> Iterator[str]:
        yield f"{'rank':<10} {'running':>8} {'waiting':>8}  KV cache"
        waiting, usage = now.by("engine_waiting", "rank"), now.by("engine_kv_cache_usage", "rank")
        for rank, running in sorted(now.by("engine_running", "rank").items(), key=lambda item: int(item[0])):
            share = usage.get(rank, 0.0)
            bar = "#" * round(20 * min(share, 1.0))
            yield f"{rank:<10} {running:>8.0f} {waiting.get(rank, 0):>8.0f}  [{bar:<20}] {share:.0%}"

    def _trouble(self, now: Series) -> Iterator[str]:
        refused = {code: count for code, count in now.by("refusals_total", "code").items() if count}
        if refused:
            yield "refused    " + ", ".join(f"{_count(count)} {code}" for code, count in sorted(refused.items()))
        limits = {reason: count for reason, count in now.by("grpc_refusals_total", "reason").items() if count}
        if limits:
            yield "limits     " + ", ".join(f"{_count(count)} {reason}" for reason, count in sorted(limits.items()))
        restarts = {part: count for part, count in now.by("restarts_total", "part").items() if count}
        if restarts:
            yield "restarted  " + ", ".join(f"{part} {_count(count)}" for part, count in sorted(restarts.items()))
        link = {
            "strangers": now.total("link_strangers_total"),
            "undecodable": now.total("link_undecodable_total"),
        }
        if any(link.values()):
            yield "link       " + ", ".join(f"{_count(count)} {what}" for what, count in link.items())


class Screen:
    """The terminal while it is ours: the alternate screen, no cursor, keys one by one."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._terminal = out.isatty() and os.environ.get("TERM") != "dumb"

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        if not self._terminal:
            yield
            return
        self._write("\x1b[?1049h\x1b[?25l")
        try:
            with _keys_one_by_one():
                yield
        finally:
            self._write("\x1b[?25h\x1b[?1049l")

    def show(self, lines: Sequence[str]) -> None:
        if not self._terminal:
            self._write("\n".join([*lines, "", ""]))
            return
        columns, rows = shutil.get_terminal_size()
        shown = [f"{line[:columns]}\x1b[K" for line in lines[: rows - 1]]
        self._write("\x1b[H" + "\r\n".join(shown) + "\x1b[J")

    def wait(self, seconds: float) -> bool:
        """Sleep; whether q was pressed meanwhile."""
        if not self._terminal or not sys.stdin.isatty():
            time.sleep(seconds)
            return False
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if select.select([sys.stdin], [], [], left)[0] and os.read(sys.stdin.fileno(), 1) in (b"q", b"Q", b""):
                return True
        return False

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


@contextlib.contextmanager
def _keys_one_by_one() -> Iterator[None]:
    if not sys.stdin.isatty():
        yield
        return
    import termios
    import tty

    kept: list[Any] = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, kept)


def watch(read: Read, screen: Screen, interval_s: float, count: int | None) -> None:
    """Show readings until `count` of them, or q; raises `SupervisorError` when the first cannot be had."""
    view, shown = View(), 0
    with screen.taken():
        while True:
            began = time.monotonic()
            problem = ""
            try:
                view.add(Series(read(), time.time()))
            except SupervisorError as error:
                if not view.lines():
                    raise
                problem = error.reason
            screen.show([*([problem, ""] if problem else []), *view.lines()])
            shown += 1
            if count is not None and shown >= count:
                return
            if screen.wait(max(interval_s - (time.monotonic() - began), 0.0)):
                return


def scraped(url: str) -> Read:
    """Reads the text behind a metrics listener."""

    def read() -> str:
        try:
            with urllib.request.urlopen(url, timeout=SCRAPE_S) as answer:
                return str(answer.read().decode("utf-8", "replace"))
        except (OSError, urllib.error.URLError) as error:
            reason = getattr(error, "reason", error)
            raise SupervisorError(f"no figures from {url}: {reason}") from None

    return read


def ordered(folder: Path) -> Read:
    """Asks the supervisor of a state folder."""

    def read() -> str:
        try:
            return "\n".join(order(folder, "metrics", SCRAPE_S))
        except TimeoutError:
            raise SupervisorError(f"the supervisor of {folder} does not answer within {SCRAPE_S:g} s") from None

    return read


def address(given: str) -> str:
    """The URL of the metrics of `HOST:PORT`, with or without http:// and a path; raises `UsageError`."""
    scheme, _, rest = (given if "://" in given else f"http://{given}").partition("://")
    host, _, path = rest.partition("/")
    if scheme != "http" or not host:
        raise UsageError(f"{given!r} is no address; give http://HOST:PORT")
    return f"http://{host}/{path or 'metrics'}"


def source(values: Values) -> Read:
    """Where the figures come from; raises `UsageError`."""
    if not values.rest:
        return ordered(find_folder(*folders_of(values)))
    if len(values.rest) > 1 or values.rest[0].startswith("-"):
        raise UsageError(f"top takes one address, not {' '.join(values.rest)} (--help tells more)")
    return scraped(address(values.rest[0]))


def main(arguments: Sequence[str]) -> int:
    """Returns 0; raises `SupervisorError` when there is nothing to read."""
    if "--help" in arguments or "-h" in arguments:
        print(HELP + describe(FLAGS))
        return EXIT_REQUESTED
    values = resolve(FLAGS, arguments, os.environ, "")
    watch(source(values), Screen(sys.stdout), values["interval_secs"], values["count"])
    return EXIT_REQUESTED


def _count(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            return f"{value / (1e3 if unit == 'k' else size):.1f}{unit}"
    return f"{value:.0f}"


def _seconds(value: float | None) -> str:
    if value is None:
        return "none"
    if value == float("inf"):
        return "above"
    return f"≤ {value:g} s" if value >= 1 else f"≤ {value * 1000:g} ms"


def _duration(seconds: float) -> str:
    whole = max(int(seconds), 0)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {whole % 60} s"
