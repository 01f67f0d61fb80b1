"""One file out of a wheel on an index, without the rest: `python wheel_member.py REQUIREMENT MEMBER TARGET`.

pip says where the wheel is, ranged requests read its directory and that member. The vllm wheel is 0.3 GB and more, the
`vllm-rs` binary in it 20 MB compressed.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from pathlib import Path

CHUNK = 1 << 20
TIMEOUT_S = 120


class Ranged(io.RawIOBase):
    """A seekable view of a file behind a URL; what is read comes in pieces of a megabyte, kept."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._at = 0
        self._pieces: dict[int, bytes] = {}
        request = urllib.request.Request(url, method="HEAD")
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
            self._size = int(reply.headers["Content-Length"])
            if reply.headers.get("Accept-Ranges") != "bytes":
                raise OSError(f"{url} cannot be read in parts")

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        index, skip = divmod(self._at, CHUNK)
        piece = self._piece(index)[skip : skip + len(buffer)]
        buffer[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)

    def _piece(self, index: int) -> bytes:
        piece = self._pieces.get(index)
        if piece is None:
            start = index * CHUNK
            if start >= self._size:
                return b""
            end = min(start + CHUNK, self._size) - 1
            request = urllib.request.Request(self._url, headers={"Range": f"bytes={start}-{end}"})
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
                if reply.status != 206:
                    raise OSError(f"{self._url} answered a range with {reply.status}")
                piece = self._pieces[index] = reply.read()
        return piece


def wheel_url(requirement: str) -> str:
    """Where pip would take the wheel from; nothing is installed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "--no-input", "install", "--quiet", "--dry-run", "--no-deps"]
        subprocess.run(
            [*command, "--ignore-installed", "--only-binary=:all:", "--report", report, requirement], check=True
        )
        url: str = json.loads(report.read_text())["install"][0]["download_info"]["url"]
        return url


def main(requirement: str, member: str, target: str) -> None:
    with zipfile.ZipFile(io.BufferedReader(Ranged(wheel_url(requirement)), CHUNK)) as archive:
        data = archive.read(member)
    path = Path(target)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    path.chmod(0o755)


if __name__ == "__main__":
    main(*sys.argv[1:])
