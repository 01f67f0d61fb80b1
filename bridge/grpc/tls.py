"""TLS for the gRPC listener: HTTP/2 over ALPN, with client certificates when a client CA is given."""

from __future__ import annotations

import ssl


def server_context(certificate_file: str, key_file: str, client_ca_file: str | None = None) -> ssl.SSLContext:
    """A server context that offers only "h2".

    ``client_ca_file`` turns on mutual TLS: clients must present a certificate that it signed. Raises OSError or
    ssl.SSLError when a file cannot be read or the key does not match the certificate.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    context.load_cert_chain(certificate_file, key_file)
    context.set_alpn_protocols(["h2"])
    if client_ca_file is not None:
        context.load_verify_locations(client_ca_file)
        context.verify_mode = ssl.CERT_REQUIRED
    return context
