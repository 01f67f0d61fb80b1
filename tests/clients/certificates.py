"""A small authority, a server's and a client's certificate, and a client's of nobody's."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.clients.asking import Certificates

KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
NAMES = "subjectAltName=DNS:localhost,IP:127.0.0.1,IP:::1\n"


class Authority:
    """Files in `folder`: authority.pem, server.pem and .key, client.pem and .key, stranger.pem and .key."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "names").write_text(NAMES)
        for name in ("authority", "stranger"):
            self._openssl("req", "-x509", *KEY, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.pem")
        for name in ("server", "client"):
            self._openssl("req", *KEY, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
            signing = ("-CA", "authority.pem", "-CAkey", "authority.key", "-CAcreateserial", "-days", "2")
            self._openssl("x509", "-req", "-in", f"{name}.csr", *signing, "-extfile", "names", "-out", f"{name}.pem")

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self.folder, check=True, capture_output=True)

    @property
    def server_flags(self) -> tuple[str, ...]:
        return ("--tls-cert", str(self.folder / "server.pem"), "--tls-key", str(self.folder / "server.key"))

    @property
    def client_ca_flags(self) -> tuple[str, ...]:
        return ("--tls-client-ca", str(self.folder / "authority.pem"))

    def shown_by(self, name: str | None = None) -> Certificates:
        """What a client is given: the authority to trust, and its own certificate."""
        if name is None:
            return Certificates(self.folder / "authority.pem")
        return Certificates(self.folder / "authority.pem", self.folder / f"{name}.pem", self.folder / f"{name}.key")
