"""A front end in this process on a real slot, and a peer in the engine's place: it records what is sent and ends it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgpack
import zmq

from bridge.contracts.context import Grammar
from bridge.contracts.names import contracts_for
from bridge.frontend import FrontEnd
from bridge.wire.companion import Facts
from bridge.wire.handshake import identity_of
from bridge.wire.link import Slot, slot_addresses

SLOT = 1
ADD, ABORT, UTILITY = b"\x00", b"\x01", b"\x03"

FINISH_ABORT = 2
REQUEST_ID = 0
"""Position in an EngineCoreRequest (vLLM 0.27 to 0.33)."""


class Peer:
    """Dials a slot as rank 0 and runs no model: each request ends at once, with no token and vLLM's `abort`.

    A thread of its own. `messages` are all frames that came, in order.
    """

    def __init__(self, input_address: str, output_address: str, ready: Mapping[str, Any]) -> None:
        self._addresses = (input_address, output_address)
        self._ready = msgpack.packb(ready)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="peer")
        self.messages: list[list[bytes]] = []

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        self._context.destroy(0)

    def adds(self, since: int = 0) -> list[bytes]:
        """The payloads of the ADDs among the messages from number `since` on."""
        return [frames[1] for frames in self.messages[since:] if frames[0] == ADD]

    def _run(self) -> None:
        dealer, push = self._context.socket(zmq.DEALER), self._context.socket(zmq.PUSH)
        dealer.setsockopt(zmq.IDENTITY, identity_of(0))
        for made, address in zip((dealer, push), self._addresses, strict=True):
            made.setsockopt(zmq.SNDHWM, 0)
            made.setsockopt(zmq.RCVHWM, 0)
            made.connect(address)
        dealer.send(self._ready)
        while not self._stop.is_set():
            if dealer.poll(100):
                frames = dealer.recv_multipart()
                self.messages.append(frames)
                self._answer(push, frames)
        dealer.close(0)
        push.close(0)

    @staticmethod
    def _answer(push: zmq.Socket[bytes], frames: list[bytes]) -> None:
        content = msgpack.unpackb(frames[1], strict_map_key=False)
        outputs, utility = [], None
        if frames[0] == ADD:
            outputs = [[content[REQUEST_ID], [], None, None, None, FINISH_ABORT]]
        elif frames[0] == UTILITY:
            utility = [content[1], None, [None, True]]
        else:
            return
        push.send(msgpack.packb([0, outputs, None, time.monotonic(), utility]))


class Captured:
    """The pair, serving on a TCP port of loopback. `folder` must be short (ipc paths) and private. Use inside a loop.

    Without `grammar` there is no companion, and constraints are refused.
    """

    def __init__(
        self, folder: Path, facts: Facts, grammar: Grammar | None = None, contracts: Sequence[str] = ()
    ) -> None:
        self._folder = folder
        self._facts = facts
        self._grammar = grammar
        self._contracts = contracts

    async def __aenter__(self) -> Captured:
        addresses = slot_addresses(self._folder, SLOT)
        slot = Slot(SLOT, *addresses)
        facts = self._facts
        ready = {
            "vllm_version": facts.engine_version,
            "max_model_len": facts.max_model_len,
            "data_parallel_size": 1,
            "data_parallel_rank": 0,
            "num_gpu_blocks": 100,
            "block_size": 16,
            "max_num_seqs": 256,
        }
        self.peer = Peer(*addresses, ready)
        self.peer.start()
        while slot.receive_ready() is None:
            time.sleep(0.01)
        self.deaths: list[str] = []
        self.front_end = FrontEnd(
            "vllm",
            slot,
            incarnation=1,
            contracts=contracts_for("vllm", self._contracts),
            options={},
            on_death=self.deaths.append,
            grammar=self._grammar,
        )
        self.front_end.engine_up([(identity_of(0), ready)], facts)
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(listener.getsockname()[1])
        await self.front_end.server.serve(listener)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.front_end.close()
        self.peer.stop()
