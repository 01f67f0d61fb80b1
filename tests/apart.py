"""Suites that take minutes or need more installed have a command of their own; a run of all tests leaves them out."""

from __future__ import annotations

from pathlib import Path

import pytest


def is_left_out(folder: Path, config: pytest.Config) -> bool | None:
    """What a conftest's `pytest_ignore_collect` answers: True unless a path of the command line is inside `folder`."""
    asked = [(config.invocation_params.dir / argument.partition("::")[0]).resolve() for argument in config.args]
    return None if any(path.is_relative_to(folder) for path in asked) else True
