"""Launches SGLang headless: its scheduler ranks, spawned by its own spawner, with our plugin inside each.

Facts read in 0.5.23: SGLang has no headless mode of its own; `bridge.plugins.sglang.launcher` is what it would be. Each
data-parallel rank dials with an identity of its own; tensor-parallel ranks behind it do not.
"""

from __future__ import annotations

from collections.abc import Sequence

from bridge.supervisor.engine_args import check_model_path, flags, refuse, take_value, whole_number
from bridge.supervisor.engines import Launch, LaunchSpec
from bridge.supervisor.errors import UsageError

SIZE = ("--data-parallel-size", "--dp-size", "--dp")
NODES = "--nnodes"

_OURS = "the bridge serves in its place"
_MULTI_NODE = "groups over several nodes are not supported"
REFUSED = {
    "--grpc-mode": _OURS,
    "--smg-grpc-mode": _OURS,
    "--skip-tokenizer-init": "its grammar backend and its stop strings need the scheduler's tokenizer",
    "--node-rank": _MULTI_NODE,
    "--dist-init-addr": _MULTI_NODE,
}
"""SGLang's flags that cannot be combined with running under the bridge (names of 0.5.23)."""

ENVIRONMENT = {"PYTHONUNBUFFERED": "1"}


class SglangLauncher:
    """`python -m bridge.plugins.sglang.launcher --zmq-handshake-address ADDRESS --model-path MODEL …`."""

    name = "sglang"
    package: str | None = "sglang"
    install = "pip install 'headless-bridge[sglang]'"

    def split_model(self, args: Sequence[str]) -> tuple[str | None, list[str]]:
        """`--model-path M` or `--model M`, as SGLang takes it, or MODEL first."""
        if args and not args[0].startswith("-"):
            return args[0], list(args[1:])
        return take_value(args, "--model-path", "--model")

    def check(self, spec: LaunchSpec) -> None:
        refuse(spec.args, self.name, REFUSED)
        if (whole_number(spec.args, NODES) or 1) > 1:
            raise UsageError(f"{NODES} {whole_number(spec.args, NODES)}: {_MULTI_NODE}")
        if spec.model is not None:
            check_model_path(spec.model, self.name)
        elif not any(name == "--config" for _, name, _ in flags(spec.args)):
            raise UsageError("sglang needs a model: give --model-path MODEL")
        self._size(spec)

    def launch(self, spec: LaunchSpec, handshake: str) -> Launch:
        first = spec.first_rank or 0
        argv = [spec.python, "-m", "bridge.plugins.sglang.launcher", "--zmq-handshake-address", handshake]
        argv += ["--zmq-engine-index", str(first), *self._model(spec), *spec.args]
        return Launch(argv, first, self._size(spec), ENVIRONMENT)

    def companion(self, spec: LaunchSpec) -> list[str]:
        return [spec.python, "-m", "bridge.plugins.sglang.companion", "facts", "--", *self._model(spec), *spec.args]

    def resident(self, spec: LaunchSpec, socket: str) -> list[str] | None:
        return None  # its scheduler checks constraints itself

    def vital(self, title: str) -> bool:
        """Scheduler ranks and the process that spawns data-parallel ones, by the titles SGLang sets."""
        return title.startswith(("sglang::scheduler", "sglang::data_parallel_controller"))

    def _model(self, spec: LaunchSpec) -> list[str]:
        return ["--model-path", spec.model] if spec.model is not None else []

    def _size(self, spec: LaunchSpec) -> int:
        """Data-parallel ranks; with attention data parallelism too."""
        size = whole_number(spec.args, *SIZE)
        if size == 0:
            raise UsageError(f"{SIZE[0]} is 0; at least one rank must run")
        return 1 if size is None else size


LAUNCHER = SglangLauncher()
