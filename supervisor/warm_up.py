"""One token from every rank before anybody is told that the engine serves: what loads lazily loads now, and an engine
that came up broken is found before clients find it. Models that generate only."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from bridge.supervisor.control import Rank
from bridge.supervisor.errors import StartError
from bridge.wire.codec import Codec, Finish, Frames, GenerateCall, Sampling
from bridge.wire.companion import Facts
from bridge.wire.link import LinkError

CONNECT_S = 0.01
"""Between tries to reach a rank that was up a moment ago."""


class WarmUp:
    """One request a rank through slot 0. `take` is to see every step of that slot."""

    def __init__(self, facts: Facts, send: Callable[[bytes, Frames], None], prefix: str) -> None:
        """`prefix` starts the wire ids, `slot.incarnation`, never used on this engine before."""
        self._facts = facts
        self._send = send
        self._prefix = prefix
        self._waiting: dict[str, int] = {}
        self._failure = ""
        self._done = asyncio.Event()

    async def run(self, codec: Codec, ranks: list[Rank]) -> None:
        """Until every rank gave its token; raises `StartError` for one that ends the request with an error instead."""
        for number, rank in enumerate(ranks, 1):
            wire_id = f"{self._prefix}.{number:x}"
            self._waiting[wire_id] = number
            frames = self._request(codec, wire_id)
            while True:
                try:
                    self._send(rank.identity, frames)
                    break
                except LinkError:
                    await asyncio.sleep(CONNECT_S)
        await self._done.wait()
        if self._failure:
            raise StartError(f"the engine cannot generate: its first token was refused: {self._failure}")

    def take(self, codec: Codec, step: object) -> None:
        """Look for our requests' ends in a step."""
        if not self._waiting:
            return
        for delta in getattr(step, "outputs", ()):
            if delta.request_id in self._waiting and delta.finish_reason is not None:
                del self._waiting[delta.request_id]
                finish, _, error = codec.finish(delta)
                if finish not in (Finish.LENGTH, Finish.STOP):
                    self._failure = error or f"it ended with {finish.value}"
                if not self._waiting:
                    self._done.set()

    def _request(self, codec: Codec, wire_id: str) -> Frames:
        facts = self._facts
        token = facts.bos_token_id
        if token is None or not 0 <= token < max(facts.vocab_size, 1):
            token = min(1, max(facts.vocab_size - 1, 0))
        sampling = Sampling(temperature=0.0, max_tokens=1, ignore_eos=True, eos_token_ids=list(facts.eos_token_ids))
        return codec.add(
            GenerateCall(wire_id=wire_id, prompt_token_ids=[token], sampling=sampling, arrival_time=time.time())
        )
