"""What ends is gone by itself: the garbage collector, which runs rarely here, finds next to nothing."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter

from tests.grpc.conftest import Connector
from tests.grpc.raw import DATA, END_HEADERS, END_STREAM, HEADERS, frame, message, reset
from tests.grpc.serving import PACKAGE, Running, until

A_CONNECTION = 20
"""Objects that a lost connection may leave: its own parts, which know each other."""


async def test_calls_of_every_kind_and_end(server: Running, connect: Connector) -> None:
    client = await connect(server)
    await client.finished(await client.call(PACKAGE + "Echo", b"x"))
    gc.collect()
    gc.disable()
    try:
        for path in ("Echo", "Fail", "Count", "FailStream", "Raw", "Sleep", "Endless", "Chat", "Nope", "RawRefuse"):
            for ending in ("finished", "reset", "left"):
                stream = client.stream()
                await client.send(frame(HEADERS, END_HEADERS, stream, client.headers(PACKAGE + path)))
                await client.send(frame(DATA, END_STREAM, stream, message(b"3 10")))
                await asyncio.sleep(0.01)
                if ending == "reset":
                    await client.send(reset(stream))
        for call in server.probe.open:
            call.finish()
        server.probe.__init__()  # type: ignore[misc]
        await client.close()
        await until(lambda: not server.server._connections and not server.server._tasks)
        await asyncio.sleep(0.05)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found = Counter(type(one).__name__ for one in gc.garbage)
        assert found["Call"] == found["RequestStream"] == found["Task"] == 0, found
        assert sum(type(one).__module__.startswith("bridge") for one in gc.garbage) <= A_CONNECTION, found
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
