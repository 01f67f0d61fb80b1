"""Every contract at once in front of the simulated engine, with a real tokenizer and with several tokens a step."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from bridge.plugins.sim.model import facts_of, vocabulary_of
from bridge.plugins.sim.options import parse
from bridge.plugins.sim.tokens import Vocabulary, expected_tokens
from tests.contracts.asking import Stub
from tests.running import Running, Worker, unused_port

ALL = ("vllm.grpc.engine", "vllm.Inference", "vllm.engine.v1")


class Served(Worker):
    """A worker with a stub a contract, and what its engine says to a prompt."""

    def __init__(
        self,
        model: Path,
        log: Path,
        *flags: str,
        contracts: Sequence[str] = ALL,
        command: Sequence[str | Path] | None = None,
    ) -> None:
        """Serves the simulated engine with `flags`, or runs another `command` of the bridge."""
        port = unused_port()
        given = command or ("serve", "sim", "--model-path", model, "--max-model-len", "1024", *flags)
        named = [word for name in contracts for word in ("--contract", name)]
        line = [sys.executable, "-m", "bridge", *given, "--port", str(port), "--served-model-name", "smol", *named]
        super().__init__(line, port, log)
        self.inference = Stub(self.channel, "vllm.Inference")
        self.control = Stub(self.channel, "vllm.Control")
        self.engine_v1 = Stub(self.channel, "vllm.engine.v1.VllmEngine")
        self.vocabulary: Vocabulary = vocabulary_of(facts_of(parse(["--model-path", str(model)])))

    def tokens(self, prompt: list[int], count: int, seed: int | None = None) -> list[int]:
        """What the engine answers."""
        return expected_tokens(prompt, count, seed=seed, vocab=self.vocabulary)


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="session")
def served(smollm2: Path, logs: Path) -> Iterator[Served]:
    """Steps of 2 ms, one token each."""
    with Served(smollm2, logs / "served.log", "--step-ms", "2") as worker:
        worker.wait_until_serving(30)
        yield worker


@pytest.fixture(scope="session")
def three_a_step(smollm2: Path, logs: Path) -> Iterator[Served]:
    """Steps of 20 ms, three tokens each."""
    with Served(smollm2, logs / "three.log", "--step-ms", "20", "--tokens-per-step", "3") as worker:
        worker.wait_until_serving(30)
        yield worker


@pytest.fixture(scope="session")
def ending(smollm2: Path, logs: Path) -> Iterator[Served]:
    """The fifth token of every answer is EOS."""
    with Served(smollm2, logs / "ending.log", "--step-ms", "2", "--eos-after", "4") as worker:
        worker.wait_until_serving(30)
        yield worker


@pytest.fixture(scope="session")
def two_ranks(smollm2: Path, logs: Path) -> Iterator[Served]:
    """Two data-parallel ranks, attached."""
    handshake = f"tcp://127.0.0.1:{unused_port()}"
    engine = [sys.executable, "-m", "bridge.plugins.sim", "--zmq-handshake-address", handshake]
    engine += ["--model-path", smollm2, "--step-ms", "2", "--zmq-engine-index"]
    command = ("attach", "sim", smollm2, "--listen-handshake", handshake, "--data-parallel-size", "2")
    with (
        Served(smollm2, logs / "ranks.log", command=command) as worker,
        Running([*engine, "0"], logs / "rank0.log"),
        Running([*engine, "1"], logs / "rank1.log"),
    ):
        worker.wait_until_serving(30)
        yield worker


@pytest.fixture(scope="session")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
