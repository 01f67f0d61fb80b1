"""Launches vLLM headless: `vllm serve MODEL --headless`, whose engine cores dial `--data-parallel-address`.

Facts read in 0.32.0: the address is always tcp in headless mode; the launcher only watches its engine cores, and exits
0 whether they were stopped or died, so every exit nobody asked for is a failure.
"""

from __future__ import annotations

from collections.abc import Sequence

from bridge.supervisor.engine_args import check_model_path, flags, refuse, take_value, whole_number
from bridge.supervisor.engines import Launch, LaunchSpec
from bridge.supervisor.errors import UsageError

SIZE = ("--data-parallel-size", "-dp")
SIZE_LOCAL = ("--data-parallel-size-local", "-dpl")

_OURS = "the bridge sets it"
_GATEWAY = "headless vLLM serves nothing; the bridge listens in its place"
_MULTI_NODE = "groups over several nodes are not supported"
_BALANCING = "the bridge balances over the ranks itself"
REFUSED = {
    "--headless": _OURS,
    "--data-parallel-address": _OURS,
    "-dpa": _OURS,
    "--data-parallel-rpc-port": _OURS,
    "-dpp": _OURS,
    "--api-server-count": "headless vLLM starts no API server",
    "-asc": "headless vLLM starts no API server",
    "--host": _GATEWAY,
    "--port": _GATEWAY,
    "--uds": _GATEWAY,
    "--grpc": "the bridge serves gRPC in its place",
    "--data-parallel-rank": _BALANCING,
    "-dpn": _BALANCING,
    "--data-parallel-start-rank": "`python -m bridge.headless --zmq-engine-index N` sets it; under serve it is 0",
    "-dpr": "`python -m bridge.headless --zmq-engine-index N` sets it; under serve it is 0",
    "--data-parallel-hybrid-lb": _BALANCING,
    "-dph": _BALANCING,
    "--data-parallel-external-lb": _BALANCING,
    "-dpe": _BALANCING,
    "--data-parallel-multi-port-external-lb": _BALANCING,
    "-dpm": _BALANCING,
    "--nnodes": _MULTI_NODE,
    "-n": _MULTI_NODE,
    "--node-rank": _MULTI_NODE,
    "-r": _MULTI_NODE,
}
"""vLLM's flags that cannot be combined with running under the bridge (names and short forms of 0.32.0)."""


class VllmLauncher:
    """`python -m vllm.entrypoints.cli.main serve MODEL --headless …`."""

    name = "vllm"
    package: str | None = "vllm"
    install = "pip install 'headless-bridge[vllm]'"

    def split_model(self, args: Sequence[str]) -> tuple[str | None, list[str]]:
        """MODEL first, or `--model M`, or `--model-path M` (SMG's launcher writes that)."""
        if args and not args[0].startswith("-"):
            return args[0], list(args[1:])
        return take_value(args, "--model", "--model-path")

    def check(self, spec: LaunchSpec) -> None:
        refuse(spec.args, self.name, REFUSED)
        if spec.model is not None:
            check_model_path(spec.model, self.name)
        elif not any(name == "--config" for _, name, _ in flags(spec.args)):
            raise UsageError("vllm needs a model: put MODEL before its flags, or give --model MODEL")
        self._ranks(spec)

    def launch(self, spec: LaunchSpec, handshake: str) -> Launch:
        first, count, group = self._ranks(spec)
        if not handshake.startswith("tcp://"):
            raise UsageError(f"headless vLLM dials tcp only, not {handshake}: give tcp://HOST:PORT")
        host, _, port = handshake.removeprefix("tcp://").rpartition(":")
        model = [spec.model] if spec.model is not None else []
        argv = [spec.python, "-m", "vllm.entrypoints.cli.main", "serve", *model, "--headless", *spec.args]
        if whole_number(spec.args, *SIZE) is None:
            argv += ["--data-parallel-size", str(group)]
        if whole_number(spec.args, *SIZE_LOCAL) is None:
            argv += ["--data-parallel-size-local", str(count)]
        if first > 0:
            argv += ["--data-parallel-start-rank", str(first)]
        argv += ["--data-parallel-address", host.strip("[]"), "--data-parallel-rpc-port", port]
        return Launch(argv, first, count, {"VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1"})

    def companion(self, spec: LaunchSpec) -> list[str]:
        return self._companion(spec, "facts")

    def resident(self, spec: LaunchSpec, socket: str) -> list[str] | None:
        return self._companion(spec, "serve", socket)

    def _companion(self, spec: LaunchSpec, *mode: str) -> list[str]:
        model = [spec.model] if spec.model is not None else []
        return [spec.python, "-m", "bridge.plugins.vllm.companion", *mode, "--", *model, *spec.args]

    def vital(self, title: str) -> bool:
        """Engine cores and workers, by the process titles that vLLM sets."""
        return title.startswith(("VLLM::EngineCore", "VLLM::Worker"))

    def _ranks(self, spec: LaunchSpec) -> tuple[int, int, int]:
        """(first rank here, ranks here, ranks of the group)."""
        group = whole_number(spec.args, *SIZE)
        local = whole_number(spec.args, *SIZE_LOCAL)
        size = 1 if group is None else group
        if size < 1 or local == 0:
            raise UsageError(f"{SIZE[0] if size < 1 else SIZE_LOCAL[0]} is 0; at least one rank must run here")
        if spec.first_rank is None:
            if local is not None and local != size:
                raise UsageError(f"{SIZE_LOCAL[0]} {local} of {SIZE[0]} {size}: {_MULTI_NODE}, so every rank runs here")
            return 0, size, size
        first, count = spec.first_rank, 1 if local is None else local
        if first > 0 and group is None:
            raise UsageError(
                f"--zmq-engine-index {first} is a data-parallel start rank on vLLM: "
                f"it needs {SIZE[0]} of {first + 1} or more"
            )
        if first + count > size:
            raise UsageError(f"ranks {first} to {first + count - 1} do not fit {SIZE[0]} {size}")
        return first, count, size


LAUNCHER = VllmLauncher()
