"""The control channel between the supervisor and a front end.

One socketpair per front end; each message is a 4-byte big-endian length and a msgpack map tagged `type`. The first
message each way carries `CONTROL_VERSION`; a supervisor one version behind may run a newer front end.
"""

from __future__ import annotations

from typing import Any

import msgspec

from bridge.supervisor.measures import Family
from bridge.wire.companion import Facts

CONTROL_VERSION = 2


class Rank(msgspec.Struct, gc=False):
    """One engine rank that answered the handshake: its ZMQ identity and the ready map it sent."""

    identity: bytes
    ready: dict[str, Any]


class Listener(msgspec.Struct, gc=False):
    """A bound, listening socket the front end inherits. `address` is what to tell people, e.g. `127.0.0.1:50051`."""

    fd: int
    kind: str
    address: str


class Start(msgspec.Struct, tag="start", kw_only=True):
    """Supervisor → front end, first message: everything it needs to serve one slot of one engine."""

    version: int = CONTROL_VERSION
    engine: str
    served_model_name: str
    slot: int
    """Index of the socket pair, `client_index` on vLLM."""
    incarnation: int
    """Never used before for this slot in this state directory; part of every wire id."""
    input_address: str
    output_address: str
    listeners: list[Listener]
    contracts: list[str]
    options: dict[str, Any] = {}
    """Front-end flags by name (max message size, limits, drain seconds …)."""
    companion: str = ""
    """Path of the companion's socket; empty where none stays beside the engine."""
    latch: str = ""
    """Path of the file that names what enforces constraints in this engine, once something does."""
    ledger: int = -1
    """Inherited descriptor of the ledger of live wire ids; -1 where there is none."""
    listen_at_once: bool = True
    """Answer on the listeners while the engine is not up yet. An engine that is up is reached first: until then
    connections wait in the listeners' queue, or go to the front end that is being replaced."""


class Loading(msgspec.Struct, tag="loading", kw_only=True):
    """Supervisor → front end while the engine starts: shown in HealthCheck."""

    phase: str
    elapsed_s: float


class EngineUp(msgspec.Struct, tag="engine_up", kw_only=True):
    """Supervisor → front end: every rank is ready and the facts are known."""

    ranks: list[Rank]
    facts: Facts


class EngineDown(msgspec.Struct, tag="engine_down", kw_only=True):
    """Supervisor → front end: the engine is gone. `reason` is one line for people. `Loading` follows if another starts."""

    reason: str


class RankLoad(msgspec.Struct, tag="rank_load", kw_only=True):
    """Supervisor → front end: load figures that reached slot 0."""

    rank: int
    running: int
    waiting: int
    kv_cache_usage: float


class Drain(msgspec.Struct, tag="drain", kw_only=True):
    """Supervisor → front end: refuse new work, let streams finish for at most `grace_s`, then exit.

    With `handover` another front end serves the same listeners already: connections are sent there, health stays as it
    is, and calls that race the notice are still served.
    """

    grace_s: float
    handover: bool = False


class Siblings(msgspec.Struct, tag="siblings", kw_only=True):
    """Supervisor → front end: how many other front ends the engine has now."""

    others: int


class AbortRequests(msgspec.Struct, tag="abort_requests", kw_only=True):
    """Both ways: requests, by the ids of their clients, that the sender does not have. A front end that has one ends it."""

    request_ids: list[str]


class Started(msgspec.Struct, tag="started", kw_only=True):
    """Front end → supervisor, first message: the slot is bound and the listeners answer."""

    version: int = CONTROL_VERSION
    pid: int


class Serving(msgspec.Struct, tag="serving", kw_only=True):
    """Front end → supervisor: generation requests are accepted."""


class Drained(msgspec.Struct, tag="drained", kw_only=True):
    """Front end → supervisor: every stream has its terminal; the process exits now."""

    aborted: int


class Fatal(msgspec.Struct, tag="fatal", kw_only=True):
    """Front end → supervisor: it cannot serve, and why, in one line."""

    reason: str


class EngineLost(msgspec.Struct, tag="engine_lost", kw_only=True):
    """Front end → supervisor: its slot shows that the engine is gone or cannot be understood. `reason` is one line."""

    reason: str


class RankWork(msgspec.Struct, gc=False):
    """What one front end has in one rank: generations in flight, and prompt tokens of those without output yet."""

    rank: int
    in_flight: int
    prompt_tokens: int


class Work(msgspec.Struct, tag="work", kw_only=True):
    """Front end → supervisor, every second: it lives, and what it waits for."""

    ranks: list[RankWork]


class Measure(msgspec.Struct, tag="measure"):
    """Supervisor → front end: somebody reads the figures; answered by `Measured`."""


class Measured(msgspec.Struct, tag="measured", kw_only=True):
    """Front end → supervisor, when asked, every ten seconds and before `Drained`: what it has counted since its start."""

    families: list[Family]


class CompanionSilent(msgspec.Struct, tag="companion_silent", kw_only=True):
    """Front end → supervisor: the companion took a check and does not answer, or is of `other_version`, because the front
    end was replaced by newer code. It is ended, and another started."""

    waited_s: float = 0.0
    other_version: str = ""


ToFrontEnd = Start | Loading | EngineUp | EngineDown | RankLoad | Drain | Siblings | AbortRequests | Measure
ToSupervisor = Started | Serving | Drained | Fatal | EngineLost | Work | AbortRequests | Measured | CompanionSilent
