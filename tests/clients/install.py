"""Brings what the clients' tests need beside the Python environments: `python tests/clients/install.py`.

`nghttp` and `h2load` come from Debian's nghttp2-client, and Node with npm where there is none: with apt-get, as root.
@grpc/grpc-js comes from npm, at the versions of js/package-lock.json, into `.envs/grpc-js` of the checkout.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROBE = HERE / "js"
TARGET = HERE.parent.parent / ".envs" / "grpc-js"
LOCK = "package-lock.json"
PROGRAMS = {"nghttp": "nghttp2-client", "h2load": "nghttp2-client", "node": "nodejs", "npm": "npm"}
"""Command → the Debian package that has it."""


class InstallError(Exception):
    """One line for people."""


def main() -> int:
    try:
        _install_programs()
        _install_grpc_js()
    except InstallError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _install_programs() -> None:
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if not missing:
        return
    packages = sorted({PROGRAMS[program] for program in missing})
    asked = f"{', '.join(missing)} not found; install them with: apt-get install {' '.join(packages)}"
    if shutil.which("apt-get") is None:
        raise InstallError(f"{asked} (or what your system calls them)")
    if os.geteuid() != 0:
        raise InstallError(f"{asked} (needs root)")
    print(f"[clients] apt-get install {' '.join(packages)}", flush=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    _run(["apt-get", "update", "-q"], environment)
    _run(["apt-get", "install", "-y", "-q", "--no-install-recommends", *packages], environment)


def _install_grpc_js() -> None:
    made = TARGET / LOCK
    if made.is_file() and made.read_bytes() == (PROBE / LOCK).read_bytes() and (TARGET / "node_modules").is_dir():
        return
    print("[clients] npm ci: @grpc/grpc-js", flush=True)
    shutil.rmtree(TARGET, ignore_errors=True)
    TARGET.mkdir(parents=True)
    shutil.copy(PROBE / "package.json", TARGET)
    shutil.copy(PROBE / LOCK, TARGET)
    try:
        _run(["npm", "ci", "--prefix", str(TARGET), "--ignore-scripts", "--no-audit", "--no-fund"], dict(os.environ))
    except InstallError:
        made.unlink()
        raise


def _run(command: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environment, check=False
    )
    if done.returncode:
        tail = "\n".join(f"    {line}" for line in (done.stdout + done.stderr).splitlines()[-15:])
        raise InstallError(f"'{' '.join(command)}' failed with exit code {done.returncode}\n{tail}")


if __name__ == "__main__":
    sys.exit(main())
