"""The project's modules as syntax trees, under the names they are imported by."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDERS = {
    "bridge": "bridge",
    "wire": "bridge.wire",
    "plugins": "bridge.plugins",
    "supervisor": "bridge.supervisor",
}
"""Top-level folder → the package its modules are imported as; `bridge` holds links to the other three."""


@dataclass(frozen=True)
class Module:
    """One source file."""

    name: str
    path: Path

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text(encoding="utf-8"), str(self.path))

    @property
    def layer(self) -> str:
        """The top-level folder it lives in."""
        return self.path.relative_to(ROOT).parts[0]

    def imports(self) -> Iterator[tuple[int, str]]:
        """(line, dotted name) of everything it imports, inside functions too; `from a import b` gives `a.b`."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield node.lineno, alias.name
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{self.name}:{node.lineno}: relative import; write the full name"
                for alias in node.names:
                    yield node.lineno, f"{node.module}.{alias.name}"


def modules() -> list[Module]:
    """Every module of the package, each once, generated code aside."""
    found: list[Module] = []
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):  # does not follow the links
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            if "generated" in parts:
                continue
            found.append(Module(".".join((package, *(part for part in parts if part != "__init__"))), path))
    return found
