"""What `serve` runs."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bridge.supervisor.liveness import LivenessLimits
from bridge.supervisor.policy import RestartPolicy


class WarmUpLevel(enum.Enum):
    """What an engine does before it serves."""

    OFF = "off"
    FAST = "fast"
    """One token from every rank; embedding models do nothing."""


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """One engine and what serves it. `arguments` are the engine's own, its model included.

    Times are in seconds; a start-up limit of 0 is no limit. `uds` replaces host and port. `options` are front-end flags
    by key.
    """

    engine: str
    arguments: Sequence[str] = ()
    engine_python: str = ""
    """The interpreter the engine is installed in; empty for this one."""
    host: str = "127.0.0.1"
    port: int = 50051
    uds: Path | None = None
    admin_bind: str = ""
    """Where the methods for administrators are served, HOST:PORT or unix:PATH; empty: beside all others."""
    served_model_name: str = ""
    """Empty: the model argument as it was given, or the engine's name where there is none."""
    contracts: Sequence[str] = ()
    state_dir: Path | None = None
    """None: a new private folder, removed at the end."""
    socket_dir: Path | None = None
    """Where that new folder is made; None for a folder of the system's choice."""
    handshake_port: int = 0
    startup_timeout_s: float = 1800.0
    startup_ceiling_s: float = 14400.0
    drain_s: float = 5.0
    stop_s: float = 25.0
    """The whole of a stop, the drain included; less than what a supervisor above allows (Kubernetes: 30)."""
    upgrade_drain_s: float = 600.0
    """How long streams of a front end that was replaced may go on."""
    warm_up: WarmUpLevel = WarmUpLevel.FAST
    restart: RestartPolicy = field(default_factory=RestartPolicy)
    liveness: LivenessLimits = field(default_factory=LivenessLimits)
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None
    """None: no metrics listener."""
    options: dict[str, Any] = field(default_factory=dict)
