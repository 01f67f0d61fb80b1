"""How an engine is launched is decided from its arguments alone, and what cannot work is refused by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bridge.supervisor import engines
from bridge.supervisor.engine_args import check_model_path, take_value, whole_number
from bridge.supervisor.engines import LaunchSpec, find_python, installed, launcher, only_installed
from bridge.supervisor.errors import UsageError

HANDSHAKE = "tcp://127.0.0.1:4321"


def spec(*args: str, model: str | None = "m", first_rank: int | None = None) -> LaunchSpec:
    return LaunchSpec(python="py", model=model, args=args, first_rank=first_rank)


def vllm(*args: str, model: str | None = "m", first_rank: int | None = None) -> engines.Launch:
    made = spec(*args, model=model, first_rank=first_rank)
    launcher("vllm").check(made)
    return launcher("vllm").launch(made, HANDSHAKE)


def option(launch: engines.Launch, name: str) -> str:
    return launch.argv[launch.argv.index(name) + 1]


def test_vllm_is_launched_headless_with_our_address() -> None:
    launch = vllm("--dtype", "float32")
    start = ["py", "-m", "vllm.entrypoints.cli.main", "serve", "m", "--headless", "--dtype", "float32"]
    group = ["--data-parallel-size", "1", "--data-parallel-size-local", "1"]
    address = ["--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", "4321"]
    assert launch.argv == [*start, *group, *address]
    assert (launch.first_rank, launch.rank_count) == (0, 1)


def test_an_ipv6_handshake_address_loses_its_brackets() -> None:
    launch = launcher("vllm").launch(spec(), "tcp://[::1]:4321")
    assert option(launch, "--data-parallel-address") == "::1"


@pytest.mark.parametrize("flag", [("--data-parallel-size", "3"), ("-dp", "3"), ("--data_parallel_size=3",)])
def test_the_users_data_parallel_size_is_honoured_in_each_form(flag: tuple[str, ...]) -> None:
    launch = vllm(*flag)
    assert option(launch, "--data-parallel-size-local") == "3"
    assert (launch.first_rank, launch.rank_count) == (0, 3)
    assert sum(argument.replace("_", "-").startswith("--data-parallel-size") for argument in launch.argv) <= 2


def test_an_engine_index_is_the_start_rank_of_one_local_rank() -> None:
    launch = vllm("--data-parallel-size", "4", first_rank=2)
    assert option(launch, "--data-parallel-start-rank") == "2"
    assert option(launch, "--data-parallel-size-local") == "1"
    assert (launch.first_rank, launch.rank_count) == (2, 1)
    launch = vllm("--data-parallel-size", "4", "--data-parallel-size-local", "2", first_rank=2)
    assert (launch.first_rank, launch.rank_count) == (2, 2)


@pytest.mark.parametrize(
    ("args", "first_rank", "words"),
    [
        ((), 1, "--zmq-engine-index 1 .* needs --data-parallel-size of 2 or more"),
        (("-dp", "2"), 2, "ranks 2 to 2 do not fit --data-parallel-size 2"),
        (("-dp", "4", "-dpl", "2"), None, "several nodes"),
        (("-dp", "0"), None, "at least one rank"),
        (("-dp", "two"), None, "'two'"),
        (("-dp",), None, "-dp needs a value"),
        (("--headless",), None, "--headless cannot be given"),
        (("--data-parallel-address", "h"), None, "--data-parallel-address cannot be given"),
        (("--data_parallel_rpc_port=1",), None, "--data-parallel-rpc-port cannot be given"),
        (("--port", "1"), None, "--port cannot be given"),
        (("--host=x",), None, "--host cannot be given"),
        (("--api-server-count", "2"), None, "--api-server-count cannot be given"),
        (("-asc", "2"), None, "-asc cannot be given"),
        (("--data-parallel-rank", "1"), None, "--data-parallel-rank cannot be given"),
        (("--nnodes", "2"), None, "--nnodes cannot be given"),
    ],
)
def test_what_vllm_cannot_do_here_is_refused_by_name(args: tuple[str, ...], first_rank: int | None, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        vllm(*args, first_rank=first_rank)


def test_vllm_needs_a_model_or_a_configuration_file() -> None:
    with pytest.raises(UsageError, match="needs a model"):
        vllm(model=None)
    assert "m" not in vllm("--config", "c.yaml", model=None).argv


def test_headless_vllm_dials_tcp_only() -> None:
    with pytest.raises(UsageError, match="tcp only"):
        launcher("vllm").launch(spec(), "ipc:///x")


@pytest.mark.parametrize("engine", engines.NAMES)
@pytest.mark.parametrize(
    ("args", "model", "rest"),
    [
        (["M", "--x", "1"], "M", ["--x", "1"]),
        (["--x", "1", "--model", "M"], "M", ["--x", "1"]),
        (["--model=M", "--x"], "M", ["--x"]),
        (["--x", "--model-path", "M"], "M", ["--x"]),
        (["--x"], None, ["--x"]),
    ],
)
def test_the_model_is_found_in_each_form(engine: str, args: list[str], model: str | None, rest: list[str]) -> None:
    assert launcher(engine).split_model(args) == (model, rest)


def test_the_simulated_engine_gets_address_index_and_model(tmp_path: Path) -> None:
    made = spec("--step-ms", "5", model=str(tmp_path), first_rank=3)
    launcher("sim").check(made)
    launch = launcher("sim").launch(made, HANDSHAKE)
    ours = ["--zmq-handshake-address", HANDSHAKE, "--zmq-engine-index", "3"]
    assert launch.argv == ["py", "-m", "bridge.plugins.sim", *ours, "--model", str(tmp_path), "--step-ms", "5"]
    assert launch.first_rank == 3


@pytest.mark.parametrize("engine", engines.NAMES)
def test_the_companion_gets_the_engines_own_arguments(engine: str) -> None:
    command = launcher(engine).companion(spec("--x", "1"))
    assert command[:5] == ["py", "-m", f"bridge.plugins.{engine}.companion", "facts", "--"]
    assert command[-2:] == ["--x", "1"] and "m" in command


def test_the_companion_that_stays_gets_its_socket_too() -> None:
    command = launcher("vllm").resident(spec("--x", "1"), "/run/c")
    assert command == ["py", "-m", "bridge.plugins.vllm.companion", "serve", "/run/c", "--", "m", "--x", "1"]
    assert launcher("sim").resident(spec("--x", "1"), "/run/c") is None


def test_unknown_engines_are_answered_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"unknown engine 'trt'.*sim, vllm"):
        launcher("trt")


@pytest.mark.parametrize("path", ["/no/such", "./no-such", "../no-such", "~/no-such", "a/b/c"])
def test_a_path_that_is_not_there_is_told(path: str) -> None:
    with pytest.raises(UsageError, match=f"the model path {path} does not exist"):
        check_model_path(path, "e")


def test_a_hub_id_is_left_to_the_engine() -> None:
    check_model_path("org/name", "e")
    with pytest.raises(UsageError, match="does not exist"):
        check_model_path("org/name", "e", hub=False)


def test_the_last_value_of_a_repeated_flag_counts_and_all_are_taken() -> None:
    assert take_value(["--a", "1", "--b", "--a=2"], "--a") == ("2", ["--b"])
    assert whole_number(["-n", "3"], "-n") == 3
    with pytest.raises(UsageError, match="-1"):
        whole_number(["-n=-1"], "-n")


def test_an_engine_that_is_not_installed_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = launcher("vllm")
    monkeypatch.setattr(engine, "package", "no_such_package_here")
    assert not installed(engine)
    with pytest.raises(UsageError, match=r"vllm is not installed in .*pip install.*--engine-python"):
        find_python(engine, None)
    with pytest.raises(UsageError, match="vllm is not installed in"):
        find_python(engine, sys.executable)
    assert find_python(launcher("sim"), None) == sys.executable


def test_the_other_interpreter_is_asked(tmp_path: Path) -> None:
    engine = launcher("sim")
    assert find_python(engine, sys.executable) == sys.executable
    with pytest.raises(UsageError, match="no program"):
        find_python(engine, str(tmp_path / "python"))
    with pytest.raises(UsageError, match="no working Python"):
        find_python(engine, "false")
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    with pytest.raises(UsageError, match="headless-bridge is not installed in"):
        find_python(engine, str(bare))


def test_one_installed_engine_needs_no_name_and_the_simulated_one_never_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = launcher("vllm")
    monkeypatch.setattr(engine, "package", "no_such_package_here")
    with pytest.raises(UsageError, match="no engine is installed"):
        only_installed()
    monkeypatch.setattr(engine, "package", "json")
    assert only_installed() is engine
    monkeypatch.setattr(launcher("sim"), "package", "json")
    with pytest.raises(UsageError, match="several engines"):
        only_installed()


def test_the_supervisor_imports_no_engine_and_stays_small() -> None:
    heavy = ("torch", "vllm", "grpc", "numpy", "google.protobuf", "transformers", "ngh2", "uvloop", "tokenizers")
    code = f"import sys, bridge.supervisor.tree; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
