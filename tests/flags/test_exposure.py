"""What flags make of the listener: limits and TLS."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bridge.exposure import LIMITS, limits_of, tls_of
from bridge.flags import ATTACH, FRONT_END, SERVE, resolve
from bridge.grpc.limits import MIB, Limits, Rate
from bridge.supervisor.errors import UsageError

DEFAULTS = {flag.key: flag.default for flag in SERVE}


def test_the_flags_defaults_are_the_servers_own() -> None:
    own = Limits()
    made = limits_of(DEFAULTS)
    assert made.max_calls == own.max_calls + 1024
    assert {name for name in Limits.__slots__ if getattr(made, name) != getattr(own, name)} == {"max_calls"}
    assert limits_of({}) == own


def test_every_limit_flag_is_in_both_commands_and_reaches_a_supervised_front_end() -> None:
    keys = {key for key, _ in LIMITS.values()} | {"max_in_flight", "max_resets_per_sec", "tls_cert", "tls_client_ca"}
    assert keys <= set(FRONT_END)
    for command in (SERVE, ATTACH):
        assert keys <= {flag.key for flag in command}


def test_values_reach_the_limits_in_their_units() -> None:
    arguments = "--max-message-mib 3 --max-header-kib=8 --request-secs 1.5 --max-resets-per-sec 7 --max-buffered-mib 10"
    arguments += " --max-streams-per-connection 50 --max-in-flight 20"
    limits = limits_of(resolve(SERVE, arguments.split(), {"BRIDGE_MAX_CONNECTIONS": "5"}, "sim").values)
    assert (limits.max_message_bytes, limits.max_header_list_bytes, limits.request_s) == (3 * MIB, 8192, 1.5)
    assert (limits.preface_s, limits.frame_s) == (1.5, 1.5)
    assert (limits.max_buffered_bytes, limits.max_buffered_bytes_per_connection) == (10 * MIB, 5 * MIB)
    assert (limits.resets, limits.max_connections, limits.max_calls) == (Rate(50, 7), 5, 1044)


@pytest.mark.parametrize("flag", ["--keepalive-secs 0", "--request-secs nan", "--max-connections 0"])
def test_a_limit_that_cannot_be_is_refused(flag: str) -> None:
    with pytest.raises(UsageError, match=flag.split()[0]):
        resolve(SERVE, flag.split(), {}, "sim")


@pytest.mark.parametrize(
    ("soft", "hard", "asked", "allowed", "connections"),
    [(256, 4096, 500, 1064, 500), (256, 600, 500, 600, 268), (2000, 2000, 500, 2000, 500), (100, 100, 500, 100, 18)],
)
def test_connections_fit_the_limit_on_open_files(
    soft: int, hard: int, asked: int, allowed: int, connections: int
) -> None:
    """In a process of its own: a lowered hard limit stays."""
    code = (
        "import resource\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\n"
        "from bridge.exposure import fitted\n"
        "from bridge.grpc.limits import Limits\n"
        f"print(fitted(Limits(max_connections={asked})).max_connections)\n"
        "print(*resource.getrlimit(resource.RLIMIT_NOFILE))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout.split() == [str(connections), str(allowed), str(hard)]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two self-signed certificates with their keys, and one file with both."""
    folder = tmp_path_factory.mktemp("certificates")
    for name in ("one", "two"):
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        command += ["-days", "2", "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.pem"]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    (folder / "both.pem").write_bytes((folder / "one.key").read_bytes() + (folder / "one.pem").read_bytes())
    return folder


def test_tls_files(certificates: Path) -> None:
    one, key, both = (str(certificates / name) for name in ("one.pem", "one.key", "both.pem"))
    assert tls_of(DEFAULTS) is None
    for options in ({"tls_cert": one, "tls_key": key}, {"tls_cert": both}, {"tls_cert": both, "tls_client_ca": one}):
        assert tls_of(options) is not None


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tls_cert": "one.pem"}, "one.pem cannot be used: a certificate and its key in PEM form"),
        ({"tls_cert": "one.pem", "tls_key": "two.key"}, "the key is not the certificate's"),
        ({"tls_cert": "none.pem"}, "No such file"),
        ({"tls_key": "one.key"}, "needs --tls-cert"),
        ({"tls_client_ca": "one.pem"}, "needs --tls-cert"),
        ({"tls_cert": "both.pem", "tls_client_ca": "one.key"}, "--tls-client-ca"),
    ],
)
def test_tls_files_that_do_not_work(certificates: Path, options: dict[str, str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        tls_of({name: str(certificates / value) for name, value in options.items()})


def test_serve_says_so_before_it_starts_anything(certificates: Path) -> None:
    command = [sys.executable, "-m", "bridge", "serve", "sim", "--port", "0", "--tls-cert", certificates / "one.pem"]
    command += ["--tls-key", certificates / "two.key"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("headless-bridge: --tls-cert ")
    assert "Traceback" not in done.stderr
