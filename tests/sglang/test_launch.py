"""How SGLang is launched is decided from its arguments alone, and what cannot work is refused by name."""

from __future__ import annotations

import sys

import pytest

from bridge.plugins.sglang.launcher import split
from bridge.supervisor.engines import Launch, LaunchSpec, launcher
from bridge.supervisor.errors import UsageError

HANDSHAKE = "tcp://127.0.0.1:4321"


def launch(*args: str, model: str | None = "m", first_rank: int | None = None) -> Launch:
    made = LaunchSpec(python="py", model=model, args=args, first_rank=first_rank)
    launcher("sglang").check(made)
    return launcher("sglang").launch(made, HANDSHAKE)


def test_sglang_is_launched_by_our_launcher_in_its_own_python() -> None:
    made = launch("--dtype", "float32")
    start = ["py", "-m", "bridge.plugins.sglang.launcher", "--zmq-handshake-address", HANDSHAKE]
    assert made.argv == [*start, "--zmq-engine-index", "0", "--model-path", "m", "--dtype", "float32"]
    assert (made.first_rank, made.rank_count) == (0, 1)


@pytest.mark.parametrize("flag", [("--dp-size", "3"), ("--data-parallel-size=3",), ("--dp_size", "3")])
def test_every_data_parallel_rank_is_awaited(flag: tuple[str, ...]) -> None:
    assert launch(*flag).rank_count == 3
    assert launch(*flag, first_rank=4).first_rank == 4


@pytest.mark.parametrize("form", [["--model-path", "m"], ["--model=m"], ["m"]])
def test_the_model_is_taken_in_each_form(form: list[str]) -> None:
    assert launcher("sglang").split_model([*form, "--port", "9"]) == ("m", ["--port", "9"])


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("--grpc-mode",), "serves in its place"),
        (("--skip-tokenizer-init",), "tokenizer"),
        (("--nnodes", "2"), "several nodes"),
        (("--dist-init-addr", "h:1"), "several nodes"),
        (("--dp-size", "0"), "at least one rank"),
    ],
)
def test_what_cannot_run_under_the_bridge_is_refused(args: tuple[str, ...], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        launch(*args)


def test_a_model_is_needed() -> None:
    with pytest.raises(UsageError, match="--model-path MODEL"):
        launch(model=None)
    assert launch("--config", "c.yaml", model=None).argv[-2:] == ["--config", "c.yaml"]


def test_only_the_ranks_and_what_spawns_them_are_vital() -> None:
    vital = launcher("sglang").vital
    assert vital("sglang::scheduler_DP0") and vital("sglang::data_parallel_controller")
    assert not vital(f"{sys.executable} -m bridge.plugins.sglang.launcher")


def test_the_launcher_leaves_sglangs_arguments_as_they_are() -> None:
    ours, rest = split(
        ["--zmq-handshake-address", HANDSHAKE, "--zmq-engine-index", "2", "--model-path", "m", "--tp", "2"]
    )
    assert (ours.zmq_handshake_address, ours.zmq_engine_index) == (HANDSHAKE, 2)
    assert rest == ["--model-path", "m", "--tp", "2"]
