"""The environment builder: done once, quick after that, made again when its recipe changes, clear when it fails."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what the builder needs, so that the tests' own environments stay as they are."""
    (tmp_path / "tests").mkdir()
    shutil.copytree(HERE, tmp_path / "tests/environments", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(HERE.parent.parent / "pyproject.toml", tmp_path)
    return tmp_path


def build(checkout: Path, *names: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(checkout / "tests/environments/build.py"), *names]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_a_target_is_made_once(checkout: Path) -> None:
    first = build(checkout, "tiny")
    assert first.returncode == 0 and "[tiny] ready in" in first.stdout
    weights = checkout / ".models/tiny-llama/model.safetensors"
    made = weights.stat().st_mtime_ns
    again = build(checkout, "tiny")
    assert (again.returncode, again.stdout) == (0, "")
    assert weights.stat().st_mtime_ns == made


def test_every_machine_gets_the_same_weights(checkout: Path, tiny_llama: Path) -> None:
    build(checkout, "tiny")
    names = ("model.safetensors", "tokenizer.json", "config.json")
    assert all(
        (checkout / ".models/tiny-llama" / name).read_bytes() == (tiny_llama / name).read_bytes() for name in names
    )


def test_a_changed_recipe_starts_over(checkout: Path) -> None:
    build(checkout, "tiny")
    (checkout / ".models/tiny-llama/left-over").write_text("")
    with (checkout / "tests/environments/tiny_models.py").open("a") as recipe:
        recipe.write("\n# changed\n")
    again = build(checkout, "tiny")
    assert again.returncode == 0 and "starting over" in again.stdout
    assert not (checkout / ".models/tiny-llama/left-over").exists()


def test_an_interrupted_build_is_taken_up(checkout: Path) -> None:
    folder = checkout / ".models/tiny-llama"
    folder.mkdir(parents=True)
    (folder / ".recipe.json").write_text("{")
    assert build(checkout, "tiny").returncode == 0
    assert (folder / "model.safetensors").exists()


def test_a_failed_step_shows_what_the_tool_said(checkout: Path) -> None:
    script = checkout / "tests/environments/build.py"
    script.write_text(script.read_text().replace('SMG = "1.13.0"', 'SMG = "not-a-version"'))
    failed = build(checkout, "smg")
    assert failed.returncode == 1
    assert failed.stderr.startswith(
        "error: smg: 'smg not-a-version' failed with exit code 1; the whole log is .envs/smg.log"
    )
    assert "not-a-version" in failed.stderr.partition("\n")[2]
    assert "Traceback" not in failed.stderr


def test_an_unknown_name_is_wrong_usage(checkout: Path) -> None:
    wrong = build(checkout, "nothing")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == "usage: build.py dev|vllm|sglang|smg|router|vllm-rs|model|tiny|all …\n"
