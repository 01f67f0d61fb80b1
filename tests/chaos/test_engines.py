"""Engines that die, hang, and are started again behind the same listeners."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from bridge.plugins.sim.control import SimControl
from tests.chaos.flock import Flock, one_stream
from tests.chaos.served import QUICK, Served

SILENCE_S = 2.0


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with Served(tmp_path, *QUICK, "--silence-secs", SILENCE_S, "--load-seconds", "1") as worker:
        worker.wait_until_serving(30)
        yield worker


def generation(tokens: int, prompt: int = 2, request_id: str = "") -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id=request_id,
        tokenized=pb.TokenizedInput(input_ids=[5] * prompt),
        sampling_params=pb.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True),
    )


def answers(served: Served) -> bool:
    (answer,) = served.stub.Generate(generation(1), timeout=10)
    return bool(answer.complete.finish_reason == "length")


def health(served: Served) -> int:
    check = health_pb2.HealthCheckRequest(service="vllm.grpc.engine.VllmEngine")
    return int(health_pb2_grpc.HealthStub(served.channel).Check(check, timeout=5).status)


SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.mark.parametrize("fault", ["kill", "exit", "death_frame"])
async def test_an_engine_that_dies_fails_everything_at_once_and_comes_back(served: Served, fault: str) -> None:
    engine, front_end = served.engine.pid, served.front_end.pid
    async with Flock(served.address) as flock:
        await flock.flows()
        await served.engine_is_busy()
        when = time.monotonic()
        served.fault(fault)
        assert await flock.broken_within(when, 5.0) < 1.0
        assert health(served) == NOT_SERVING
        assert {one.code for one in flock.since(when)} == {"UNAVAILABLE"}
        assert any("the engine is gone" in one.detail for one in flock.since(when))
        await flock.served_again(when, 15.0)
        assert health(served) == SERVING
        await flock.flows()
        await flock.stop()
    assert served.engine.pid != engine and served.front_end.pid == front_end
    assert flock.count("hung") == 0


async def test_an_engine_that_hangs_is_found_while_it_has_work(served: Served) -> None:
    engine = served.engine.pid
    async with one_stream(served.address, "r", 100_000) as stream:
        when = time.monotonic()
        served.engine.suspend()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            async with asyncio.timeout(10):
                while await stream.read() is not grpc.aio.EOF:
                    pass
        found = time.monotonic() - when
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "rank 0 does not answer: 2.0 s of silence with 1 requests in flight" in (error.value.details() or "")
        assert SILENCE_S - 1.0 < found < SILENCE_S + 1.0  # the last answer is up to a tick and an interval old
    served.wait_until_serving(20)
    assert served.engine.pid != engine and answers(served)


async def test_silence_without_work_is_no_reason(served: Served) -> None:
    engine = served.engine
    engine.suspend()
    await asyncio.sleep(SILENCE_S + 2.0)
    engine.resume()
    assert answers(served) and served.engine.pid == engine.pid


async def test_prompts_in_hand_extend_the_silence(tmp_path: Path) -> None:
    arguments = (*QUICK, "--silence-secs", "1", "--prefill-tokens-per-sec", "2000")
    with Served(tmp_path, *arguments) as served:
        served.wait_until_serving(30)
        engine = served.engine
        engine.suspend()
        stream = served.stub.Generate(generation(1, prompt=6000), timeout=30)
        await asyncio.sleep(2.5)  # past the silence, within the three seconds more for the prompt
        engine.resume()
        (answer,) = stream
        assert answer.complete.finish_reason == "length" and served.engine.pid == engine.pid


async def test_a_wedged_input_is_found_by_the_request_it_never_reads(served: Served) -> None:
    served.fault("wedge_input")
    await asyncio.to_thread(served.wait_for, "fault: wedge_input", 5)  # an idle engine looks once a second
    when = time.monotonic()
    with pytest.raises(grpc.RpcError) as error:
        list(served.stub.Generate(generation(1), timeout=20))
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    await asyncio.to_thread(served.wait_for, "starting it again", 10)
    assert time.monotonic() - when < SILENCE_S + 2.0
    served.wait_until_serving(20)
    assert answers(served)


async def test_outputs_that_cannot_be_read_end_the_engine(served: Served) -> None:
    engine = served.engine.pid
    served.fault("garble", 3)
    with pytest.raises(grpc.RpcError) as error:
        for _ in range(3):
            list(served.stub.Generate(generation(5), timeout=20))
    assert error.value.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE)
    until = time.monotonic() + 10
    while engine in [one.pid for one in served.parts("plugins.sim ")]:
        with pytest.raises(grpc.RpcError):
            list(served.stub.Generate(generation(5), timeout=20))
        assert time.monotonic() < until
    served.wait_until_serving(20)
    assert answers(served) and "could not be decoded" in served.output()


async def test_health_waits_for_a_real_token(tmp_path: Path) -> None:
    with Served(tmp_path, *QUICK, "--fault", "hang_loop:2@requests:1") as served:
        served.wait_for("ready:", 20)
        seen = health(served)
        assert seen == NOT_SERVING
        await asyncio.sleep(1.0)
        assert health(served) == NOT_SERVING
        served.wait_until_serving(20)
        with SimControl(served.control_address) as control:
            assert control.state()["finished"] == 1


async def test_without_a_warm_up_nothing_is_asked(tmp_path: Path) -> None:
    with Served(tmp_path, *QUICK, "--warmup", "off") as served:
        served.wait_until_serving(20)
        with SimControl(served.control_address) as control:
            assert control.state()["finished"] == 0


async def test_restarts_have_a_limit_and_the_end_a_tail(tmp_path: Path) -> None:
    with Served(tmp_path, *QUICK, "--restart-limit", "2", "--fault", "exit:0@seconds:1") as served:
        served.wait_until_serving(30)
        assert served.process.wait(30) == 1
        output = served.output()
        assert output.count("starting it again in") == 2
        assert "starting it again in 0.2 s" in output and "starting it again in 0.4 s" in output
        *_, before, last = output.splitlines()
        assert last.startswith("headless-bridge: sim exited with code 0 though nobody stopped it; ")
        assert last.endswith("2 restarts in 600 s are the limit (--restart-limit)")
        assert before.startswith("  | sim engine 0: ")


async def test_always_has_no_limit(tmp_path: Path) -> None:
    flags = ("--restart", "always", "--restart-limit", "1", "--restart-delay-secs", "0")
    with Served(tmp_path, *flags, "--fault", "exit@seconds:0.2") as served:
        until = time.monotonic() + 20
        while served.output().count("serves again") < 4:
            assert time.monotonic() < until, served.output()
            served.must_run("restarting")
            await asyncio.sleep(0.1)


async def test_an_engine_that_cannot_start_again_counts(tmp_path: Path) -> None:
    flags = ("--restart-limit", "1", "--startup-ceiling-secs", "2")
    with Served(tmp_path, *QUICK, *flags, "--fault", "kill@seconds:1", "--load-seconds", "0.5") as served:
        served.wait_until_serving(30)
        served.wait_for("starting it again", 10)
        served.wait_for("dials", 5)
        while len(served.parts("bridge.plugins.sim ")) != 1:
            await asyncio.sleep(0.01)
        served.engine.suspend()
        assert served.process.wait(20) == 1
        assert "is not up 2 s after its start" in served.output().splitlines()[-1]


async def test_a_stop_during_a_restart_is_a_stop(served: Served) -> None:
    served.engine.kill()
    served.wait_for("loading weights: 20 %", 10)
    began = time.monotonic()
    tree = served.tree()
    assert served.stop() == 0
    assert time.monotonic() - began < 5
    assert not [one for one in tree if one.is_running()]


async def test_a_stop_has_a_budget(tmp_path: Path) -> None:
    with Served(tmp_path, *QUICK, "--drain-secs", "60", "--stop-secs", "6") as served:
        served.wait_until_serving(30)
        async with one_stream(served.address, "r", 100_000):
            began = time.monotonic()
            served.process.terminate()
            assert await asyncio.to_thread(served.process.wait, 20) == 0
            assert 1.5 < time.monotonic() - began < 6
