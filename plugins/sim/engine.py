"""The simulated engine: handshake, then a loop of steps, as vLLM's busy loop and its two I/O threads would do them."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import zmq

from bridge.plugins.sim import faults, requests, versions
from bridge.plugins.sim.control import ControlServer
from bridge.plugins.sim.encode import OutputEncoder, encode
from bridge.plugins.sim.live import Limits
from bridge.plugins.sim.model import facts_of, vocabulary_of
from bridge.plugins.sim.options import Options
from bridge.plugins.sim.scheduler import ABORT, ERROR, Batch, Scheduler, ids_of
from bridge.plugins.sim.sockets import Addresses, Context, Dial, DialError, Inbox, Outbox
from bridge.plugins.sim.utilities import Deferred, Utilities
from bridge.plugins.sim.waiting import Stopped, Waiter
from bridge.wire.vllm.layouts import for_version

ADD, ABORT_TYPE, START_DP_WAVE, UTILITY, EXECUTOR_FAILED, WAKEUP = (bytes((number,)) for number in range(6))

IDLE_S = 1.0
LOAD_LINES = 5
REPORT_AFTER_S = 5.0
FLUSH_S = 0.02
"""What a message needs to leave the process before a fault ends it."""

PHANTOM_ID = "sim-nobody-sent-this"
PHANTOM_TOKEN = 3

Event = tuple[bytes, Any]
"""A decoded input: its type byte, and an `Add`, an ABORT's payload or a utility call."""


class LoadFailed(Exception):
    """The engine died while it loaded; exit code 1."""


