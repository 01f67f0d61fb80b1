"""grpcio's blocking client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc

from tests.clients.asking import PLAIN, CallError, Connect, How


def options_of(where: Connect) -> list[tuple[str, object]]:
    """Channel arguments; the same for both of grpcio's clients."""
    options: list[tuple[str, object]] = [("grpc.use_local_subchannel_pool", 1)]
    if where.ping_every_s is not None:
        options += [
            ("grpc.keepalive_time_ms", int(where.ping_every_s * 1000)),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.keepalive_permit_without_calls", 1),
        ]
    return options


def credentials_of(where: Connect) -> grpc.ChannelCredentials | None:
    tls = where.tls
    if tls is None:
        return None
    own = [tls.key.read_bytes(), tls.certificate.read_bytes()] if tls.key and tls.certificate else [None, None]
    return grpc.ssl_channel_credentials(tls.authority.read_bytes(), *own)


class GrpcioStream:
    """A call's messages."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def __iter__(self) -> Iterator[bytes]:
        try:
            yield from self._call
        except grpc.RpcError as error:
            raise CallError(error.code().name, error.details() or "") from None

    def cancel(self) -> None:
        self._call.cancel()


class GrpcioClient:
    """The client."""

    def __init__(self, where: Connect) -> None:
        credentials, options = credentials_of(where), options_of(where)
        compression = grpc.Compression.Gzip if where.gzip else None
        if credentials is None:
            self._channel = grpc.insecure_channel(where.address, options, compression)
        else:
            self._channel = grpc.secure_channel(where.address, credentials, options, compression)

    def unary(self, path: str, request: bytes, how: How = PLAIN) -> bytes:
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(path)
        try:
            return call(request, how.timeout_s, tuple(how.metadata), wait_for_ready=how.wait_for_ready)
        except grpc.RpcError as error:
            raise CallError(error.code().name, error.details() or "") from None

    def stream(self, path: str, request: bytes, how: How = PLAIN) -> GrpcioStream:
        call: grpc.UnaryStreamMultiCallable[bytes, bytes] = self._channel.unary_stream(path)
        return GrpcioStream(call(request, how.timeout_s, tuple(how.metadata), wait_for_ready=how.wait_for_ready))

    def close(self) -> None:
        self._channel.close()
