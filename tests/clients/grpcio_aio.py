"""grpcio's asyncio client, on a loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import grpc

from tests.clients.asking import PLAIN, CallError, Connect, How
from tests.clients.grpcio_sync import credentials_of, options_of

T = TypeVar("T")


class AioStream:
    """A call's messages."""

    def __init__(self, client: GrpcioAioClient, call: Any) -> None:
        self._client = client
        self._call = call

    def __iter__(self) -> Iterator[bytes]:
        while (message := self._client.run(self._read())) is not None:
            yield message

    async def _read(self) -> bytes | None:
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise CallError(error.code().name, error.details() or "") from None
        if message is grpc.aio.EOF:
            code = await self._call.code()
            if code is not grpc.StatusCode.OK:
                raise CallError(code.name, await self._call.details())
            return None
        assert isinstance(message, bytes)
        return message

    def cancel(self) -> None:
        self._client.run(self._cancel())

    async def _cancel(self) -> None:
        self._call.cancel()


class GrpcioAioClient:
    """The client."""

    def __init__(self, where: Connect) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._channel = self.run(self._connect(where))

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine on this client's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    async def _connect(self, where: Connect) -> grpc.aio.Channel:
        credentials, options = credentials_of(where), options_of(where)
        compression = grpc.Compression.Gzip if where.gzip else None
        if credentials is None:
            return grpc.aio.insecure_channel(where.address, options, compression)
        return grpc.aio.secure_channel(where.address, credentials, options, compression)

    def unary(self, path: str, request: bytes, how: How = PLAIN) -> bytes:
        return self.run(self._unary(path, request, how))

    async def _unary(self, path: str, request: bytes, how: How) -> bytes:
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(path)
        try:
            reply = await call(
                request, timeout=how.timeout_s, metadata=tuple(how.metadata), wait_for_ready=how.wait_for_ready
            )
        except grpc.aio.AioRpcError as error:
            raise CallError(error.code().name, error.details() or "") from None
        assert isinstance(reply, bytes)
        return reply

    def stream(self, path: str, request: bytes, how: How = PLAIN) -> AioStream:
        return AioStream(self, self.run(self._stream(path, request, how)))

    async def _stream(self, path: str, request: bytes, how: How) -> Any:
        call: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = self._channel.unary_stream(path)
        return call(request, timeout=how.timeout_s, metadata=tuple(how.metadata), wait_for_ready=how.wait_for_ready)

    def close(self) -> None:
        self.run(self._channel.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
