"""An engine on vLLM's wire that costs next to nothing: `python -m tests.bench.engine --zmq-handshake-address A --pulse P`.

Every running request gets one token a step, and it is the number of the step plus an offset that follows from the first
id of the prompt (`pulse`), so that a client knows which step a token is from and sees a lost or doubled one. The rest of a
prompt is not read. Messages have every field vLLM 0.32 sends, scheduler statistics included.
"""

from __future__ import annotations

import argparse
import struct
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

from bridge.plugins.sim.encode import OutputEncoder, encode
from bridge.plugins.sim.sockets import Dial, Inbox, Outbox
from bridge.plugins.sim.versions import READY_KEYS, STATS_KEYS, keys_at
from bridge.wire.tensors import RAW_VIEW
from bridge.wire.vllm.layouts import for_version
from tests.bench.pulse import STEPS, VOCABULARY, Pulse, offset_of, token_of

VERSION = "0.32.0"
RELEASE = (0, 32)
CONTEXT = 131072
LENGTH = 1
LONGEST_WAIT_MS = 500


class Sampling(msgspec.Struct, gc=False):
    """What this engine reads of SamplingParams."""

    max_tokens: int | None = None
    logprobs: int | None = None


class Add(msgspec.Struct, array_like=True, gc=False):
    """What this engine reads of EngineCoreRequest."""

    request_id: str
    prompt_token_ids: msgspec.Raw
    mm_features: msgspec.Raw
    sampling_params: Sampling
    pooling_params: msgspec.Raw
    arrival_time: float
    lora_request: msgspec.Raw | None = None
    cache_salt: msgspec.Raw | None = None
    data_parallel_rank: msgspec.Raw | None = None
    prompt_embeds: msgspec.Raw | None = None
    prompt_is_token_ids: msgspec.Raw | None = None
    client_index: int = 0


class Tails:
    """What follows the tokens in an output, by where it stands; `bodies` are whole outputs of the steps between."""

    def __init__(self, encoder: OutputEncoder, tokens: list[bytes], more: dict[str, bytes]) -> None:
        prefill, last = {"prefill_stats": encode(_prefill_stats())}, {"finish_reason": encode(LENGTH)}
        plain = encoder.tail(more)
        self.bodies = [token + plain for token in tokens]
        self.first = encoder.tail({**more, **prefill})
        self.last = encoder.tail({**more, **last})
        self.only = encoder.tail({**more, **prefill, **last})


Running = tuple[bytes, int, Tails]
"""The encoded start of a request's outputs, its offset, and what its tokens come with."""


class Client:
    """The requests of one front end, by id. `fresh` ones have had no output yet."""

    def __init__(self) -> None:
        self.fresh: dict[str, Running] = {}
        self.running: dict[str, Running] = {}


class Engine:
    """One rank."""

    def __init__(self, address: str, index: int, pulse: Pulse) -> None:
        layouts = for_version(VERSION)
        self._encoder = OutputEncoder(
            layouts.order("EngineCoreOutputs"), layouts.order("EngineCoreOutput"), index, VOCABULARY
        )
        self._pulse = pulse
        tokens = [b"\x91" + encode(token_of(step, 0)) for step in range(STEPS)]
        self._tokens = tokens + tokens
        self._tails = {None: Tails(self._encoder, self._tokens, {})}
        self._clients: dict[int, Client] = {}
        self._owner: dict[str, Client] = {}
        self._ends: dict[int, list[str]] = {}
        self._step = 0
        self._add = msgspec.msgpack.Decoder(Add).decode
        self._any = msgspec.msgpack.Decoder().decode
        self._connect(address, index)

    def _connect(self, address: str, index: int) -> None:
        context: Any = zmq.Context()
        dial = Dial(context, address, index)
        dial.say("HELLO")
        while (addresses := dial.receive_init()) is None:
            dial.socket.poll(LONGEST_WAIT_MS)
        self._outbox = Outbox(context, addresses.outputs)
        self._inbox = Inbox(context, addresses.inputs, dial.identity, encode(ready_map(index)))
        dial.say("READY")
        dial.close()
        self._poller = zmq.Poller()
        for socket in self._inbox.sockets:
            self._poller.register(socket, zmq.POLLIN)

    def run(self) -> None:
        """Until killed."""
        due = 0.0
        while True:
            if not self._owner:
                self._poller.poll(LONGEST_WAIT_MS)
                self._read()
                due = time.monotonic()
                continue
            due = max(due + self._pulse.step_us / 1e6, time.monotonic())
            while (left := due - time.monotonic()) > 0:
                if left < 0.001:
                    time.sleep(left)
                elif self._poller.poll(int(left * 1000)):
                    self._read()
            self._read()
            self._emit()

    def _read(self) -> None:
        for kind, payload in self._inbox.receive():
            if kind == b"\x00":
                self._start(self._add(payload))
            elif kind == b"\x01":
                for request_id in self._any(payload):
                    self._drop(request_id)
            elif kind == b"\x03":
                client, call_id, method, _ = self._any(payload)
                value = ["generate"] if method == "get_supported_tasks" else True
                self._outbox.send(client, self._encoder.reply(time.monotonic(), call_id, None, value))

    def _start(self, add: Add) -> None:
        client = self._clients.setdefault(add.client_index, Client())
        offset = offset_of(_first_id(bytes(add.prompt_token_ids)))
        count = add.sampling_params.logprobs
        if count not in self._tails:
            self._tails[count] = Tails(self._encoder, self._tokens, {"new_logprobs": _logprobs(count or 0)})
        client.fresh[add.request_id] = (self._encoder.prefix(add.request_id), offset, self._tails[count])
        self._owner[add.request_id] = client
        tokens = add.sampling_params.max_tokens or 1
        self._ends.setdefault(self._step + tokens - 1, []).append(add.request_id)

    def _drop(self, request_id: str) -> None:
        client = self._owner.pop(request_id, None)
        if client is not None:
            client.fresh.pop(request_id, None)
            client.running.pop(request_id, None)

    def _emit(self) -> None:
        """One message to each front end that has requests."""
        step = self._step
        self._step = step + 1
        at = step % STEPS
        tokens = self._tokens
        ending = self._ends.pop(step, ())
        stats: dict[str, bytes] = {"scheduler_stats": encode(_stats(len(self._owner)))}
        for index, client in self._clients.items():
            count = len(client.running) + len(client.fresh)
            if not count:
                continue
            parts: list[bytes] = []
            for request_id in ending:
                if self._owner.get(request_id) is client:
                    found = client.running.pop(request_id, None)
                    if found is not None:
                        parts += (found[0], tokens[at + found[1]], found[2].last)
                    else:
                        found = client.fresh.pop(request_id)
                        parts += (found[0], tokens[at + found[1]], found[2].only)
                    del self._owner[request_id]
            parts += [prefix + tails.bodies[at + offset] for prefix, offset, tails in client.running.values()]
            if client.fresh:
                for prefix, offset, tails in client.fresh.values():
                    parts += (prefix, tokens[at + offset], tails.first)
                client.running.update(client.fresh)
                client.fresh.clear()
            message = self._encoder.message(time.monotonic(), stats, parts, count)
            stats = {}
            self._pulse.mark(step, time.monotonic_ns())
            self._outbox.send(index, message)


