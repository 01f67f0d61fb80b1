"""A server with 64 good streams to be attacked, and its twin on the same machine that is left alone.

The good streams' inter-token delay is held against the larger of two figures: what it was before any attack (a step of
20 ms at least), and what the twin's streams see during it. The second takes out what is not the server's doing: the
attackers' own use of the two cores above all, and whatever else runs there. A delay that was too long is measured
again, three times as long, so that a stall of the machine is less than the hundredth part of it, and what an attack
does is not; one such measurement of two must hold, whole. A wrong token, a failed call and too much memory count at
once.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

from tests.abuse.crowd import CrowdProcess, Window
from tests.abuse.hostile import Attack, under
from tests.abuse.target import PATIENCE_S, Target

FLAGS = ("--step-ms", 20, "--per-request-ms", 0, "--prefill-tps", 0, "--max-num-seqs", 4096)
SLOWER = 5.0
"""The most by which an attack may lengthen the good streams' p99."""
GROWTH_MIB = 160.0
"""The most memory above the idle front end's that four attackers may cost: 4,096 open calls each, at up to 8 KiB a
call (one with a task), and 32 MiB for all else."""
WINDOW_S = 2.1
"""More than 100 steps: the p99 leaves one step out."""
LENGTHS = (1, 3, 3)
"""Of the measurements, in windows: as long as none holds there is another."""


class Arena:
    """Two servers, each with its crowd. Use as a context manager."""

    def __init__(self, folder: Path, *flags: object) -> None:
        self._folder = folder
        self._flags = flags
        self._running = ExitStack()

    def __enter__(self) -> Arena:
        with ExitStack() as stack:
            targets = []
            for name, flags in (("target", self._flags), ("twin", ())):
                place = self._folder / name
                place.mkdir()
                targets.append(stack.enter_context(Target(place, *FLAGS, *flags)))
            crowds = []
            for target in targets:
                crowds.append(CrowdProcess(target.wait_until_serving().port))
                stack.callback(crowds[-1].stop)
            self.target, self.crowd, self._control = targets[0], crowds[0], crowds[1]
            self._idle_mib = self.target.memory_mib()
            time.sleep(0.5)
            self._quiet_ms = self._windows(2.0)[0].gap_p99_ms
            self._running = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._running.close()

    def _windows(self, seconds: float) -> tuple[Window, Window]:
        """What both crowds see in the next `seconds`."""
        self.crowd.window()
        self._control.window()
        time.sleep(seconds)
        return self.crowd.window(), self._control.window()

    def withstand(self, *attacks: Attack, window_s: float = WINDOW_S, growth_mib: float = GROWTH_MIB) -> Window:
        """Nobody but the attackers notices the attacks, which happen at the same time; what the good streams saw."""
        measured = []
        for seconds in (length * window_s for length in LENGTHS):
            with self.target.watched() as peak, ExitStack() as stack:
                tolls = [stack.enter_context(under(attack, self.target.port)) for attack in attacks]
                time.sleep(0.2)
                window, control = self._windows(seconds)
            assert all(toll.connections for toll in tolls)
            self._must_be_unharmed(peak.mib, growth_mib)
            allowed = SLOWER * max(self._quiet_ms, control.gap_p99_ms)
            if window.gap_p99_ms <= allowed:
                return window
            measured.append(f"p99 of {seconds:g} s: {window.gap_p99_ms:.1f} ms, at most {allowed:.1f} allowed")
        raise AssertionError("; ".join(measured))

    def _must_be_unharmed(self, peak_mib: float, growth_mib: float) -> None:
        self.crowd.must_be_right()
        growth = peak_mib - self._idle_mib
        assert growth <= growth_mib, f"the front end grew by {growth:.0f} MiB from {self._idle_mib:.0f}"
        self.target.must_answer()

    def must_keep_only_the_good(self, within_s: float = PATIENCE_S) -> None:
        """The front end and the engine hold nothing but the good streams' requests.

        At an attack's end connections may wait to be accepted whose client has sent its requests and left.
        """
        until = time.monotonic() + within_s
        while max((left := self.target.requests()).values()) > self.crowd.streams:
            assert time.monotonic() < until, left
            time.sleep(0.02)
