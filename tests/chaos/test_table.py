"""Every part killed or stopped under 64 streams, and what it costs: the rows of docs/reliability.md."""

from __future__ import annotations

import asyncio
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.chaos.flock import Flock
from tests.chaos.served import QUICK, Served
from tests.chaos.table import Row, Table
from tests.running import Worker, gone_within, unused_port

SILENCE_S = 3.0
NEVER = float("inf")
VLLM_FLAGS = (
    "--dtype=float32",
    "--max-model-len=128",
    "--max-num-seqs=64",
    "--enforce-eager",
    "--kv-cache-memory-bytes=33554432",
    "--no-enable-prefix-caching",
)
LIFE = ("--restart", "always", "--silence-secs", SILENCE_S, "--prefill-tokens-per-sec", 0)
AGAIN_LIMIT_S = 150.0
"""A real engine's start, on two cores that may be busy."""


class Case:
    """One event under a flock."""

    def __init__(self, table: Table, flock: Flock, what: str, engine: str) -> None:
        self._table, self._flock, self._what, self._engine = table, flock, what, engine
        self._hung = flock.count("hung")

    async def measure(
        self,
        event: Callable[[], object],
        *,
        limit_s: float,
        again_s: float | None,
        gone: Callable[[], list[psutil.Process]] = list,
        note: str = "",
        lost: bool = True,
        codes: frozenset[str] = frozenset({"OK", "UNAVAILABLE"}),
    ) -> Row:
        """Let it happen; `gone` are processes that must have ended once it is served again (or, with `again_s` None, at
        once). `lost` False: no call may be lost."""
        flock = self._flock
        await flock.flows()
        processes = gone()
        when = time.monotonic()
        event()
        ended = await flock.broken_within(when, 30.0)
        again = None if again_s is None else await flock.served_again(when, again_s)
        if again is not None:
            await flock.flows()
        left = await asyncio.to_thread(gone_within, processes, 5.0)
        flying = [one for one in flock.ends if one.began <= when <= one.ended]
        gone_calls = sum(one.kind != "whole" for one in flying)
        assert {one.code for one in flock.since(when)} <= codes, flock.counts()
        assert lost or not gone_calls, flock.counts()
        limit = limit_s if lost else NEVER
        row = Row(
            self._what, self._engine, ended, limit, gone_calls, len(flying), again, flock.count("hung"), len(left), note
        )
        self._table.add(row)
        return row


# -- the simulated engine ----------------------------------------------------------------------------------------------


@pytest.fixture
def sim(tmp_path: Path) -> Iterator[Served]:
    with Served(tmp_path, *QUICK, *LIFE) as worker:
        worker.wait_until_serving(30)
        yield worker


async def test_a_front_end_killed(sim: Served, table: Table) -> None:
    async with Flock(sim.address) as flock:
        case = Case(table, flock, "front end, kill -9", "sim")
        row = await case.measure(lambda: sim.front_end.kill(), limit_s=1.0, again_s=10.0, gone=lambda: [sim.front_end])
        await flock.stop()
    assert row.again_s is not None and row.again_s < 3.0
    await sim.engine_runs(set(), 2.0)


async def test_the_engine_killed_dying_aloud_stopped_and_garbled(sim: Served, table: Table) -> None:
    async with Flock(sim.address) as flock:
        for what, event, limit_s in (
            ("engine, kill -9", lambda: sim.engine.kill(), 1.0),
            ("engine, dies and says so", lambda: sim.fault("death_frame"), 1.0),
            ("engine, SIGSTOP", lambda: sim.engine.suspend(), SILENCE_S + 1.0),
            ("engine, three outputs in a row that cannot be read", lambda: sim.fault("garble", 3), 1.0),
        ):
            note = f"--silence-secs {SILENCE_S:g}" if "STOP" in what else ""
            case = Case(table, flock, what, "sim")
            codes = frozenset({"OK", "UNAVAILABLE", *(["INTERNAL"] if "read" in what else [])})
            row = await case.measure(
                event, limit_s=limit_s, again_s=20.0, gone=lambda: [sim.engine], note=note, codes=codes
            )
            assert row.again_s is not None and (row.hung, row.orphans) == (0, 0)
        await flock.stop()


