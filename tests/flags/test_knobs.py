"""The settings that operators of another servicer have in their manifests work here, after our own."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from bridge.flags import SERVE, folders_of, resolve, without_meaning
from bridge.supervisor.errors import UsageError

KNOBS: list[tuple[str, str, str, Any]] = [
    ("SMG_VLLM_SERVICER_HANDSHAKE_PORT", "handshake-port", "29550", 29550),
    ("SMG_VLLM_SERVICER_DRAIN_SECS", "drain-secs", "30", 30.0),
    ("SMG_VLLM_SERVICER_STARTUP_TIMEOUT_SECS", "startup-timeout-secs", "600", 600.0),
    ("SMG_VLLM_SERVICER_STARTUP_CEILING_SECS", "startup-ceiling-secs", "0", 0.0),
    ("SMG_VLLM_SERVICER_METRICS_PORT", "metrics-port", "9100", 9100),
    ("SMG_VLLM_SERVICER_METRICS_HOST", "metrics-host", "0.0.0.0", "0.0.0.0"),
    ("SMG_ZMQ_SOCKET_DIR", "socket-dir", "/run/me", "/run/me"),
]
"""Their name, our flag, a value, and what it means."""


@pytest.mark.parametrize(("theirs", "flag", "text", "value"), KNOBS, ids=[knob[0] for knob in KNOBS])
def test_the_value_comes_from_the_flag_then_ours_then_theirs_then_the_default(
    theirs: str, flag: str, text: str, value: Any
) -> None:
    key, ours = flag.replace("-", "_"), "BRIDGE_" + flag.replace("-", "_").upper()
    other = "7" if isinstance(value, int | float) else "/other"

    def found(arguments: list[str], environment: dict[str, str]) -> tuple[Any, str]:
        values = resolve(SERVE, arguments, environment, "vllm")
        return values[key], values.sources[key]

    assert found([f"--{flag}", text], {ours: other, theirs: other}) == (value, f"--{flag}")
    assert found([], {ours: text, theirs: other}) == (value, ours)
    assert found([], {theirs: text}) == (value, theirs)
    assert found([], {})[1] == "default"
    assert resolve(SERVE, [], {theirs: ""}, "vllm").sources[key] == "default"


def test_a_setting_for_another_engine_is_not_ours() -> None:
    values = resolve(SERVE, [], {"SMG_SGLANG_SERVICER_DRAIN_SECS": "30"}, "vllm")
    assert values["drain_secs"] == 5.0


def test_a_wrong_value_is_told_with_the_name_that_holds_it() -> None:
    with pytest.raises(UsageError, match=r"SMG_VLLM_SERVICER_METRICS_PORT is 'many'"):
        resolve(SERVE, [], {"SMG_VLLM_SERVICER_METRICS_PORT": "many"}, "vllm")


def test_settings_without_meaning_here_are_named() -> None:
    lines = without_meaning(
        {"SMG_VLLM_SERVICER_WORKER_THREADS": "8", "SMG_SGLANG_SERVICER_WORKER_THREADS": "8"}, "vllm"
    )
    assert len(lines) == 1 and lines[0].startswith("SMG_VLLM_SERVICER_WORKER_THREADS is set and ignored")


def test_no_metrics_listener_unless_asked_for() -> None:
    assert resolve(SERVE, [], {}, "vllm")["metrics_port"] is None
    assert resolve(SERVE, ["--metrics-port", "0"], {}, "vllm")["metrics_port"] == 0


def test_folders() -> None:
    assert folders_of(resolve(SERVE, [], {}, "vllm")) == (None, None)
    base = folders_of(resolve(SERVE, [], {"SMG_ZMQ_SOCKET_DIR": "/run/me"}, "vllm"))[1]
    assert str(base) == "/run/me"


def test_doctor_shows_where_values_come_from_and_no_secrets() -> None:
    command = [sys.executable, "-m", "bridge", "doctor", "sim", "--metrics-port", "0", "--port", "0"]
    environment = {**os.environ, "SMG_SIM_SERVICER_DRAIN_SECS": "30", "SMG_SIM_SERVICER_WORKER_THREADS": "2"}
    shown = subprocess.run(
        [*command, "--api-key", "hunter2"], capture_output=True, text=True, timeout=60, check=True, env=environment
    ).stdout
    rows = {line.split()[0]: line.split() for line in shown.splitlines() if line.strip().startswith("--")}
    assert rows["--drain-secs"] == ["--drain-secs", "30.0", "from", "SMG_SIM_SERVICER_DRAIN_SECS"]
    assert rows["--metrics-port"][-1] == "--metrics-port" and rows["--host"][-1] == "default"
    assert "SMG_SIM_SERVICER_WORKER_THREADS is set and ignored" in shown
    assert "hunter2" not in shown and "[redacted]" in shown
