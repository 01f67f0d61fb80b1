"""`headless-bridge chat`: talk to a worker over its contract, with the tokenizer the worker hands out."""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from bridge.supervisor.errors import SupervisorError, UsageError

MAX_ARCHIVE = 256 << 20
"""Bytes of tokenizer files accepted from a worker, zipped and unzipped."""


def main(arguments: Sequence[str]) -> int:
    """One question with `--prompt`, or a conversation on the terminal until end of input."""
    parser = argparse.ArgumentParser(prog="headless-bridge chat", description=main.__doc__, allow_abbrev=False)
    parser.add_argument("target", help="the worker: grpc://HOST:PORT or unix:PATH")
    parser.add_argument("--prompt", help="ask this one question and exit")
    parser.add_argument("--system", help="system message")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, help="0 is greedy (default: the model's own)")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--wait", type=float, default=0.0, metavar="S", help="wait up to S seconds until it serves")
    given = parser.parse_args(arguments)

    import grpc

    try:
        return _talk(given)
    except grpc.RpcError as error:
        raise SupervisorError(f"{given.target}: {error.code().name}: {error.details()}") from None


def _talk(given: argparse.Namespace) -> int:
    import grpc
    from smg_grpc_proto.generated import vllm_engine_pb2_grpc

    with grpc.insecure_channel(_target(given.target)) as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        _wait_until_serving(stub, given.target, given.wait)
        worker = Worker(stub)
        messages = [{"role": "system", "content": given.system}] if given.system else []
        for question in [given.prompt] if given.prompt else _questions():
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": _answer(worker, messages, given)})
    return 0


def _target(text: str) -> str:
    scheme, found, address = text.partition("://")
    if text.startswith("unix:") or not found:
        return text
    if scheme != "grpc":
        raise UsageError(f"{text}: only grpc://HOST:PORT and unix:PATH are spoken here")
    return address


def _wait_until_serving(stub: Any, target: str, wait_s: float) -> None:
    import grpc
    from smg_grpc_proto.generated import vllm_engine_pb2 as pb

    until = time.monotonic() + wait_s
    while True:
        try:
            health = stub.HealthCheck(pb.HealthCheckRequest(), timeout=5)
            if health.healthy:
                return
            problem = health.message
        except grpc.RpcError as error:
            problem = f"{error.code().name}: {error.details()}"
        if time.monotonic() >= until:
            raise SupervisorError(f"{target} does not serve: {problem}")
        time.sleep(0.5)


def _questions() -> Iterator[str]:
    if sys.stdin.isatty():
        import readline  # noqa: F401  (line editing for input())

        print("Ctrl-D ends.", file=sys.stderr)
    while True:
        try:
            question = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if question.strip():
            yield question


class Worker:
    """A worker's tokenizer and its Generate RPC."""

    def __init__(self, stub: Any) -> None:
        from tokenizers import Tokenizer

        self.stub = stub
        self.folder = tempfile.TemporaryDirectory(prefix="hb-chat-")
        _unpack(_download(stub), Path(self.folder.name))
        self.tokenizer = Tokenizer.from_file(str(Path(self.folder.name) / "tokenizer.json"))
        self.template = _template(Path(self.folder.name))

    def prompt(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a conversation, by the model's own chat template."""
        text = self.template.render(messages=messages, add_generation_prompt=True, **self.template.special)
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)


def _answer(worker: Worker, messages: list[dict[str, str]], given: argparse.Namespace) -> str:
    from smg_grpc_proto.generated import vllm_engine_pb2 as pb
    from tokenizers.decoders import DecodeStream

    params = pb.SamplingParams(
        max_tokens=given.max_tokens, temperature=given.temperature, seed=given.seed, skip_special_tokens=True
    )
    request = pb.GenerateRequest(
        tokenized=pb.TokenizedInput(input_ids=worker.prompt(messages)), sampling_params=params, stream=True
    )
    decoder = DecodeStream(skip_special_tokens=True)
    started, first, count, answer = time.monotonic(), 0.0, 0, []
    for reply in worker.stub.Generate(request):
        for token in reply.chunk.token_ids:
            count += 1
            first = first or time.monotonic()
            piece = decoder.step(worker.tokenizer, token)
            if piece:
                answer.append(piece)
                print(piece, end="", flush=True)
    now = time.monotonic()
    rate = (count - 1) / (now - first) if count > 1 else 0.0
    print()
    print(f"[{count} tokens, first after {first - started:.2f} s, then {rate:.1f} tokens/s]", file=sys.stderr)
    return "".join(answer)


def _download(stub: Any) -> bytes:
    from smg_grpc_proto.generated import common_pb2

    archive, digest = bytearray(), ""
    for chunk in stub.GetTokenizer(common_pb2.GetTokenizerRequest(), timeout=120):
        archive += chunk.data
        digest = chunk.sha256
        if len(archive) > MAX_ARCHIVE:
            raise SupervisorError(f"the worker's tokenizer is over the limit of {MAX_ARCHIVE} bytes")
    if hashlib.sha256(archive).hexdigest() != digest:
        raise SupervisorError("the worker's tokenizer arrived damaged: its SHA-256 does not match")
    return bytes(archive)


def _unpack(archive: bytes, folder: Path) -> None:
    with zipfile.ZipFile(BytesIO(archive)) as files:
        if sum(entry.file_size for entry in files.infolist()) > MAX_ARCHIVE:
            raise SupervisorError(f"the worker's tokenizer unpacks to more than {MAX_ARCHIVE} bytes")
        for entry in files.infolist():
            (folder / Path(entry.filename).name).write_bytes(files.read(entry))


class _Template:
    """A compiled chat template and the special tokens it may name."""

    def __init__(self, source: str, special: dict[str, str]) -> None:
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = time.strftime
        self.render = environment.from_string(source).render
        self.special = special


def _raise(message: str) -> None:
    raise SupervisorError(f"the model's chat template refuses the conversation: {message}")


def _template(folder: Path) -> _Template:
    import json

    config = json.loads((folder / "tokenizer_config.json").read_text())
    own = folder / "chat_template.jinja"
    source = own.read_text() if own.exists() else config.get("chat_template")
    if not isinstance(source, str):
        raise SupervisorError("the model has no chat template; it is not a chat model")
    special = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        token = config.get(name)
        if token:
            special[name] = token["content"] if isinstance(token, dict) else token
    return _Template(source, special)