async def test_the_leash_killed(sim: Served, table: Table) -> None:
    async with Flock(sim.address) as flock:
        case = Case(table, flock, "leash, kill -9", "sim")
        row = await case.measure(lambda: sim.part("leash.py").kill(), limit_s=NEVER, again_s=10.0, lost=False)
        assert row.again_s is not None and (row.lost, row.hung) == (0, 0)
        await asyncio.to_thread(sim.wait_for, "starting another", 5)
        await flock.stop()


async def test_the_front_end_replaced(sim: Served, table: Table) -> None:
    async with Flock(sim.address) as flock:
        case = Case(table, flock, "front end, `headless-bridge reload`", "sim")
        old = sim.front_end
        await case.measure(lambda: sim.process.send_signal(signal.SIGHUP), limit_s=NEVER, again_s=10.0, lost=False)
        assert not await asyncio.to_thread(gone_within, [old], 10.0)
        await flock.stop()


async def test_the_supervisor_killed(sim: Served, table: Table) -> None:
    async with Flock(sim.address) as flock:
        case = Case(table, flock, "supervisor, kill -9", "sim")
        row = await case.measure(
            lambda: sim.process.kill(), limit_s=5.0, again_s=None, gone=sim.tree, note="the whole tree ends within 5 s"
        )
    assert row.ended_s <= 5.0 and (row.hung, row.orphans) == (0, 0)


async def test_a_full_disk(sim: Served, table: Table) -> None:
    """No process of the tree can write a byte to any file, its log included; then the front end dies on top."""

    def fill() -> None:
        for one in sim.tree():
            one.rlimit(psutil.RLIMIT_FSIZE, (0, 0))

    async with Flock(sim.address) as flock:
        case = Case(table, flock, "disk full", "sim")
        await case.measure(fill, limit_s=NEVER, again_s=10.0, lost=False, note="state folder and log")
        case = Case(table, flock, "disk full, and the front end, kill -9", "sim")
        await case.measure(lambda: sim.front_end.kill(), limit_s=1.0, again_s=10.0)
        await flock.stop()
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 0


