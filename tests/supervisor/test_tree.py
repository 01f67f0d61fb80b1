"""`serve` over the simulated engine: the whole tree as real processes, and every way it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from bridge.supervisor.listeners import bind_tcp
from tests.running import Worker, gone_within, unused_port

SERVE = (sys.executable, "-m", "bridge", "serve")


def serve(*arguments: object, timeout: float = 30.0) -> subprocess.CompletedProcess[str]:
    """Run `serve` to its end."""
    command = [*SERVE, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


class Sim(Worker):
    """`serve sim`, and the parts of its tree."""

    def __init__(self, folder: Path, *arguments: object) -> None:
        self.state = folder / "state"
        port = unused_port()
        flags = ["--port", str(port), "--state-dir", str(self.state), *map(str, arguments)]
        super().__init__([*SERVE, "sim", *flags], port, folder / "log")

    def part(self, words: str) -> psutil.Process:
        """The process whose command line holds `words`."""
        found = [one for one in self.tree() if words in " ".join(one.cmdline())]
        assert len(found) == 1, (words, [one.cmdline() for one in self.tree()])
        return found[0]

    def generate(self, tokens: int) -> grpc.Call:
        request = pb.GenerateRequest(
            request_id="r",
            tokenized=pb.TokenizedInput(input_ids=[1, 2, 3]),
            sampling_params=pb.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True),
            stream=True,
        )
        return self.stub.Generate(request, timeout=60)

    def exit_code(self, within_s: float = 30.0) -> int:
        return self.process.wait(within_s)

    def last_line(self) -> str:
        return self.output().splitlines()[-1]


@pytest.fixture
def sim(tmp_path: Path) -> Iterator[Sim]:
    with Sim(tmp_path) as worker:
        worker.wait_until_serving(30)
        yield worker


def test_the_tree_is_what_the_picture_shows(sim: Sim) -> None:
    parts = {sim.part(words).pid for words in ("bridge serve", "leash.py", "bridge.frontend", "bridge.plugins.sim")}
    assert {one.pid for one in sim.tree()} == parts  # the companion is a one-shot
    sessions = {os.getsid(pid) for pid in parts}
    assert sessions == parts


def test_a_new_engine_starts_without_the_latch_of_the_last(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir(mode=0o700)
    latch = tmp_path / "state" / "backend"
    latch.write_text("of another engine")
    with Sim(tmp_path, "--restart", "on-failure") as worker:
        worker.wait_until_serving(30)
        assert not latch.exists()
        latch.write_text("of this engine")
        worker.part("bridge.plugins.sim").kill()
        worker.wait_for("serves again", 10)
        assert not latch.exists()


def test_constraints_are_refused_by_name_where_nothing_checks_them(sim: Sim) -> None:
    request = pb.GenerateRequest(
        request_id="r",
        tokenized=pb.TokenizedInput(input_ids=[1, 2, 3]),
        sampling_params=pb.SamplingParams(temperature=0.0, max_tokens=1, regex="[ab]"),
    )
    with pytest.raises(grpc.RpcError) as refused:
        list(sim.stub.Generate(request, timeout=10))
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert refused.value.details().startswith("regex needs the companion that validates constraints")


def test_a_signal_stops_it_all_with_exit_code_zero(sim: Sim) -> None:
    tree = sim.tree()
    assert sim.stop() == 0
    assert gone_within(tree, 0) == []


def test_an_interrupt_does_the_same(sim: Sim) -> None:
    sim.process.send_signal(signal.SIGINT)
    assert sim.exit_code() == 0


def test_kill_minus_nine_of_the_supervisor_leaves_nothing(sim: Sim) -> None:
    tree = sim.tree()
    assert len(tree) == 4
    os.kill(sim.pid, signal.SIGKILL)
    assert gone_within(tree, 5.0) == []


def test_kill_minus_nine_with_streams_running_leaves_nothing_and_ends_the_streams(sim: Sim) -> None:
    stream = iter(sim.generate(10_000))
    next(stream)
    tree = sim.tree()
    os.kill(sim.pid, signal.SIGKILL)
    assert gone_within(tree, 5.0) == []
    with pytest.raises(grpc.RpcError):
        list(stream)


def test_a_temporary_state_folder_is_gone_after_kill_minus_nine(tmp_path: Path) -> None:
    port = unused_port()
    runtime = tmp_path / "run"
    runtime.mkdir()
    command = [*SERVE, "sim", "--port", str(port)]
    with Worker(command, port, tmp_path / "log", {"XDG_RUNTIME_DIR": str(runtime)}) as worker:
        worker.wait_until_serving(30)
        tree = worker.tree()
        assert len(os.listdir(runtime)) == 1
        os.kill(worker.pid, signal.SIGKILL)
        assert gone_within(tree, 5.0) == []
        assert os.listdir(runtime) == []


def test_a_stop_lets_streams_finish(sim: Sim) -> None:
    stream = iter(sim.generate(100))  # about a second at 10 ms a step
    next(stream)
    sim.process.send_signal(signal.SIGTERM)
    answers = list(stream)
    assert answers[-1].complete.finish_reason == "length"
    assert sim.exit_code() == 0


def test_a_drain_has_a_cap_and_gives_the_rest_a_terminal(tmp_path: Path) -> None:
    with Sim(tmp_path, "--drain-secs", "0.5") as worker:
        worker.wait_until_serving(30)
        stream = iter(worker.generate(10_000))
        next(stream)
        started = time.monotonic()
        worker.process.send_signal(signal.SIGTERM)
        answers = list(stream)
        assert answers[-1].complete.finish_reason == "abort"
        assert worker.exit_code() == 0
        assert time.monotonic() - started < 5


def test_a_second_signal_cuts_the_drain_short(tmp_path: Path) -> None:
    with Sim(tmp_path, "--drain-secs", "60") as worker:
        worker.wait_until_serving(30)
        stream = iter(worker.generate(10_000))
        next(stream)
        worker.process.send_signal(signal.SIGTERM)
        worker.wait_for("stopping", 5)
        again = threading.Timer(0.3, worker.process.send_signal, [signal.SIGTERM])
        again.start()
        assert list(stream)[-1].complete.finish_reason == "abort"
        assert worker.exit_code(10) == 0
        again.join()


@pytest.mark.parametrize("fault", ["kill", "exit", "death_frame"])
def test_an_engine_that_dies_ends_streams_and_the_run(tmp_path: Path, fault: str) -> None:
    with Sim(tmp_path, "--warmup", "off", "--fault", f"{fault}@requests:1") as worker:
        worker.wait_until_serving(30)
        tree = worker.tree()
        started = time.monotonic()
        with pytest.raises(grpc.RpcError) as error:
            list(worker.generate(10_000))
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        assert time.monotonic() - started < 2
        assert worker.exit_code() == 1
        assert worker.last_line().startswith("headless-bridge: ")
        assert gone_within(tree, 0) == []


def test_an_engine_that_dies_while_loading_shows_its_last_lines(tmp_path: Path) -> None:
    started = time.monotonic()
    done = serve("sim", "--port", unused_port(), "--die-while-loading", "--load-seconds", "1")
    assert done.returncode == 1 and time.monotonic() - started < 10
    *_, before, last = done.stderr.splitlines()
    assert last == "headless-bridge: sim exited with code 1 while loading the model, 1 s in"
    assert before.startswith("  | ") and "die-while-loading" in before


def test_a_port_in_use_is_one_line_and_starts_nothing() -> None:
    taken = bind_tcp("127.0.0.1", 0)
    done = serve("sim", "--port", taken.port)
    taken.close()
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert f"port {taken.address.rpartition(':')[2]} on 127.0.0.1 is already in use" in done.stderr
    assert "--port" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["engine-of-nobody"], "engine-of-nobody"),
        (["sim", "./no-such-folder"], "the model path ./no-such-folder does not exist"),
        (["sim", "--zmq-handshake-address", "tcp://127.0.0.1:1"], "--zmq-handshake-address cannot be given"),
        (["sim", "--engine-python", "/no/such/python"], "--engine-python /no/such/python is no program"),
        (["sim", "--host", "203.0.113.7"], "--host 203.0.113.7 is no address of this machine"),
    ],
)
def test_what_cannot_work_is_one_line(arguments: list[str], words: str) -> None:
    done = serve(*arguments)
    assert done.returncode == 2 and words in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr


def test_a_companion_that_fails_is_in_the_error() -> None:
    done = serve("sim", "--port", unused_port(), "--wire-version", "1.0")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    # The engine refuses the version too; whichever process ends first is the one that is named.
    assert last.startswith(
        ("headless-bridge: the companion of sim exited with code 2: ", "headless-bridge: sim exited")
    )
    assert "1.0" in done.stderr


def test_a_start_over_its_ceiling_names_the_flag_and_leaves_nothing(tmp_path: Path) -> None:
    with Sim(tmp_path, "--load-seconds", "30", "--startup-ceiling-secs", "1.5") as worker:
        worker.wait_for("started sim", 10)
        tree = worker.tree()
        assert worker.exit_code() == 1
        assert "still loading the model" in worker.last_line() and "--startup-ceiling-secs 1.5" in worker.last_line()
        assert gone_within(tree, 0) == []


def test_a_signal_during_the_start_stops_it_all(tmp_path: Path) -> None:
    with Sim(tmp_path, "--load-seconds", "30") as worker:
        worker.wait_for("loading weights", 10)
        tree = worker.tree()
        started = time.monotonic()
        assert worker.stop() == 0
        assert time.monotonic() - started < 5
        assert gone_within(tree, 0) == []


def test_health_is_answered_while_the_engine_loads(tmp_path: Path) -> None:
    with Sim(tmp_path, "--load-seconds", "3") as worker:
        answer = worker.stub.HealthCheck(pb.HealthCheckRequest(), timeout=10, wait_for_ready=True)
        assert not answer.healthy and answer.message
        worker.wait_until_serving(30)


def test_load_figures_reach_the_front_end_and_end_at_zero(sim: Sim) -> None:
    stream = iter(sim.generate(60))
    next(stream)
    end = time.monotonic() + 5
    while sim.running() != 1:
        assert time.monotonic() < end
    list(stream)
    assert sim.wait_idle(1.0) < 1.0


def test_a_unix_socket_serves_and_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "bridge.sock"
    command = [*SERVE, "sim", "--uds", str(path), "--state-dir", str(tmp_path / "state")]
    with Worker(command, 0, tmp_path / "log") as worker:
        worker.channel.close()
        worker.wait_for("serving", 30)
        with grpc.insecure_channel(f"unix:{path}") as channel:
            health = channel.unary_unary("/vllm.grpc.engine.VllmEngine/HealthCheck")
            assert health(b"", timeout=5)
        worker.process.send_signal(signal.SIGHUP)
        worker.wait_for("the old front end is gone", 10)
        with grpc.insecure_channel(f"unix:{path}", options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            assert channel.unary_unary("/vllm.grpc.engine.VllmEngine/HealthCheck")(b"", timeout=5)
        assert worker.stop() == 0
        assert not path.exists()


def test_the_model_name_is_the_served_name_then_the_model_argument(tmp_path: Path) -> None:
    with Sim(tmp_path, "--served-model-name", "alias") as worker:
        worker.wait_until_serving(30)
        assert worker.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=5).served_model_name == "alias"
