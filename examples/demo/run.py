"""The whole way once: a real vLLM engine run headless, asked over gRPC, then through the SMG gateway.

`make demo` makes the environments and the model and runs this; by hand: `python3 examples/demo/run.py`. Standard library
only. Everything listens on 127.0.0.1, logs go to .run/demo/, and nothing is left running.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
BRIDGE = ROOT / ".envs/vllm/bin/headless-bridge"
SMG = ROOT / ".envs/smg/bin/smg"
MODEL = ROOT / ".models/SmolLM2-135M-Instruct"
LOGS = ROOT / ".run/demo"

QUESTION = "What is the capital of France?"
EXPECTED = "Paris"
NAME = "SmolLM2-135M-Instruct"
ENGINE_FLAGS = (
    *("--dtype", "bfloat16", "--max-model-len", "1024", "--max-num-seqs", "8"),
    *("--enforce-eager", "--kv-cache-memory-bytes", str(256 << 20)),
)
START_LIMIT_S = 600.0
ANSWER_LIMIT_S = 60.0
PROGRESS_S = 14.0
"""The same kind of progress line is printed once in so many seconds."""

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "NO_PROXY": "127.0.0.1",
    "no_proxy": "127.0.0.1",
}
LOCAL = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class DemoError(Exception):
    """What went wrong, in one line, with the log that tells more."""


class Program:
    """A running command whose output goes to a log. What its own lines say (`said`) is printed, repeats left out."""

    def __init__(self, name: str, command: list[str], foreign: str = "") -> None:
        """Lines that start with `foreign` are somebody else's and stay in the log; an empty one means all."""
        self.log = LOGS / f"{name}.log"
        self._name = name
        self._foreign = foreign
        print("$ " + " ".join(part.replace(f"{ROOT}/", "") for part in command), flush=True)
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=ROOT
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        shown_at: dict[str, float] = {}
        with self.log.open("wb") as log:
            for line in self.process.stdout:
                log.write(line)
                log.flush()
                text = line.decode(errors="replace").rstrip()
                if text.startswith(self._foreign):
                    continue
                said = text.partition(": ")[2].partition("; last log")[0]
                kind = said.partition(":")[0]
                if time.monotonic() - shown_at.get(kind, -PROGRESS_S) >= PROGRESS_S:
                    shown_at[kind] = time.monotonic()
                    print(f"  {said}", flush=True)

    def said(self, text: str) -> bool:
        return self.log.exists() and text in self.log.read_text(errors="replace")

    def must_run(self) -> None:
        code = self.process.poll()
        if code is not None:
            self._reader.join(5)
            tail = "".join(f"\n  | {line}" for line in self.log.read_text(errors="replace").splitlines()[-15:])
            raise DemoError(f"{self._name} ended with exit code {code}; {self.log.relative_to(ROOT)} ends with{tail}")

    def __enter__(self) -> Program:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join(5)


def main() -> int:
    missing = [path.relative_to(ROOT) for path in (BRIDGE, SMG, MODEL) if not path.exists()]
    if missing:
        print(f"error: {', '.join(map(str, missing))} is missing; `make demo` makes it", file=sys.stderr)
        return 1
    os.environ.update(OFFLINE)
    LOGS.mkdir(parents=True, exist_ok=True)
    try:
        demo()
    except DemoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    return 0


