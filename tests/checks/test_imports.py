"""Imports go one way: bridge → supervisor → wire, and plugins → wire."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.checks.sources import Module, modules

MAY_IMPORT = {
    "wire": ("bridge.wire",),
    "plugins": ("bridge.plugins", "bridge.wire"),
    "supervisor": ("bridge.supervisor", "bridge.wire"),
}
"""Folder → the packages of ours it may use. The rest of `bridge` uses all but the plugins."""

EVERYWHERE = "bridge.__version__"
"""The version is every layer's: the parts compare it when they meet."""

ENGINES = ("vllm", "torch", "transformers", "sglang", "tokenspeed", "mlx", "mlx_lm")
"""Packages that only code running inside an engine's own Python may import."""

ONE_HOME = {"ngh2": ("bridge.grpc.connection",), "grpc": ("bridge.chat",)}
"""Package → the only modules that import it: HTTP/2 state is replaceable, and grpcio stays out of the front end."""


def test_the_walk_finds_every_folder() -> None:
    assert {module.layer for module in modules()} == {"bridge", "wire", "plugins", "supervisor"}
    names = [module.name for module in modules()]
    assert len(names) == len(set(names)) and "bridge.wire.companion" in names


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.name)
def test_imports_go_one_way(module: Module) -> None:
    wrong = [f"line {line}: {name}" for line, name in module.imports() if not _allowed(module, name)]
    assert not wrong, f"{module.name} may not import " + ", ".join(wrong)


@pytest.mark.parametrize("package", ONE_HOME)
def test_packages_with_one_home(package: str) -> None:
    users = {module.name for module in modules() for _, name in module.imports() if name.partition(".")[0] == package}
    assert users == set(ONE_HOME[package])


def test_the_front_end_loads_no_engine_no_grpcio_and_no_numpy() -> None:
    code = (
        "import sys, importlib, bridge.frontend\n"
        "from bridge.contracts.names import CONTRACTS\n"
        "for target in CONTRACTS.values(): importlib.import_module(target.partition(':')[0])\n"
        "from bridge.wire.engines import WIRES\n"
        "for package in WIRES.values(): importlib.import_module(package + '.codec')\n"
        f"print(sorted(set(sys.modules) & {{'grpc', 'numpy', *{ENGINES!r}}}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def _allowed(module: Module, name: str) -> bool:
    package = name.partition(".")[0]
    if package in ENGINES:
        return module.layer == "plugins"
    if package != "bridge" or name == EVERYWHERE:
        return True
    if module.layer == "bridge":
        return not name.startswith("bridge.plugins")
    return any(name == own or name.startswith(own + ".") for own in MAY_IMPORT[module.layer])
