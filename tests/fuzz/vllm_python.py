"""What a judged run has running in vLLM's Python: the judge, and the real companion."""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from bridge.companion import CompanionGrammar, Latch
from bridge.wire.companion import Facts
from tests.fuzz.vllm_judge import Question, Verdict, framed

ROOT = Path(__file__).resolve().parents[2]
QUIET = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}


class Ended(Exception):
    """A process ended before it answered; the text is its log."""


class Python:
    """A module run in vLLM's Python, its log in a file."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        assert process.stdin and process.stdout
        self.process = process
        self.to = process.stdin
        self.out = process.stdout
        self._log = log

    @classmethod
    async def start(cls, python: Path, module: str, arguments: Sequence[str], log: Path) -> Python:
        pipe = asyncio.subprocess.PIPE
        command = [str(python), "-m", module, *arguments]
        with log.open("wb") as errors:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=pipe, stdout=pipe, stderr=errors, env={**os.environ, **QUIET}, cwd=ROOT, limit=1 << 24
            )
        return cls(process, log)

    def ended(self) -> Ended:
        return Ended(self._log.read_text(errors="replace")[-3000:])

    async def stop(self) -> None:
        if self.process.returncode is None:
            self.process.terminate()
        await self.process.wait()


class Judge:
    """`vllm_judge.py`, asked in batches."""

    def __init__(self, python: Python) -> None:
        self._python = python
        self._decode = msgspec.msgpack.Decoder(list[Verdict]).decode

    async def ask(self, questions: list[Question]) -> list[Verdict]:
        self._python.to.write(framed(questions))
        await self._python.to.drain()
        try:
            size: int = struct.unpack(">I", await self._python.out.readexactly(4))[0]
            return self._decode(await self._python.out.readexactly(size))
        except asyncio.IncompleteReadError:
            raise self._python.ended() from None


class Companion:
    """The companion of the engine that would serve the model: its facts, and the front end's side of it."""

    def __init__(self, facts: Facts, address: Path) -> None:
        self.facts = facts
        self.silences: list[float] = []
        self.grammar = CompanionGrammar(str(address), Latch(), self.silences.append)


@asynccontextmanager
async def vllm(python: Path, model: Path, flags: Sequence[str], folder: Path) -> AsyncIterator[tuple[Judge, Companion]]:
    """Both, for a model and flags of `vllm serve`; stopped on the way out. `folder` is short and private."""
    address = folder / "companion"
    serve = ["serve", str(address), "--", str(model), *flags]
    started = [
        await Python.start(python, "tests.fuzz.vllm_judge", [str(model), *flags], folder / "judge.log"),
        await Python.start(python, "bridge.plugins.vllm.companion", serve, folder / "companion.log"),
    ]
    try:
        judging, accompanying = started
        line = await accompanying.out.readline()
        if not line:
            raise accompanying.ended()
        companion = Companion(msgspec.json.decode(line, type=Facts), address)
        yield Judge(judging), companion
        companion.grammar.close()
    finally:
        for one in started:
            await one.stop()