def demo() -> None:
    began = time.monotonic()
    worker, gateway, metrics = free_port(), free_port(), free_port()
    serve = [str(BRIDGE), "serve", "vllm", str(MODEL), "--port", str(worker), "--served-model-name", NAME]
    launch = [str(SMG), "launch", "--worker-urls", f"grpc://127.0.0.1:{worker}", "--model-path", str(MODEL)]
    launch += ["--host", "127.0.0.1", "--port", str(gateway), "--prometheus-port", str(metrics)]

    title("1. vLLM, headless, behind the bridge")
    with Program("serve", [*serve, *ENGINE_FLAGS], foreign="[vllm]") as engine:
        wait_for(engine, lambda: engine.said(f"on grpc://127.0.0.1:{worker}"), "the engine")
        up = time.monotonic() - began
        print(f"  the engine serves after {up:.1f} s")

        title("2. A question over gRPC, streamed")
        direct = ask_the_worker(worker)

        title("3. The same question through the SMG gateway")
        with Program("smg", launch) as proxy:
            wait_for(proxy, lambda: lists_a_model(gateway), "the gateway")
            through = ask_the_gateway(gateway)
        stopping = time.monotonic()
    print(
        f"\ndone: engine up {up:.1f} s, gRPC answer {direct:.1f} s, gateway answer {through:.1f} s, "
        f"stopped in {time.monotonic() - stopping:.1f} s, all in {time.monotonic() - began:.0f} s"
    )


def ask_the_worker(port: int) -> float:
    """Ask with `headless-bridge chat`, which takes the tokenizer from the worker; seconds it took."""
    command = [str(BRIDGE), "chat", f"grpc://127.0.0.1:{port}", "--temperature", "0", "--prompt", QUESTION]
    print("$ " + " ".join(part.replace(f"{ROOT}/", "") for part in command[:-1]) + f' "{QUESTION}"', flush=True)
    start = time.monotonic()
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    timer = threading.Timer(ANSWER_LIMIT_S, process.kill)
    timer.start()
    answer = b""
    assert process.stdout is not None
    while part := os.read(process.stdout.fileno(), 4096):
        answer += part
        print(part.decode(errors="replace"), end="", flush=True)
    timer.cancel()
    if process.wait() or EXPECTED not in answer.decode():
        raise DemoError(f"chat ended with exit code {process.returncode} and did not say {EXPECTED}")
    return time.monotonic() - start


def ask_the_gateway(port: int) -> float:
    """Ask the gateway's OpenAI API and print what it streams; seconds it took."""
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    messages = [{"role": "user", "content": QUESTION}]
    body = {"model": NAME, "messages": messages, "temperature": 0, "max_tokens": 32, "stream": True}
    print(f"$ curl {url} -d '{json.dumps(body)}'", flush=True)
    start = time.monotonic()
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    answer = ""
    try:
        with open_when_loaded(request) as reply:
            for text in pieces(reply):
                answer += text
                print(text, end="", flush=True)
    except OSError as error:
        raise DemoError(f"the gateway did not answer: {error}; see {LOGS.relative_to(ROOT)}/smg.log") from None
    print()
    if EXPECTED not in answer:
        raise DemoError(f"the gateway's answer does not say {EXPECTED}")
    return time.monotonic() - start


def open_when_loaded(request: urllib.request.Request) -> Any:
    """The reply's body. The gateway lists a worker before it has read its tokenizer, and answers 503 until then."""
    until = time.monotonic() + ANSWER_LIMIT_S
    while True:
        try:
            return LOCAL.open(request, timeout=ANSWER_LIMIT_S)
        except urllib.error.HTTPError as error:
            if error.code != 503 or time.monotonic() > until:
                raise
            time.sleep(0.2)


def pieces(events: Iterator[bytes]) -> Iterator[str]:
    """The text in a stream of chat-completion events."""
    for line in events:
        data = line.decode().strip().removeprefix("data: ")
        if data and data != "[DONE]":
            for choice in json.loads(data)["choices"]:
                yield choice["delta"].get("content") or ""


def wait_for(program: Program, ready: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + START_LIMIT_S
    while not ready():
        program.must_run()
        if time.monotonic() > until:
            raise DemoError(f"{what} is not ready after {START_LIMIT_S:.0f} s; see {program.log.relative_to(ROOT)}")
        time.sleep(0.2)


def lists_a_model(port: int) -> bool:
    try:
        with LOCAL.open(f"http://127.0.0.1:{port}/v1/models", timeout=5) as reply:
            return bool(json.load(reply)["data"])
    except (OSError, ValueError):
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def title(text: str) -> None:
    print(f"\n{text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
