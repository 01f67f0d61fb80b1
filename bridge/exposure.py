"""What the gRPC listener allows whom: the server's limits and its TLS context, from front-end flags by key."""

from __future__ import annotations

import dataclasses
import logging
import resource
import ssl
from collections.abc import Mapping
from typing import Any

from bridge.grpc.limits import MIB, Limits, Rate
from bridge.grpc.tls import server_context
from bridge.supervisor.errors import UsageError

log = logging.getLogger(__name__)

KIB = 1024
DESCRIPTORS_A_CONNECTION = 2
"""One in use, and one of a connection that is being ended: it lingers for a second."""
OWN_DESCRIPTORS = 64
"""Sockets of the link, listeners, the loop; 30 were counted."""
CALLS_BESIDE_REQUESTS = 1024
"""Calls beyond `max_in_flight`: health checks and loads are answered while every request's place is taken."""

LIMITS: Mapping[str, tuple[str, int]] = {
    "max_message_bytes": ("max_message_mib", MIB),
    "max_connections": ("max_connections", 1),
    "max_streams_per_connection": ("max_streams_per_connection", 1),
    "max_header_list_bytes": ("max_header_kib", KIB),
    "max_buffered_bytes": ("max_buffered_mib", MIB),
    "request_s": ("request_secs", 1),
    "slow_reader_s": ("slow_reader_secs", 1),
    "keepalive_s": ("keepalive_secs", 1),
    "keepalive_timeout_s": ("keepalive_timeout_secs", 1),
    "idle_connection_s": ("idle_connection_secs", 1),
}
"""Field of `Limits` → the flag that sets it and the flag's unit."""


def limits_of(options: Mapping[str, Any]) -> Limits:
    """The limits that `options` set, and the defaults of those they leave out."""
    given: dict[str, Any] = {field: options[key] * unit for field, (key, unit) in LIMITS.items() if key in options}
    if "max_in_flight" in options:
        given["max_calls"] = options["max_in_flight"] + CALLS_BESIDE_REQUESTS
    if "max_buffered_mib" in options:
        given["max_buffered_bytes_per_connection"] = given["max_buffered_bytes"] // 2
    if "request_secs" in options:
        # No part of a request may take longer than all of it.
        given["preface_s"] = min(Limits().preface_s, options["request_secs"])
        given["frame_s"] = min(Limits().frame_s, options["request_secs"])
    if "max_resets_per_sec" in options:
        streams = options.get("max_streams_per_connection", Limits().max_streams_per_connection)
        given["resets"] = Rate(streams, options["max_resets_per_sec"])
    return Limits(**given)


def fitted(limits: Limits) -> Limits:
    """`limits` as this process can keep them, with its limit on open files raised as far as it may be.

    Out of descriptors, nobody is let in: no idle connection gives way before `max_connections` is reached.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.max_connections * DESCRIPTORS_A_CONNECTION + OWN_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return limits
    fit = max(1, (soft - OWN_DESCRIPTORS) // DESCRIPTORS_A_CONNECTION)
    log.warning("%d open files are allowed (ulimit -Hn): --max-connections is %d", soft, fit)
    return dataclasses.replace(limits, max_connections=fit)


def tls_of(options: Mapping[str, Any]) -> ssl.SSLContext | None:
    """The TLS context that `options` ask for, None for plain text; raises `UsageError` for files that do not work.

    The key may stand in the certificate's file.
    """
    certificate, key, client_ca = (options.get(name) or "" for name in ("tls_cert", "tls_key", "tls_client_ca"))
    if not certificate:
        for flag, value in (("--tls-key", key), ("--tls-client-ca", client_ca)):
            if value:
                raise UsageError(f"{flag} {value} needs --tls-cert, the certificate to serve")
        return None
    files = " ".join(f"--{name} {value}" for name, value in (("tls-cert", certificate), ("tls-key", key)) if value)
    try:
        context = server_context(certificate, key or certificate)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"{files} cannot be used: {_reason(error)}") from None
    if not client_ca:
        return context
    try:
        return server_context(certificate, key or certificate, client_ca)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"--tls-client-ca {client_ca} cannot be used: {_reason(error)}") from None


def _reason(error: OSError) -> str:
    """What the system or OpenSSL said, without source positions."""
    if not isinstance(error, ssl.SSLError):
        return error.strerror or str(error)
    if error.reason == "KEY_VALUES_MISMATCH":
        return "the key is not the certificate's"
    return error.reason or "a certificate and its key in PEM form are wanted"
