"""Faults on demand: what can go wrong with an engine, and when it shall.

A fault is written KIND[:VALUE][@WHEN]. WHEN is `ready` (the default: as soon as the handshake is done), `requests:N`
(when the Nth ADD arrived), `steps:N` (after N steps with outputs), `seconds:S` (after READY) or `signal` (at SIGUSR1).

| kind | value (default) | effect |
|---|---|---|
| exit | exit code (1) | the process ends at once, no death frame |
| kill | | the process kills itself with SIGKILL, as the kernel's out-of-memory killer would |
| death_frame | | ENGINE_CORE_DEAD to everybody, then exit with code 0, as vLLM's fatal errors |
| wedge | | the busy loop stops for ever; sockets stay open, nothing is answered |
| wedge_input | | the input thread dies, as after an undecodable ADD: running requests end, later ones are never read |
| wedge_output | | the output thread dies, as after a client_index out of range: nothing is sent any more |
| hang_loop | seconds (1) | the busy loop stops for that long |
| drop | messages (1) | the next messages with outputs are not sent |
| garble | messages (1) | the next messages with outputs are sent as bytes that no msgpack decoder accepts |
| duplicate | messages (1) | the next messages with outputs are sent twice |
| unknown_ids | messages (1) | the next messages with outputs hold one more, for a request nobody sent |
| stats | on or off (off) | scheduler statistics, events and prefill timestamps |
| tokens_per_step | tokens (4) | tokens a request gets each step from now on |
| step_ms | milliseconds (1000) | base duration of a step from now on |
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

DEFAULTS: Mapping[str, float | None] = {
    "exit": 1,
    "kill": None,
    "death_frame": None,
    "wedge": None,
    "wedge_input": None,
    "wedge_output": None,
    "hang_loop": 1.0,
    "drop": 1,
    "garble": 1,
    "duplicate": 1,
    "unknown_ids": 1,
    "stats": 0,
    "tokens_per_step": 4,
    "step_ms": 1000.0,
}
"""Each kind and the value it has when none is given; None: the kind takes no value."""

WHEN = ("ready", "requests", "steps", "seconds", "signal")


class Fault(msgspec.Struct, frozen=True):
    """One fault to come. `value` as in the table, on is 1 and off 0; `amount` belongs to `when`."""

    kind: str
    value: float
    when: str = "ready"
    amount: float = 0


def make(kind: str, value: float | str | None = None) -> Fault:
    """A fault that is due at once; raises ValueError naming what is wrong."""
    if kind not in DEFAULTS:
        raise ValueError(f"no fault is called {kind!r}; there are: {', '.join(DEFAULTS)}")
    default = DEFAULTS[kind]
    if value is None:
        return Fault(kind, default or 0)
    if default is None:
        raise ValueError(f"the fault {kind} takes no value; {value!r} was given")
    number = {"on": 1.0, "off": 0.0}.get(value) if isinstance(value, str) else value
    try:
        number = float(value) if number is None else float(number)
    except ValueError:
        raise ValueError(f"the fault {kind} needs a number, not {value!r}") from None
    if number < 0 or (kind == "tokens_per_step" and number < 1):
        raise ValueError(f"the fault {kind} cannot have the value {value}")
    return Fault(kind, number)


def parse(text: str) -> Fault:
    """A fault from `KIND[:VALUE][@WHEN]`; raises ValueError naming what is wrong."""
    what, _, when = text.partition("@")
    kind, _, value = what.partition(":")
    fault = make(kind, value or None)
    name, _, amount = (when or "ready").partition(":")
    if name not in WHEN:
        raise ValueError(f"{when!r} is not a moment; a fault comes at: {', '.join(WHEN)}")
    if (name in ("requests", "steps", "seconds")) != bool(amount):
        raise ValueError(
            f"{text!r}: {name} {'needs a number, as in ' + name + ':3' if not amount else 'takes no number'}"
        )
    try:
        return msgspec.structs.replace(fault, when=name, amount=float(amount or 0))
    except ValueError:
        raise ValueError(f"{text!r}: {amount!r} is not a number") from None


class Schedule:
    """The faults that have not happened yet."""

    def __init__(self, faults: list[Fault]) -> None:
        self._waiting = list(faults)

    def add(self, fault: Fault) -> None:
        self._waiting.append(fault)

    def due(self, *, requests: int, steps: int, seconds: float, signals: int) -> list[Fault]:
        """Faults whose moment has come, taken out of the schedule. Counts and seconds run from READY."""
        if not self._waiting:
            return []
        reached = {"ready": 0.0, "requests": requests, "steps": steps, "seconds": seconds, "signal": signals - 1}
        due = [fault for fault in self._waiting if reached[fault.when] >= fault.amount]
        self._waiting = [fault for fault in self._waiting if fault not in due]
        return due
