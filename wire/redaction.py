"""Takes secrets out of launch arguments before anybody reports them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

REDACTED = "[redacted]"

SECRET_NAME = re.compile(
    r"(?:^|[_.\-])(?:(?:api|access|private|secret)[_\-]?keys?|secrets?|passw(?:or)?ds?|passphrase|"
    r"credentials?|authorization|auth|token|bearer)$",
    re.IGNORECASE,
)
"""Names whose value is a secret. `token` counts at the end of a name only: token counts and thresholds are no secrets."""

ASSIGNMENT = re.compile(r"^(?P<name>-{0,2}[A-Za-z_][\w.\-]*)=(?P<value>.+)$", re.DOTALL)
USER_INFO = re.compile(r"(?P<scheme>[a-z][a-z0-9+.\-]*://)[^/@\s]+@", re.IGNORECASE)
BEARER = re.compile(r"(?P<word>\b(?:bearer|basic)\s+)\S+", re.IGNORECASE)


def redacted(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """`arguments` as plain JSON values, with secrets replaced: by name, in nested maps and `NAME=value` strings too, and
    user names and passwords inside URLs."""
    return {str(name): _value(str(name), value) for name, value in arguments.items()}


def redacted_command(arguments: Sequence[str]) -> list[str]:
    """A command line with secrets replaced: those of `redacted`, every value after a flag whose name is a secret's (some
    flags take several), and inside values that are JSON objects."""
    shown: list[str] = []
    secret = False
    for argument in arguments:
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            secret = is_secret(name.lstrip("-"))
            shown.append(name + equals + (REDACTED if secret and value else _json(value)))
            secret = secret and not equals
        else:
            shown.append(REDACTED if secret else _json(argument))
    return shown


def is_secret(name: str) -> bool:
    """Whether an argument or variable of this name holds a secret."""
    return SECRET_NAME.search(name) is not None


def _value(name: str, value: Any) -> Any:
    if is_secret(name) and value not in (None, "", False, True):
        return REDACTED
    if isinstance(value, Mapping):
        return redacted(value)
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_value("", item) for item in value]
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return _text(str(value))


def _json(text: str) -> str:
    """`text`, and where it is a JSON object, the same object with its secrets replaced."""
    if text.startswith("{"):
        try:
            found = json.loads(text)
        except ValueError:
            return _text(text)
        return json.dumps(redacted(found))
    return _text(text)


def _text(text: str) -> str:
    assignment = ASSIGNMENT.match(text)
    if assignment and is_secret(assignment["name"].lstrip("-")):
        return f"{assignment['name']}={REDACTED}"
    return BEARER.sub(rf"\g<word>{REDACTED}", USER_INFO.sub(rf"\g<scheme>{REDACTED}@", text))