CLIENT = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from tests.chaos.flock import Flock
async def main():
    async with Flock(sys.argv[2], streams=64, tokens=5000) as flock:
        while len(flock.running) < 64:
            await asyncio.sleep(0.01)
        print("up", flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""


async def test_a_client_with_64_streams_vanishes(sim: Served, table: Table) -> None:
    root = str(Path(__file__).resolve().parents[2])
    client = subprocess.Popen([sys.executable, "-c", CLIENT, root, sim.address], stdout=subprocess.PIPE, cwd=root)
    assert client.stdout is not None
    try:
        assert await asyncio.to_thread(client.stdout.readline) == b"up\n"
        theirs = await sim.engine_is_busy(64)
        async with Flock(sim.address) as flock:
            when = 0.0

            def vanish() -> None:
                nonlocal when
                when = time.monotonic()
                client.kill()

            case = Case(table, flock, "a client of 64 more streams, kill -9", "sim")
            await case.measure(
                vanish, limit_s=NEVER, again_s=10.0, lost=False, note="its generations are freed within 1 s"
            )
            until = when + 1.0
            while set(sim.engine_state()["running_ids"]) & theirs:
                assert time.monotonic() < until + flock.tokens  # measured above; here only that they are gone
                await asyncio.sleep(0.02)
            await flock.stop()
    finally:
        client.kill()
        client.wait()
        client.stdout.close()


# -- the real engine ---------------------------------------------------------------------------------------------------


def serve_vllm(python: Path, model: Path, folder: Path, *arguments: object) -> Worker:
    port = unused_port()
    command = [python, "-m", "bridge", "serve", "vllm", model, "--port", port, "--restart-delay-secs", "0.2"]
    command += ["--liveness-secs", "0.5", *LIFE, *VLLM_FLAGS, *arguments]
    return Worker([str(part) for part in command], port, folder / "log")


def named(worker: Worker, *words: str) -> list[psutil.Process]:
    """Processes of the tree whose command line holds one of `words`."""
    found = []
    for one in worker.tree():
        try:
            if any(word in " ".join(one.cmdline()) for word in words):
                found.append(one)
        except psutil.NoSuchProcess:
            continue
    return found


async def three_upgrades(worker: Worker, flock: Flock) -> None:
    engine = {one.pid for one in named(worker, *ENGINE_WORDS)}
    for _ in range(3):
        old = named(worker, "bridge.frontend")
        await flock.flows()
        worker.process.send_signal(signal.SIGHUP)
        assert not await asyncio.to_thread(gone_within, old, 30.0)
    await flock.flows()
    assert flock.count("cut") == 0 and flock.count("hung") == 0, flock.counts()
    # A call handed over in the instant of a GOAWAY is refused, and calls that end in one step are followed together.
    assert flock.count("refused") <= 3 * flock.streams // 4
    assert {one.pid for one in named(worker, *ENGINE_WORDS)} == engine


ENGINE_WORDS = ("VLLM::", "vllm.entrypoints.cli.main")


async def test_the_parts_of_a_real_engine(vllm_python: Path, tiny_llama: Path, tmp_path: Path, table: Table) -> None:
    with serve_vllm(vllm_python, tiny_llama, tmp_path, "--distributed-executor-backend=mp") as worker:
        worker.wait_until_serving()

        def part(words: str) -> psutil.Process:
            return named(worker, words)[0]

        async with Flock(worker.address, exact=False, vocabulary=200, tokens=60) as flock:
            await three_upgrades(worker, flock)
            case = Case(table, flock, "companion, kill -9", "vLLM")
            await case.measure(lambda: part("vllm.companion").kill(), limit_s=NEVER, again_s=20.0, lost=False)
            case = Case(table, flock, "front end, kill -9", "vLLM")
            await case.measure(lambda: part("bridge.frontend").kill(), limit_s=1.0, again_s=20.0)
            for what, event, limit_s, note in (
                ("EngineCore, kill -9", lambda: part("VLLM::EngineCore").kill(), 1.0, ""),
                ("worker, kill -9", lambda: part("VLLM::Worker").kill(), 1.0, ""),
                ("launcher, kill -9", lambda: part("vllm.entrypoints.cli.main").kill(), 1.0, ""),
                (
                    "EngineCore, SIGSTOP",
                    lambda: part("VLLM::EngineCore").suspend(),
                    SILENCE_S + 1.0,
                    f"--silence-secs {SILENCE_S:g}",
                ),
            ):
                case = Case(table, flock, what, "vLLM")
                await case.measure(
                    event,
                    limit_s=limit_s,
                    again_s=AGAIN_LIMIT_S,
                    gone=lambda: named(worker, *ENGINE_WORDS),
                    note=note,
                )
            await flock.stop()
        assert worker.wait_idle(5.0) < 5.0
        tree = worker.tree()
        assert worker.stop() == 0
        assert not gone_within(tree, 1.0)


async def test_half_of_a_data_parallel_group(vllm_python: Path, tiny_llama: Path, tmp_path: Path, table: Table) -> None:
    with serve_vllm(vllm_python, tiny_llama, tmp_path, "--data-parallel-size=2", "--restart", "never") as worker:
        worker.wait_until_serving()
        async with Flock(worker.address, exact=False, vocabulary=200, tokens=60) as flock:
            case = Case(table, flock, "one of two data-parallel ranks, kill -9", "vLLM")
            await case.measure(
                lambda: named(worker, "VLLM::EngineCore_DP1")[0].kill(),
                limit_s=1.0,
                again_s=None,
                gone=worker.tree,
                note="with --restart never: the whole tree ends, exit code 1",
            )
        assert worker.process.wait(10) == 1
