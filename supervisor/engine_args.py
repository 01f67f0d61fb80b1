"""Reading an engine's own arguments without its parser: flags by name, in the forms argparse takes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence

from bridge.supervisor.errors import UsageError


def flags(args: Sequence[str]) -> Iterator[tuple[int, str, str | None]]:
    """(position, flag, value after `=` or None) of each flag. `--data_parallel_size` reads `--data-parallel-size`."""
    for position, argument in enumerate(args):
        if argument.startswith("-") and argument != "-":
            name, equals, value = argument.partition("=")
            yield position, name.replace("_", "-") if name.startswith("--") else name, value if equals else None


def value_of(args: Sequence[str], *names: str) -> str | None:
    """The value of the last flag among `names`, None when none is given; raises `UsageError` when it has no value."""
    found: str | None = None
    for position, name, value in flags(args):
        if name in names:
            if value is None and position + 1 >= len(args):
                raise UsageError(f"{name} needs a value")
            found = value if value is not None else args[position + 1]
    return found


def whole_number(args: Sequence[str], *names: str) -> int | None:
    """As `value_of`, for a number of 0 or more."""
    text = value_of(args, *names)
    if text is None:
        return None
    try:
        number = int(text)
    except ValueError:
        number = -1
    if number < 0:
        raise UsageError(f"{names[0]} is {text!r}; a whole number of 0 or more is needed")
    return number


def refuse(args: Sequence[str], engine: str, reasons: Mapping[str, str]) -> None:
    """Raise `UsageError` for the first flag in `reasons` (flag → why it cannot be given)."""
    for _, name, _ in flags(args):
        if name in reasons:
            raise UsageError(f"{name} cannot be given to {engine} here: {reasons[name]}")


def take_value(args: Sequence[str], *names: str) -> tuple[str | None, list[str]]:
    """The value of the last flag among `names`, and the arguments without these flags."""
    found = value_of(args, *names)
    rest = list(args)
    for position, name, value in reversed(list(flags(args))):
        if name in names:
            del rest[position : position + (1 if value is not None else 2)]
    return found, rest


def check_model_path(model: str, engine: str, *, hub: bool = True) -> None:
    """Raise `UsageError` when `model` can only be a local path and is not there. With `hub`, `org/name` may be an id."""
    local = not hub or model.startswith(("/", "./", "../", "~")) or model in (".", "..") or model.count("/") > 1
    if local and not os.path.exists(os.path.expanduser(model)):
        wanted = "an existing folder or a hub id" if hub else "an existing folder"
        raise UsageError(f"the model path {model} does not exist: give {engine} {wanted}")