class Engine:
    """One rank. `run` returns the process's exit code; everything happens on the calling (main) thread."""

    def __init__(self, options: Options) -> None:
        """Raises `OptionsError` when the model folder or a size cannot be used."""
        assert options.zmq_handshake_address is not None
        self.options = options
        self._handshake_address = options.zmq_handshake_address
        self._facts = facts_of(options)
        vocab = vocabulary_of(self._facts)
        layouts = for_version(options.wire_version)
        self._encoder = OutputEncoder(
            layouts.order("EngineCoreOutputs"), layouts.order("EngineCoreOutput"), options.zmq_engine_index, vocab.size
        )
        limits = Limits(
            max_model_len=self._facts.max_model_len,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            num_gpu_blocks=options.num_gpu_blocks,
            block_size=options.block_size,
            prefix_caching=options.prefix_caching,
            eos_after=options.eos_after,
        )
        self.scheduler = Scheduler(limits, vocab, self._encoder, options.release, options.log_stats)
        self.scheduler.tokens_per_step = options.tokens_per_step
        self.now: Callable[[], float] = time.monotonic
        self._step_s = options.step_ms / 1000
        self._utilities = Utilities(self)
        self._faults = faults.Schedule(options.faults)
        self._waiter = Waiter(exit_with_parent=options.exit_with_parent, drain=options.shutdown_timeout > 0)
        self._events: deque[Event] = deque()
        self._eager_aborts: list[Any] = []
        self._idle_calls: list[Callable[[], None]] = []
        self._adds = 0
        self._steps = 0
        self._due = 0.0
        self._hung_until = 0.0
        self._ready_at = math.inf
        self._drain_until = math.inf
        self._phase = "starting"
        self._inbox: Inbox
        self._outbox: Outbox

    def run(self) -> int:
        context: Context = zmq.Context()
        linger_ms = 0
        try:
            if self.options.control_address is not None:
                server = ControlServer(
                    context, self.options.control_address, {"state": self.state, "fault": self.order_fault}
                )
                self._waiter.attend(server.socket, server.serve)
            self._start(context)
            self._loop()
            return 0
        except requests.EngineDied as death:
            self._say(f"fatal: {death}")
            self._outbox.send_death()
            linger_ms = 4000
            return self._exit_after_death()
        except (DialError, LoadFailed) as error:
            self._say(f"error: {error}")
            return 1
        except Stopped as stop:
            self._say(f"ends: {stop}")
            return 0
        finally:
            self._waiter.close()
            context.destroy(linger_ms)

    def state(self) -> dict[str, Any]:
        """Counts and ids, and `phase`: starting, loading, ready."""
        return {"phase": self._phase, **self.scheduler.state()}

    def order_fault(self, kind: str, value: float | str | None = None) -> None:
        """Let a fault happen as soon as the answer to this order has left; raises ValueError for an unknown one."""
        fault = faults.make(kind, value)
        self._faults.add(msgspec.structs.replace(fault, when="seconds", amount=self.now() - self._ready_at + FLUSH_S))

    def abort_aloud(self, request_ids: Iterable[str] | None) -> None:
        """Abort with terminal outputs (finish reason abort), one message for each client."""
        by_client: dict[int, list[str]] = {}
        for request in self.scheduler.abort(request_ids):
            by_client.setdefault(request.client, []).append(request.request_id)
        for client, ids in by_client.items():
            self._send(client, self._encoder.finished(self.now(), ids, ABORT))

    # start

    def _start(self, context: Context) -> None:
        options = self.options
        dial = Dial(context, self._handshake_address, options.zmq_engine_index)
        self._say(f"dials {self._handshake_address} as engine {options.zmq_engine_index}, vLLM {options.wire_version}")
        dial.say("HELLO")
        addresses = self._await_init(dial)
        self._phase = "loading"
        self._load()
        self._outbox = Outbox(context, addresses.outputs)
        self._inbox = Inbox(context, addresses.inputs, dial.identity, encode(self._ready_map()))
        for socket in self._inbox.sockets:
            self._waiter.watch(socket)
        dial.say("READY")
        dial.close()
        self._phase = "ready"
        self._ready_at = self.now()
        self._say(f"ready: {len(addresses.inputs)} pair(s) of sockets")

    def _await_init(self, dial: Dial) -> Addresses:
        started = self.now()
        deadline = started + self.options.init_timeout_s
        report = started + REPORT_AFTER_S
        self._waiter.watch(dial.socket)
        while True:
            addresses = dial.receive_init()
            if addresses is not None:
                self._waiter.unwatch(dial.socket)
                return addresses
            now = self.now()
            if now >= deadline:
                raise DialError(
                    f"nobody at {self._handshake_address} answered HELLO within {self.options.init_timeout_s:g} s "
                    "(--init-timeout-s)"
                )
            if now >= report:
                self._say(f"no answer to HELLO from {self._handshake_address} for {now - started:.0f} s")
                report += REPORT_AFTER_S
            self._waiter.wait(min(deadline, report))

    def _load(self) -> None:
        seconds, lines = self.options.load_seconds, LOAD_LINES
        for line in range(lines):
            if self.options.die_while_loading and line * 2 > lines:
                self._say("loading weights: shard 4 of 5 cannot be read")
                raise LoadFailed("the simulated engine failed while loading, as --die-while-loading asks")
            if seconds > 0 or self.options.die_while_loading:
                self._say(f"loading weights: {line * 100 // lines} %")
                self._waiter.sleep(seconds / lines)

    def _ready_map(self) -> dict[str, Any]:
        options = self.options
        tokens = options.num_gpu_blocks * options.block_size
        values: dict[str, Any] = {
            "max_model_len": self._facts.max_model_len,
            "num_gpu_blocks": options.num_gpu_blocks,
            "block_size": options.block_size,
            "dtype": self._facts.model_dtype or "bfloat16",
            "vllm_version": options.wire_version,
            "world_size": 1,
            "data_parallel_size": 1,
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "data_parallel_rank": options.zmq_engine_index,
            "max_num_seqs": options.max_num_seqs,
            "max_num_batched_tokens": options.max_num_batched_tokens,
            "instance_id": uuid.uuid4().hex[:8],
            "supports_lora": options.lora,
            "max_loras": 8 if options.lora else 0,
            "kv_cache_size_tokens": tokens,
            "kv_cache_max_concurrency": tokens / self._facts.max_model_len,
            "enable_sleep_mode": True,
            "supports_draft_weight_updates": False,
            "effective_attention_block_size": options.block_size,
        }
        return {name: values.get(name) for name in versions.keys_at(versions.READY_KEYS, options.release)}

    # the loop

    def _loop(self) -> None:
        scheduler = self.scheduler
        while True:
            now = self.now()
            self._apply_faults(now)
            if now < self._hung_until:
                self._waiter.wait(self._hung_until, inputs=False)
                continue
            self._keep_shutdown_timeout(now)
            self._handle_events()
            if scheduler.has_work():
                self._step()
            elif self._idle_calls:
                calls, self._idle_calls = self._idle_calls, []
                for call in calls:
                    call()
            elif self._waiter.terminating:
                raise Stopped("drained")
            else:
                self._due = 0.0
                if self._waiter.wait(now + IDLE_S):
                    self._gather()

    def _step(self) -> None:
        scheduler = self.scheduler
        now = self.now()
        running, prefill = scheduler.schedule(now)
        duration = self._step_seconds(running, prefill)
        begun = self._due if now - self._due < duration else now
        self._due = begun + duration
        while True:
            if self._waiter.wait(self._due):
                self._gather()
            if self.now() >= self._due:
                break
        for payload in self._eager_aborts:
            scheduler.abort(ids_of(payload))
        self._eager_aborts.clear()
        now = self.now()
        self._emit(scheduler.complete(now), now)

    def _step_seconds(self, running: int, prefill: int) -> float:
        if self._step_s == 0 or not running:
            return 0.0
        options = self.options
        computing = prefill / options.prefill_tps if options.prefill_tps else 0.0
        return self._step_s + running * options.per_request_ms / 1000 + computing

    def _emit(self, batches: dict[int, Batch], now: float) -> None:
        """One message for each client with outputs; the statistics ride on the first, else go to client 0 alone."""
        stats = self.scheduler.stats()
        values = {"weight_version": encode(self._utilities.weight_version)}
        with_stats = values if stats is None else {**values, "scheduler_stats": stats}
        if not batches:
            if stats is not None:
                self._send(0, self._encoder.message(now, with_stats))
            return
        self._steps += 1
        for client, batch in batches.items():
            parts, count = batch.parts, batch.count
            if self._outbox.take_fault("unknown_ids"):
                phantom = self._encoder.body([PHANTOM_TOKEN], self._encoder.tail({}))
                parts, count = [*parts, self._encoder.prefix(PHANTOM_ID), phantom], count + 1
            message = self._encoder.message(now, with_stats, parts, count)
            with_stats = values
            self._sent(client, self._outbox.send_outputs(client, message))

    # input

    def _gather(self) -> None:
        """What vLLM's input thread does: decode all that waits, refuse what cannot be prepared, queue the rest."""
        try:
            for frames in self._inbox.receive():
                self._decode(frames)
        except requests.InputDied as death:
            self._say(f"the input thread died: {death}; nothing that arrives from now on is read")
            self._close_inbox()

    def _decode(self, frames: list[bytes]) -> None:
        kind = frames[0]
        if len(kind) != 1 or kind > WAKEUP:
            raise requests.InputDied(f"unknown type frame {kind[:8]!r}")
        if len(frames) < 2:
            raise requests.InputDied(f"type {kind[0]} without a payload")
        if kind == ADD:
            add = requests.decode_add(frames[1])
            self._adds += 1
            try:
                requests.refuse_unusable(add)
            except requests.Refused as refusal:
                self._say(f"request {add.request_id} refused: {refusal}")
                self._send(add.client_index, self._encoder.finished(self.now(), [add.request_id], ERROR))
                return
            self._events.append((kind, add))
        elif kind == UTILITY:
            self._events.append((kind, requests.decode_utility(frames[1])))
        else:
            payload = requests.decode_any(frames[1])
            if kind == ABORT_TYPE:
                # Applied at the end of the step in progress, and again in its order among the events. As on vLLM, an
                # id added again before that step's end can be hit by the abort of its predecessor.
                self._eager_aborts.append(payload)
            self._events.append((kind, payload))

    def _handle_events(self) -> None:
        events = self._events
        while events:
            kind, value = events.popleft()
            if kind == ADD:
                if self._waiter.terminating:
                    self._send(value.client_index, self._encoder.finished(self.now(), [value.request_id], ABORT))
                else:
                    self.scheduler.add(value, self.now())
            elif kind == ABORT_TYPE:
                self.scheduler.abort(ids_of(value))
            elif kind == UTILITY:
                self._utility(*value)
            elif kind == EXECUTOR_FAILED:
                raise requests.EngineDied("a client sent type byte 4 (executor failed)")
        if not self.scheduler.has_work():
            self._eager_aborts.clear()

    def _utility(self, client: Any, call_id: Any, method: Any, args: Any) -> None:
        def answer(compute: Callable[[], Any]) -> None:
            failure, value = None, None
            try:
                value = compute()
            except Exception as error:
                failure = f"Call to {method} method failed: {error}"
            if isinstance(value, Deferred):
                finish = value.finish
                self._idle_calls.append(lambda: answer(finish))
                return
            self._send(client, self._encoder.reply(self.now(), call_id, failure, value))

        if self._waiter.terminating:
            self._send(client, self._encoder.reply(self.now(), call_id, "Server shutting down", None))
        else:
            answer(lambda: self._utilities.call(method, args))

    def _close_inbox(self) -> None:
        for socket in self._inbox.sockets:
            self._waiter.unwatch(socket)
        self._inbox.close()

    # output

    def _send(self, client: Any, message: bytes) -> None:
        self._sent(client, self._outbox.send(client, message))

    def _sent(self, client: Any, alive: bool) -> None:
        if not alive:
            self._say(
                f"the output thread died: client_index {client} has no output socket; nothing is sent from now on"
            )

    # faults and the end

    def _apply_faults(self, now: float) -> None:
        due = self._faults.due(
            requests=self._adds, steps=self._steps, seconds=now - self._ready_at, signals=self._waiter.signals
        )
        for fault in due:
            self._say(f"fault: {fault.kind} {fault.value:g}")
            self._apply(fault, now)

    def _apply(self, fault: faults.Fault, now: float) -> None:
        value = fault.value
        match fault.kind:
            case "exit":
                time.sleep(FLUSH_S)
                os._exit(int(value))
            case "kill":
                time.sleep(FLUSH_S)
                os.kill(os.getpid(), signal.SIGKILL)
            case "death_frame":
                raise requests.EngineDied("the fault death_frame")
            case "wedge":
                self._hung_until = math.inf
            case "hang_loop":
                self._hung_until = now + value
            case "wedge_input":
                self._close_inbox()
            case "wedge_output":
                self._outbox.close(4000)
            case "stats":
                self.scheduler.log_stats = value > 0
            case "tokens_per_step":
                self.scheduler.tokens_per_step = int(value)
            case "step_ms":
                self._step_s = value / 1000
            case kind:
                self._outbox.pending[kind] += int(value)

    def _keep_shutdown_timeout(self, now: float) -> None:
        if self._waiter.terminating:
            self._drain_until = min(self._drain_until, now + self.options.shutdown_timeout)
            if now >= self._drain_until:
                raise Stopped("the shutdown timeout passed with requests in flight")

    def _exit_after_death(self) -> int:
        try:
            self._waiter.sleep(self.options.exit_delay_s)
        except Stopped as stop:
            self._say(f"ends: {stop}")
        return 0

    def _say(self, text: str) -> None:
        print(f"sim engine {self.options.zmq_engine_index}: {text}", file=sys.stderr, flush=True)
