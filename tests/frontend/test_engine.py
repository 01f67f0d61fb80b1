"""The front end's view of an engine that has connected but is not up yet."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import zmq

from bridge.engine import Engine, State
from bridge.plugins.sim.model import facts_of
from bridge.plugins.sim.options import parse
from bridge.wire.link import Slot, slot_addresses


async def test_an_engine_that_loads_costs_nothing_and_its_early_death_is_heard(tmp_path: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    slot = Slot(0, *slot_addresses(tmp_path, 0))
    deaths: list[str] = []
    engine = Engine(
        "sim",
        slot,
        wire_prefix="0.1",
        max_in_flight=10,
        on_death=deaths.append,
    )
    push = context.socket(zmq.PUSH)
    push.connect(slot.output_address)
    push.send(b"ENGINE_CORE_DEAD")
    await asyncio.sleep(0.1)
    before = time.process_time()
    await asyncio.sleep(1.0)
    assert time.process_time() - before < 0.3, "it polls"
    assert engine.state is State.LOADING and not deaths
    engine.up([(b"\0\0", {"vllm_version": "0.32.0"})], facts_of(parse([])))
    assert len(deaths) == 1
    engine.close()
    push.close(0)
    context.destroy(0)
