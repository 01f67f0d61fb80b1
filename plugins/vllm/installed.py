"""Names of the vLLM that is installed here. Read against 0.27 to 0.33: a name that a release lacks is named in the error."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any


class CompanionError(Exception):
    """What the companion cannot do, in one line."""


def module(name: str) -> Any:
    """Raises `CompanionError` when it cannot be imported."""
    try:
        return import_module(name)
    except ImportError as error:
        raise CompanionError(f"{sys.executable} cannot import {name}: {error}") from None


def named(home: str, name: str) -> Any:
    """`name` of the module `home`; raises `CompanionError`."""
    return first_named((home,), name)


def first_named(homes: Sequence[str], name: str) -> Any:
    """`name` of the first of these modules that has it; raises `CompanionError`."""
    missing: list[str] = []
    for home in homes:
        try:
            return getattr(import_module(home), name)
        except (ImportError, AttributeError) as error:
            missing.append(f"{home}.{name} ({error})")
    raise CompanionError(
        f"vLLM {module('vllm').__version__} lacks {' and '.join(missing)}; known to work: 0.27 to 0.33"
    )


def one_line(error: BaseException) -> str:
    """The first telling line of an exception; pydantic puts its own count of errors before it."""
    text = str(error).strip() or type(error).__name__
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if len(lines) > 1 and re.match(r"\d+ validation errors? for ", lines[0]):
        lines = lines[1:]
    return re.sub(r" \[type=.*$", "", lines[0].removeprefix("Value error, "))
