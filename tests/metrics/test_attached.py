"""A front end under load, as Prometheus, kubelet and its own log show it: `attach`, the simulated engine, real sockets."""

from __future__ import annotations

import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from tests.metrics.test_measures import read
from tests.running import Running, Worker, unused_port

GENERATE = {"service": "vllm.grpc.engine.VllmEngine", "method": "Generate"}


class Attached(Worker):
    """`attach` with a metrics listener, and the engine that dials it."""

    def __init__(self, model: Path, folder: Path) -> None:
        port, handshake, self.metrics = unused_port(), f"tcp://127.0.0.1:{unused_port()}", unused_port()
        command = [sys.executable, "-m", "bridge", "attach", "sim", model, "--listen-handshake", handshake]
        more = ["--port", port, "--metrics-port", self.metrics, "--log-level", "debug", "--log-format", "json"]
        super().__init__([*command, *more], port, folder / "attach.log")
        dial = [sys.executable, "-m", "bridge.plugins.sim", "--zmq-handshake-address", handshake]
        self.engine = Running([*dial, "--model-path", model], folder / "engine.log")

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics}{path}", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def series(self) -> Callable[..., float]:
        """One scrape, to be asked for its series; one that is not there is 0."""
        found = read(self.get("/metrics")[1])

        def value(name: str, **labels: str) -> float:
            return found.get(("headless_bridge_" + name, tuple(sorted(labels.items()))), 0.0)

        return value

    def ask(self, tokens: int, **more: object) -> list[pb.GenerateResponse]:
        params = pb.SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        ids = pb.TokenizedInput(input_ids=[5, 6, 7])
        given = {"request_id": "one", "tokenized": ids, "sampling_params": params, "stream": True, **more}
        return list(self.stub.Generate(pb.GenerateRequest(**given), timeout=60))

    def records(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.output().splitlines()]


@pytest.fixture(scope="module")
def attached(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attached]:
    with Attached(tiny_llama, tmp_path_factory.mktemp("attached")) as worker, worker.engine:
        worker.wait_until_serving(30)
        yield worker


def test_probes(attached: Attached) -> None:
    assert attached.get("/livez") == (200, "alive: serving\n")
    assert attached.get("/readyz") == (200, "ready\n")


def test_every_request_and_token_is_counted_once(attached: Attached) -> None:
    before = attached.series()
    for _ in range(3):
        attached.ask(20)
    after = attached.series()

    def grown(name: str, **labels: str) -> float:
        return after(name, **labels) - before(name, **labels)

    assert grown("requests_total", **GENERATE, finish="length") == 3
    assert grown("prompt_tokens_total") == 9 and grown("output_tokens_total") == 60
    assert grown("calls_total", **GENERATE, code="OK") == 3
    assert grown("steps_total") == 60
    assert 3 <= grown("render_seconds_count") <= 60, "steps that waited together are rendered as one"
    for name in ("time_to_first_token_seconds", "inter_token_seconds", "request_seconds"):
        assert grown(name + "_count", **GENERATE) == 3
    first, inter, whole = (
        grown(name + "_seconds_sum", **GENERATE) / 3 for name in ("time_to_first_token", "inter_token", "request")
    )
    assert 0 < first < whole < 10 and abs(first + 19 * inter - whole) < 0.05
    assert after("requests_in_flight") == 0 and after("engine_silence_seconds") == 0


def test_what_is_in_flight_shows_while_it_runs(attached: Attached) -> None:
    request = pb.GenerateRequest(
        tokenized=pb.TokenizedInput(input_ids=[5, 6, 7]),
        sampling_params=pb.SamplingParams(max_tokens=1500, temperature=0, ignore_eos=True),
        stream=True,
    )
    stream = attached.stub.Generate(request, timeout=60)
    next(stream)
    now = attached.series()
    assert now("requests_in_flight") == 1 and now("grpc_calls") >= 1 and now("engine_running", rank="0") == 1
    cancelled = now("requests_total", **GENERATE, finish="cancelled")
    stream.cancel()
    until = time.monotonic() + 5
    while attached.series()("requests_total", **GENERATE, finish="cancelled") == cancelled:
        assert time.monotonic() < until
        time.sleep(0.02)
    assert attached.series()("calls_total", **GENERATE, code="CANCELLED") >= 1


def test_a_refusal_is_counted_by_its_status_and_told_once_with_its_request(attached: Attached) -> None:
    before = attached.series()("refusals_total", **GENERATE, code="INVALID_ARGUMENT")
    with pytest.raises(grpc.RpcError):
        attached.ask(5, request_id="refused", tokenized=pb.TokenizedInput(input_ids=[999_999]))
    assert attached.series()("refusals_total", **GENERATE, code="INVALID_ARGUMENT") == before + 1
    told = [one for one in attached.records() if one.get("request_id") == "refused"]
    assert len(told) == 1
    assert told[0]["level"] == "debug" and told[0]["code"] == "INVALID_ARGUMENT"
    assert told[0]["method"] == "/vllm.grpc.engine.VllmEngine/Generate"
    assert str(told[0]["peer"]).startswith("ipv4:127.0.0.1:") and "input_ids[0] is 999999" in str(told[0]["message"])


def test_the_log_joins_the_clients_id_with_the_engines(attached: Attached) -> None:
    attached.ask(3, request_id="traced")
    sent, ended = (one for one in attached.records() if one.get("request_id") == "traced")
    wire_id = str(sent["message"]).rpartition(" ")[2]
    assert f"{wire_id} ended with length, 3 tokens" in str(ended["message"]) and ended["finish"] == "length"
