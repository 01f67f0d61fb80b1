"""nghttp2's own programs: `nghttp`, one request with everything visible, and `h2load`, many."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from bridge.plugins.sim.tokens import expected_tokens
from tests.abuse.target import Target
from tests.clients.certificates import Authority
from tests.clients.conftest import FAST
from tests.clients.talk import GENERATE, SERVICE, prompt_of, request, tokens_of
from tests.clients.test_transports import credentials
from tests.grpc.raw import message

HEADERS = ("-H", "content-type: application/grpc", "-H", "te: trailers")
LOAD = 300
LOAD_TOKENS = 320


def start(program: str, *arguments: object) -> subprocess.Popen[bytes]:
    command = [program, *HEADERS, *map(str, arguments)]
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0
    )


def output_of(program: str, *arguments: object) -> bytes:
    """What it prints; it must succeed."""
    with start(program, *arguments) as running:
        output, _ = running.communicate(timeout=60)
    assert running.returncode == 0, output
    return output


def messages_in(body: bytes) -> list[bytes]:
    """gRPC messages, one after another."""
    found = []
    while body:
        end = 5 + int.from_bytes(body[1:5], "big")
        found.append(body[5:end])
        body = body[end:]
    return found


def body_file(folder: Path, prompt: list[int], tokens: int) -> Path:
    path = folder / f"{len(prompt)}-{tokens}"
    path.write_bytes(message(request(prompt, tokens)))
    return path


def url(target: Target, path: str = GENERATE, scheme: str = "http") -> str:
    return f"{scheme}://{target.address}{path}"


@pytest.mark.parametrize(
    "manner",
    [
        (),
        ("--padding=200",),
        ("--window-bits=10", "--connection-window-bits=10"),
        ("--header-table-size=0",),
        ("-m", 1),
    ],
    ids=lambda manner: " ".join(map(str, manner)) or "plain",
)
def test_nghttp_gets_every_token(target: Target, tmp_path: Path, manner: tuple[object, ...]) -> None:
    """Padded, with windows of a kilobyte, without a header table."""
    prompt = prompt_of(20)
    output = output_of("nghttp", *manner, "-d", body_file(tmp_path, prompt, 1000), url(target))
    assert tokens_of(messages_in(output)) == expected_tokens(prompt, 1000)


def test_nghttp_sends_a_prompt_of_100_000_tokens(target: Target, tmp_path: Path) -> None:
    prompt = prompt_of(100_000)
    output = output_of("nghttp", "-d", body_file(tmp_path, prompt, 50), url(target))
    assert tokens_of(messages_in(output)) == expected_tokens(prompt, 50)


def test_nghttp_sees_the_frames_it_expects(target: Target, tmp_path: Path) -> None:
    log = output_of("nghttp", "-nv", "-d", body_file(tmp_path, prompt_of(20), 64), url(target)).decode()
    position = 0
    for text in ("recv SETTINGS", ":status: 200", "recv DATA", "grpc-status: 0", "END_STREAM"):
        position = log.index(text, position)
    assert "RST_STREAM" not in log and "recv GOAWAY" not in log


def test_a_deadline_in_its_header(target: Target, tmp_path: Path) -> None:
    body = body_file(tmp_path, prompt_of(20), 100_000)
    log = output_of("nghttp", "-nv", "-H", "grpc-timeout: 300m", "-d", body, url(target)).decode()
    assert "grpc-status: 4" in log
    target.must_forget()


def test_an_nghttp_that_is_killed_ends_the_engines_work(target: Target, tmp_path: Path) -> None:
    with start("nghttp", "-d", body_file(tmp_path, prompt_of(20), 150_000), url(target)) as running:
        assert running.stdout is not None and running.stdout.read(1)
        assert target.requests()["running"] == 1
        running.send_signal(signal.SIGKILL)
        target.must_forget()


def test_nghttp_over_tls_with_a_certificate(place: Path, authority: Authority, tmp_path: Path) -> None:
    folder = place / "nghttp"
    folder.mkdir()
    shown = authority.shown_by("client")
    flags = (*FAST, *authority.server_flags, *authority.client_ca_flags)
    with Target(folder, *flags, tls=credentials(shown)) as target:
        target.wait_until_serving()
        prompt = prompt_of(20)
        own = ("--no-verify-peer", "--cert", shown.certificate, "--key", shown.key)
        output = output_of("nghttp", *own, "-d", body_file(tmp_path, prompt, 100), url(target, scheme="https"))
        assert tokens_of(messages_in(output)) == expected_tokens(prompt, 100)


def test_nghttp_streams_through_the_servers_stop(tmp_path: Path) -> None:
    with TemporaryDirectory(prefix="drain-") as path, Target(Path(path), *FAST, "--drain-secs", 10) as server:
        server.wait_until_serving()
        prompt = prompt_of(20)
        with start("nghttp", "-d", body_file(tmp_path, prompt, 4800), url(server)) as running:
            assert running.stdout is not None
            first = running.stdout.read(1)
            server.process.send_signal(signal.SIGTERM)
            rest, _ = running.communicate(timeout=30)
        assert running.returncode == 0
        assert tokens_of(messages_in(first + rest)) == expected_tokens(prompt, 4800)
        assert server.process.wait(10) == 0


@pytest.mark.parametrize("windows", [(), ("--window-bits=10", "--connection-window-bits=12")], ids=["wide", "narrow"])
def test_h2load(target: Target, tmp_path: Path, windows: tuple[str, ...]) -> None:
    """300 generations over 4 connections, 25 at once on each."""
    before = target.sim.state()["finished"]
    body = body_file(tmp_path, prompt_of(20), LOAD_TOKENS)
    log = output_of("h2load", "-n", LOAD, "-c", 4, "-m", 25, *windows, "-d", body, url(target)).decode()
    assert f"{LOAD} succeeded, 0 failed, 0 errored, 0 timeout" in log, log
    assert f"status codes: {LOAD} 2xx" in log
    assert target.sim.state()["finished"] == before + LOAD
    target.must_forget()


def test_h2load_of_health_checks(target: Target, tmp_path: Path) -> None:
    body = tmp_path / "empty"
    body.write_bytes(message(b""))
    log = output_of("h2load", "-n", 5000, "-c", 8, "-m", 50, "-d", body, url(target, SERVICE + "HealthCheck")).decode()
    assert "5000 succeeded, 0 failed, 0 errored, 0 timeout" in log, log
    assert re.search(r"traffic: .*space savings", log)


def test_h2load_on_a_unix_socket(place: Path, tmp_path: Path) -> None:
    folder = place / "h2load"
    folder.mkdir()
    body = tmp_path / "empty"
    body.write_bytes(message(b""))
    with Target(folder, *FAST, uds=folder / "grpc") as target:
        target.wait_until_serving()
        base = f"--base-uri=unix:{folder / 'grpc'}"
        log = output_of(
            "h2load", "-n", 100, "-c", 2, base, "-d", body, f"http://localhost{SERVICE}HealthCheck"
        ).decode()
        assert "100 succeeded, 0 failed" in log, log
