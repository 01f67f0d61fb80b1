"""The build step: `*.proto` here → `contracts.binpb`, one FileDescriptorSet, beside them.

setuptools runs it for a wheel, a source distribution's wheel and an editable install alike (`tool.setuptools.cmdclass`).
The result is data, not code: protoc's Python files refuse every protobuf older than the compiler's own, while a
descriptor set is read by any, so the declared floor is the real one whatever compiles it.
"""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path

from setuptools.command.build_py import build_py

HERE = Path("bridge/contracts/proto")
"""In the project's root, where setuptools runs."""


class BuildPy(build_py):  # type: ignore[misc]  # setuptools has no types
    """`build_py` that compiles the protos first."""

    def run(self) -> None:
        compile_protos(HERE)
        super().run()


def compile_protos(folder: Path) -> None:
    """Compile every `.proto` of `folder`; raises `RuntimeError` when protoc refuses one."""
    from grpc_tools import protoc

    target = folder / "contracts.binpb"
    new = target.with_suffix(f".{os.getpid()}")
    names = sorted(path.name for path in folder.glob("*.proto"))
    include = ["-I", str(folder), "-I", str(files("grpc_tools") / "_proto")]
    if protoc.main(["protoc", *include, f"--descriptor_set_out={new}", *names]):
        raise RuntimeError(f"protoc refused {', '.join(names)} in {folder}")
    new.replace(target)
