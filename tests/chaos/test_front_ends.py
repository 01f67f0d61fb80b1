"""Front ends that die and front ends that are replaced, under 64 streams: the engine notices neither."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from tests.chaos.flock import Flock, one_stream
from tests.chaos.served import QUICK, Served
from tests.conftest import ROOT

KILLS = 20
UPGRADES = 50


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with Served(tmp_path, *QUICK) as worker:
        worker.wait_until_serving(30)
        yield worker


async def test_a_front_end_killed_twenty_times_costs_the_engine_nothing(served: Served) -> None:
    engine = served.engine.pid
    backs = []
    async with Flock(served.address) as flock:
        await flock.flows()
        seen: set[str] = set()
        for _ in range(KILLS):
            front_end = served.front_end
            ids = await served.engine_is_busy()
            front_end.kill()
            when = time.monotonic()
            assert await flock.broken_within(when, 5.0) < 1.0
            backs.append(await served_by_another(served, front_end.pid, when))
            await flock.flows(16)
            after = served.engine_state()
            assert not {*after["running_ids"], *after["waiting_ids"]} & ids, "an orphan still runs"
            prefixes = {wire_id.rpartition(".")[0] for wire_id in ids}
            assert len(prefixes) == 1 and not prefixes & seen, "a wire id's incarnation came again"
            seen |= prefixes
        assert served.engine.pid == engine
        assert flock.count("hung") == 0
        assert {one.code for one in flock.ends} <= {"OK", "UNAVAILABLE"}, flock.counts()
        await flock.stop()
    await served.engine_runs(set(), 2.0)
    assert max(backs) < 2.0, backs


async def served_by_another(served: Served, dead: int, when: float) -> float:
    """Seconds from `when` until another front end answers a generation."""
    while True:
        others = [one.pid for one in served.parts("bridge.frontend") if one.pid != dead]
        if others:
            async with grpc.aio.insecure_channel(served.address, options=[("grpc.use_local_subchannel_pool", 1)]) as to:
                stub = to.unary_stream(
                    "/vllm.grpc.engine.VllmEngine/Generate",
                    request_serializer=pb.GenerateRequest.SerializeToString,
                    response_deserializer=pb.GenerateResponse.FromString,
                )
                request = pb.GenerateRequest(
                    tokenized=pb.TokenizedInput(input_ids=[5]),
                    sampling_params=pb.SamplingParams(temperature=0.0, max_tokens=1),
                )
                async for _ in stub(request, timeout=5, wait_for_ready=True):
                    pass
            return time.monotonic() - when
        assert time.monotonic() - when < 5.0
        await asyncio.sleep(0.01)


async def test_fifty_upgrades_cut_no_stream(served: Served) -> None:
    engine, front_ends = served.engine.pid, {served.front_end.pid}
    channels = 4
    async with Flock(served.address, channels=channels, tokens=12) as flock:
        await flock.flows()
        for _ in range(UPGRADES):
            done = await asyncio.to_thread(served.order, "reload")
            assert done.returncode == 0, done.stderr
            front_ends.add(served.front_end.pid)
        await flock.flows()
        await flock.stop()
        assert flock.count("cut") == 0 and flock.count("hung") == 0, flock.counts()
        refused = [one for one in flock.ends if one.kind == "refused"]
        assert {one.code for one in refused} <= {"UNAVAILABLE"}
        assert len(refused) <= channels * UPGRADES, flock.counts()
    assert served.engine.pid == engine and len(front_ends) == UPGRADES + 1
    await served.engine_runs(set(), 2.0)


async def test_an_upgrade_to_another_version_and_state_format(tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    newer = tmp_path / "newer"
    for name in ("bridge", "wire", "supervisor", "plugins"):
        shutil.copytree(ROOT / name, newer / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        (packages / name).symlink_to(ROOT / name)
    edit(newer / "bridge/__init__.py", r'__version__ = ".*"', '__version__ = "9.9.9"')
    edit(
        newer / "supervisor/control.py",
        r"CONTROL_VERSION = (\d+)",
        lambda found: f"CONTROL_VERSION = {int(found[1]) + 1}",
    )
    edit(newer / "supervisor/ledger.py", r'FORMAT = b"hbledg1', 'FORMAT = b"hbledg2')
    edit(newer / "bridge/orders.py", r"self\._channel\.send\(Work\(ranks=ranks\)\)", NEWS)
    edit(newer / "bridge/frontend.py", r"log = logging.getLogger\(__name__\)", 'log = logging.getLogger("new code")')
    edit(newer / "bridge/frontend.py", r"    channel\.send\(Started", f"    {NAMES_ITSELF}\n    channel.send(Started")
    start = ("sh", "-c", 'cd "$0" && exec "$@"', str(packages), sys.executable)
    with Served(tmp_path, *QUICK, command=start) as served:
        served.wait_until_serving(30)
        async with Flock(served.address) as flock:
            await flock.flows()
            for name in ("bridge", "wire", "supervisor", "plugins"):
                (packages / name).unlink()
                (packages / name).symlink_to(newer / name)
            done = await asyncio.to_thread(served.order, "reload")
            assert done.returncode == 0, done.stderr
            assert "new code: of version 9.9.9" in served.output()
            await flock.flows()
            await flock.stop()
            assert flock.count("cut") == 0 and flock.count("hung") == 0, flock.counts()
            assert flock.count("refused") <= 4
        async with one_stream(served.address, "orphan", 100_000):
            served.front_end.kill()
            served.wait_for("of another version", 5)
            await served.engine_runs(set(), 5.0)


NEWS = """self._channel.send(Work(ranks=ranks))
            import msgspec
            self._channel.send(msgspec.defstruct("News", [("text", str)], tag="news")(text="of the future"))"""
"""A message that the older supervisor does not know."""
NAMES_ITSELF = 'log.warning("of version %s", __import__("bridge").__version__)'


def edit(file: Path, pattern: str, replacement: str | Callable[[re.Match[str]], str]) -> None:
    text, count = re.subn(pattern, replacement, file.read_text())
    assert count == 1, (file, pattern)
    file.write_text(text)


async def test_an_abort_finds_the_stream_of_the_old_front_end(served: Served) -> None:
    async with one_stream(served.address, "old-one", 100_000) as stream:
        served.process.send_signal(signal.SIGHUP)
        await asyncio.to_thread(served.wait_for, "the old one hands over", 10)
        abort(served, "old-one")
        last = None
        async with asyncio.timeout(5):
            while (answer := await stream.read()) is not grpc.aio.EOF:
                last = answer
        assert last is not None and last.complete.finish_reason == "abort"
        await asyncio.to_thread(served.wait_for, "the old front end is gone", 5)
    await served.engine_runs(set(), 2.0)


def abort(served: Served, request_id: str) -> None:
    """As SMG does: on a connection of its own, which reaches the new front end."""
    with grpc.insecure_channel(served.address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        call = channel.unary_unary(
            "/vllm.grpc.engine.VllmEngine/Abort",
            request_serializer=pb.AbortRequest.SerializeToString,
            response_deserializer=pb.AbortResponse.FromString,
        )
        call(pb.AbortRequest(request_ids=[request_id]), timeout=5)


async def test_a_client_that_leaves_the_old_front_end_in_an_upgrade_frees_the_engine(served: Served) -> None:
    async with one_stream(served.address, "leaves", 100_000):
        served.process.send_signal(signal.SIGHUP)
        await asyncio.to_thread(served.wait_for, "the old one hands over", 10)
        assert len(served.parts("bridge.frontend")) == 2
    await served.engine_runs(set(), 2.0)
    await asyncio.to_thread(served.wait_for, "the old front end is gone", 5)


async def test_the_old_front_ends_streams_have_a_cap(tmp_path: Path) -> None:
    with Served(tmp_path, *QUICK, "--upgrade-drain-secs", "1") as served:
        served.wait_until_serving(30)
        async with one_stream(served.address, "endless", 100_000) as stream:
            began = time.monotonic()
            done = await asyncio.to_thread(served.order, "reload")
            assert done.returncode == 0 and 0.9 < time.monotonic() - began < 5
            last = None
            while (answer := await stream.read()) is not grpc.aio.EOF:
                last = answer
            assert last is not None and last.complete.finish_reason == "abort"
        await served.engine_runs(set(), 2.0)


async def test_a_second_upgrade_waits_for_the_first(served: Served) -> None:
    async with one_stream(served.address, "r", 100_000):
        served.process.send_signal(signal.SIGHUP)
        await asyncio.to_thread(served.wait_for, "the old one hands over", 10)
        done = await asyncio.to_thread(served.order, "reload")
        assert done.returncode == 1
        assert done.stderr == "headless-bridge: the front end is being replaced already; try again when that is over\n"


async def test_a_new_front_end_that_cannot_start_leaves_the_old_one_serving(tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    for name in ("bridge", "wire", "supervisor", "plugins"):
        (packages / name).symlink_to(ROOT / name)
    start = ("sh", "-c", 'cd "$0" && exec "$@"', str(packages), sys.executable)
    with Served(tmp_path, *QUICK, command=start) as served:
        served.wait_until_serving(30)
        old = served.front_end.pid
        (packages / "bridge").unlink()
        broken = packages / "bridge"
        broken.mkdir()
        (broken / "__init__.py").write_text("")
        (broken / "frontend.py").write_text("raise SystemExit('this release is broken')")
        served.process.send_signal(signal.SIGHUP)
        line = await asyncio.to_thread(served.wait_for, "the old one goes on", 10)
        assert "the new front end does not serve" in line
        assert served.front_end.pid == old
        (answer,) = served.stub.Generate(generation(1), timeout=5)
        assert answer.complete.finish_reason == "length"


def generation(tokens: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        tokenized=pb.TokenizedInput(input_ids=[5, 6]),
        sampling_params=pb.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True),
    )


async def test_a_front_end_that_hangs_is_replaced(served: Served) -> None:
    front_end = served.front_end
    front_end.suspend()
    await asyncio.to_thread(served.wait_for, "a new front end serves", 45)
    assert served.front_end.pid != front_end.pid


async def test_a_front_end_killed_while_the_engine_loads(tmp_path: Path) -> None:
    with Served(tmp_path, *QUICK, "--load-seconds", "4", "--restart-delay-secs", "0") as served:
        served.wait_until_serving(30)
        served.engine.kill()
        await asyncio.to_thread(served.wait_for, "starting it again", 5)
        await asyncio.sleep(1.0)
        os.kill(served.front_end.pid, signal.SIGKILL)
        await asyncio.to_thread(served.wait_for, "a new front end serves", 10)
        health = served.stub.HealthCheck(pb.HealthCheckRequest(), timeout=5, wait_for_ready=True)
        assert not health.healthy
        served.wait_until_serving(15)
        (answer,) = served.stub.Generate(generation(1), timeout=5)
        assert answer.complete.finish_reason == "length"
