"""The neutral core names no engine: not in an identifier, not in a string, not in an import."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.checks.sources import Module, modules

ENGINE = re.compile(r"vllm|sglang|tokenspeed|mlx", re.IGNORECASE)

NEUTRAL = re.compile(
    r"bridge\.(?:requests|guard|frontend|engine|refusal|text|varint|stops|grpc(?:\..+)?)$"
    r"|bridge\.wire\.\w+$"
    r"|bridge\.supervisor\.\w+$"
)
"""Modules that serve every engine alike. `wire/<engine>`, `supervisor/engines`, `plugins` and `contracts` do not."""

REGISTRIES = {"bridge.wire.engines": "maps each engine's name to its wire"}
"""Neutral modules whose data is the engines' names, and why."""

PACKAGES = {"bridge.wire.vllm", "bridge.wire.sglang", "bridge.wire.tokenspeed", "bridge.supervisor.engines"}


def neutral() -> list[Module]:
    return [
        module
        for module in modules()
        if NEUTRAL.match(module.name) and module.name not in REGISTRIES and module.name not in PACKAGES
    ]


def test_the_core_is_covered() -> None:
    names = {module.name for module in neutral()}
    assert {"bridge.requests", "bridge.guard", "bridge.frontend", "bridge.wire.link", "bridge.wire.codec"} <= names
    assert any(name.startswith("bridge.grpc.") for name in names)
    assert any(name.startswith("bridge.supervisor.") for name in names)


@pytest.mark.parametrize("module", neutral(), ids=lambda module: module.name)
def test_no_engine_is_named(module: Module) -> None:
    found = [f"line {line}: {text!r}" for line, text in _words(module.tree) if ENGINE.search(text)]
    assert not found, f"{module.name} names an engine: " + "; ".join(found)


def _words(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, text) of identifiers, imports and strings. Docstrings are left out: they cite where a fact comes from."""
    documentation = set(_docstrings(tree))
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        match node:
            case ast.Name(id=text) | ast.Attribute(attr=text) | ast.arg(arg=text) | ast.alias(name=text):
                yield line, text
            case ast.FunctionDef(name=text) | ast.AsyncFunctionDef(name=text) | ast.ClassDef(name=text):
                yield line, text
            case ast.keyword(arg=str(text)) | ast.ImportFrom(module=str(text)):
                yield line, text
            case ast.Constant(value=str(text)) if node not in documentation:
                yield line, text


def _docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Every string that stands alone as a statement."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value
