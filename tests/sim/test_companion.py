"""The companion and the engine agree on the model, and --help helps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec

from bridge.plugins.sim import faults
from bridge.wire.companion import Facts
from tests.sim.front_end import ROOT


def run(module: str, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"bridge.plugins.{module}", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False, cwd=ROOT)


def test_synthetic_facts() -> None:
    done = run("sim.companion", "facts", "--", "--max-model-len", "4096", "--step-ms", "3")
    facts = msgspec.json.decode(done.stdout.splitlines()[-1], type=Facts)
    assert (facts.engine, facts.engine_version) == ("sim", "0.32.0")
    assert (facts.vocab_size, facts.max_model_len, facts.eos_token_ids) == (32000, 4096, [2])
    assert facts.is_generation and facts.skip_tokenizer_init
    assert facts.server_args["step_ms"] == 3.0


def test_facts_of_a_model_folder(tiny_llama: Path) -> None:
    done = run("sim.companion", "facts", "--", "--model", str(tiny_llama), "--served-model-name", "tiny")
    facts = msgspec.json.decode(done.stdout.splitlines()[-1], type=Facts)
    assert (facts.vocab_size, facts.max_model_len, facts.eos_token_ids[0]) == (259, 2048, 2)
    assert (facts.model_path, facts.served_model_name) == (str(tiny_llama), "tiny")
    assert not facts.skip_tokenizer_init


def test_wrong_arguments_are_one_line() -> None:
    for args in (("facts", "--", "--model", "no-such-folder"), ("facts", "--model", "x"), ()):
        done = run("sim.companion", *args)
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == 1, done.stderr


def test_help_shows_every_fault_and_an_example() -> None:
    text = run("sim", "--help").stdout
    assert all(kind in text for kind in faults.DEFAULTS)
    assert "--zmq-handshake-address tcp://" in text


def test_without_a_handshake_address_it_says_so() -> None:
    done = run("sim")
    assert done.returncode == 2
    assert "--zmq-handshake-address" in done.stderr
    assert json.dumps(done.stdout) == '""'
