"""Launches the simulated engine: one process, part of the bridge, on vLLM's wire."""

from __future__ import annotations

from collections.abc import Sequence

from bridge.supervisor.engine_args import check_model_path, refuse, take_value
from bridge.supervisor.engines import Launch, LaunchSpec

REFUSED = {"--zmq-handshake-address": "the bridge sets it", "--zmq-engine-index": "the bridge sets it"}


class SimLauncher:
    """`python -m bridge.plugins.sim --zmq-handshake-address ADDRESS …`."""

    name = "sim"
    package: str | None = None
    install = "it is part of the bridge"

    def split_model(self, args: Sequence[str]) -> tuple[str | None, list[str]]:
        if args and not args[0].startswith("-"):
            return args[0], list(args[1:])
        return take_value(args, "--model", "--model-path")

    def check(self, spec: LaunchSpec) -> None:
        refuse(spec.args, self.name, REFUSED)
        if spec.model is not None:
            check_model_path(spec.model, self.name, hub=False)

    def launch(self, spec: LaunchSpec, handshake: str) -> Launch:
        first = spec.first_rank or 0
        argv = [spec.python, "-m", "bridge.plugins.sim", "--zmq-handshake-address", handshake]
        argv += ["--zmq-engine-index", str(first), *self._model(spec), *spec.args]
        return Launch(argv, first, 1, {"PYTHONUNBUFFERED": "1"})

    def companion(self, spec: LaunchSpec) -> list[str]:
        return [spec.python, "-m", "bridge.plugins.sim.companion", "facts", "--", *self._model(spec), *spec.args]

    def resident(self, spec: LaunchSpec, socket: str) -> list[str] | None:
        return None  # it enforces no constraints

    def vital(self, title: str) -> bool:
        return False  # the leader is the whole engine

    def _model(self, spec: LaunchSpec) -> list[str]:
        return ["--model", spec.model] if spec.model is not None else []


LAUNCHER = SimLauncher()