def _first_id(prompt: bytes) -> int:
    """The first element of an encoded array of non-negative ids."""
    start = {0xDC: 3, 0xDD: 5}.get(prompt[0], 1)
    width = {0xCC: 1, 0xCD: 2, 0xCE: 4}.get(prompt[start], 0)
    return int.from_bytes(prompt[start + 1 : start + 1 + width], "big") if width else prompt[start]


def _logprobs(count: int) -> bytes:
    """LogprobsLists of one token with `count` alternatives, always the same ones, as vLLM 0.32 sends small tensors."""
    width = count + 1
    ids = struct.pack(f"<{width}i", *range(20_000, 20_000 + width))
    values = struct.pack(f"<{width}f", *(-0.1 * (index + 1) for index in range(width)))
    ext = msgspec.msgpack.Ext
    tensors = [["<i4", [1, width], ext(RAW_VIEW, ids)], ["<f4", [1, width], ext(RAW_VIEW, values)]]
    return encode([*tensors, ["<i8", [1], ext(RAW_VIEW, struct.pack("<q", 1))], None])


def _prefill_stats() -> dict[str, int]:
    return {
        "num_prompt_tokens": 128,
        "num_computed_tokens": 128,
        "num_cached_tokens": 0,
        "num_local_cached_tokens": 0,
        "num_external_cached_tokens": 0,
        "num_cache_creation_tokens": 128,
    }


def _stats(running: int) -> dict[str, Any]:
    values: dict[str, Any] = {
        "num_running_reqs": running,
        "num_waiting_reqs": 0,
        "num_skipped_waiting_reqs": 0,
        "num_kv_fetch_reqs_by_stage": {"waiting_to_start": 0, "in_progress": 0, "completed_waiting": 0},
        "step_counter": 0,
        "current_wave": 0,
        "kv_cache_usage": 0.5,
        "prefix_cache_stats": {
            "reset": False,
            "requests": 0,
            "queries": 0,
            "hits": 0,
            "preempted_requests": 0,
            "preempted_queries": 0,
            "preempted_hits": 0,
            "hits_by_source": {},
        },
        "kv_cache_eviction_events": [],
        "waiting_lora_adapters": {},
        "running_lora_adapters": {},
    }
    return {name: values.get(name) for name in keys_at(STATS_KEYS, RELEASE)}


def ready_map(index: int) -> dict[str, Any]:
    """What this engine settled on, as vLLM 0.32 says it."""
    values: dict[str, Any] = {
        "max_model_len": CONTEXT,
        "num_gpu_blocks": 1 << 20,
        "block_size": 16,
        "dtype": "bfloat16",
        "vllm_version": VERSION,
        "world_size": 1,
        "data_parallel_size": 1,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "data_parallel_rank": index,
        "max_num_seqs": 16384,
        "max_num_batched_tokens": 131072,
        "instance_id": "bench",
        "supports_lora": False,
        "max_loras": 0,
        "kv_cache_size_tokens": 1 << 24,
        "kv_cache_max_concurrency": 128.0,
        "enable_sleep_mode": False,
        "supports_draft_weight_updates": False,
        "effective_attention_block_size": 16,
    }
    return {name: values.get(name) for name in keys_at(READY_KEYS, RELEASE)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--zmq-handshake-address", required=True)
    parser.add_argument("--zmq-engine-index", type=int, default=0)
    parser.add_argument("--pulse", type=Path, required=True, help="the file of `pulse`, made by the bench")
    options, _ = parser.parse_known_args(arguments)
    Engine(options.zmq_handshake_address, options.zmq_engine_index, Pulse(options.pulse)).run()


if __name__ == "__main__":
    sys.exit(main())
