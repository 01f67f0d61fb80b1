"""What our lane costs SGLang's scheduler, beside its own egress: `python -m tests.bench.sglang_egress MODEL`.

Run in SGLang's Python. A step here is everything a decode step of the real scheduler does to tell its outputs and to look
for requests, and nothing else: the real `SchedulerOutputStreamer` over real `Req` objects that gained one token each, then
the real `_pull_raw_reqs`. The two ways take turns; whoever reads them is another process, which only receives.

    own    the detokenizer's socket and the tokenizer manager's and RPC sockets, as SGLang wires them
    lane   our lane with three slots offered, one in use
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import zmq

from bridge.plugins.sglang.dial import Sockets, unbounded
from bridge.plugins.sglang.guarded import Limits
from bridge.plugins.sglang.lane import Lane, Route, scheduler_id

ROUNDS = 5
STEPS = 200
BATCHES = (64, 256)
SLOTS = 3
PROMPT = 32
WAYS = ("own", "lane")


def read(addresses: Sequence[str]) -> None:
    """The other end: takes whatever comes and drops it."""
    context = zmq.Context()
    poller = zmq.Poller()
    for address in addresses:
        socket = context.socket(zmq.PULL)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.bind(address)
        poller.register(socket, zmq.POLLIN)
    while True:
        for socket, _ in poller.poll():
            socket.recv()


def publish_context(model: str) -> Any:
    """SGLang's configuration of one rank on the CPU, as a scheduler process publishes it."""
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import prepare_server_args

    flags = ["--device", "cpu", "--attention-backend", "torch_native", "--disable-cuda-graph", "--dtype", "float32"]
    args = prepare_server_args(["--model-path", model, *flags, "--disable-overlap-schedule"])
    args.resolve_once()
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
    return args


def streamer(args: Any, sender: Any) -> Any:
    from sglang.srt.disaggregation.utils import DisaggregationMode
    from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    return SchedulerOutputStreamer(
        send_to_detokenizer=sender,
        tree_cache=SimpleNamespace(),
        server_args=args,
        is_generation=True,
        spec_algorithm=SpeculativeAlgorithm.from_string(None),
        disaggregation_mode=DisaggregationMode.NULL,
        enable_hicache_storage=lambda: False,
    )


def requests(batch: int, rid: Callable[[int], str], tokenizer: Any) -> list[Any]:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    made = []
    for index in range(batch):
        params = SamplingParams(max_new_tokens=1 << 20, ignore_eos=True)
        params.normalize(tokenizer)
        one = Req(rid(index), "", array("q", range(3, 3 + PROMPT)), params, stream=True, vocab_size=259)
        one.tokenizer = tokenizer
        made.append(one)
    return made


class Own:
    """SGLang's own sender and sockets."""

    def __init__(self, args: Any, folder: str, context: Any) -> None:
        from sglang.srt.managers.scheduler_components.output_sender import SenderWrapper
        from sglang.srt.utils.network import get_zmq_socket

        self.streamer = streamer(args, SenderWrapper(get_zmq_socket(context, zmq.PUSH, f"ipc://{folder}/own", False)))
        inputs = [get_zmq_socket(context, zmq.PULL, f"ipc://{folder}/own-in{index}", True) for index in range(2)]
        self.receiver = SimpleNamespace(
            recv_from_tokenizer=inputs[0],
            recv_from_rpc=inputs[1],
            max_recv_per_poll=-1,
            recv_limit_reached=lambda count: False,
        )

    def rid(self, index: int) -> str:
        return f"{index:032x}"

    def pull(self) -> Any:
        from sglang.srt.managers.scheduler_components.request_receiver import SchedulerRequestReceiver

        return SchedulerRequestReceiver._pull_raw_reqs(self.receiver)

    def begin(self, batch: int) -> None:
        pass


class Ours:
    """The lane, opened on sockets without a handshake."""

    def __init__(self, args: Any, folder: str, context: Any) -> None:
        self.lane = Lane()
        self.streamer = streamer(args, self.lane)
        routers, inputs, outputs = [], [], []
        for slot in range(SLOTS):
            router = context.socket(zmq.ROUTER)
            router.bind(f"ipc://{folder}/in{slot}")
            routers.append(router)
            inputs.append(unbounded(context.socket(zmq.DEALER)))
            inputs[-1].connect(f"ipc://{folder}/in{slot}")
            outputs.append(unbounded(context.socket(zmq.PUSH)))
            outputs[-1].connect(f"ipc://{folder}/out{slot}")
        self._routers = routers
        load = SimpleNamespace(num_running_reqs=1, num_waiting_reqs=0, num_used_tokens=1, max_total_num_tokens=2)
        limits = Limits(259, True, False, "", None, None, None, 64)
        self.lane.open(
            Sockets(inputs, outputs, ()),
            engine_index=0,
            limits=limits,
            tokenizer=None,
            load=lambda: load,
            trace=lambda request, headers: None,
        )

    def rid(self, index: int) -> str:
        return scheduler_id(f"1.1.{index}")

    def pull(self) -> Any:
        return self.lane.pull(-1)

    def begin(self, batch: int) -> None:
        self.lane._routes = {self.rid(index): Route(f"1.1.{index}", 1, None) for index in range(batch)}


def step_us(way: Any, batch: int, tokenizer: Any) -> float:
    """Median microseconds of a step."""
    running = requests(batch, way.rid, tokenizer)
    way.begin(batch)
    times = []
    for step in range(STEPS):
        for one in running:
            one.output_ids.append(3 + step % 200)
        started = time.perf_counter()
        way.streamer.stream_output(running, False)
        way.pull()
        times.append(time.perf_counter() - started)
    return statistics.median(times[STEPS // 10 :]) * 1e6


def measure(model: str, rounds: int) -> dict[str, Any]:
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    args = publish_context(model)
    tokenizer = get_tokenizer(model)
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        addresses = [f"ipc://{folder}/own", *(f"ipc://{folder}/out{slot}" for slot in range(SLOTS))]
        reader = multiprocessing.get_context("spawn").Process(target=read, args=(addresses,), daemon=True)
        reader.start()
        context = zmq.Context(2)
        ways = {"own": Own(args, folder, context), "lane": Ours(args, folder, context)}
        try:
            for batch in BATCHES:
                found: dict[str, list[float]] = {name: [] for name in WAYS}
                for number in range(rounds):
                    for name in WAYS if number % 2 else WAYS[::-1]:
                        found[name].append(step_us(ways[name], batch, tokenizer))
                ratios = [ours / own for ours, own in zip(found["lane"], found["own"], strict=True)]
                medians = {f"{name}_us": round(statistics.median(times), 1) for name, times in found.items()}
                result[str(batch)] = {**medians, "ratio": round(statistics.median(ratios), 3)}
        finally:
            context.destroy(linger=0)
            reader.kill()
            reader.join()
    return result


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.sglang_egress", description=__doc__)
    parser.add_argument("model", help="a model folder; only its configuration and tokenizer are read")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args()
    answer = os.dup(1)
    os.dup2(2, 1)  # SGLang logs to standard output
    result = measure(given.model, given.rounds)
    with os.fdopen(answer, "w") as out:
        out.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
