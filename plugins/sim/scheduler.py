"""Which requests a step works on and what it emits: FCFS queueing, chunked prefill, KV capacity, preemption, statistics.

A request's tokens are made ahead, up to the end of the block being filled, so that a step over N streams costs two list
appends for most of them; at a block's end, at the last token and at the first one it takes the slow path.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from enum import Enum
from typing import Any

import msgspec

from bridge.plugins.sim.blocks import BlockPool, chain
from bridge.plugins.sim.encode import OutputEncoder, encode
from bridge.plugins.sim.live import Limits, Live, Phase
from bridge.plugins.sim.requests import Add, EngineDied
from bridge.plugins.sim.tokens import Vocabulary
from bridge.plugins.sim.versions import PREFIX_STATS_KEYS, STATS_KEYS, keys_at

STOP, LENGTH, ABORT, ERROR = 0, 1, 2, 3
"""vLLM's FinishReason; 4 (repetition) cannot happen here."""

QUEUED, SCHEDULED, PREEMPTED = 1, 2, 3
"""vLLM's EngineCoreEventType."""

REMEMBERED = 10_000
"""Ids of ended requests that `Scheduler.state` still lists."""


class Pause(Enum):
    """What a paused scheduler still does."""

    RUNNING = "running"
    NO_NEW = "no new"
    FROZEN = "frozen"


class Batch(msgspec.Struct):
    """The outputs of one step for one client: `parts` joins to `count` outputs."""

    parts: list[bytes]
    count: int


class Scheduler:
    """All requests of the engine. Time is passed in; nothing here waits."""

    def __init__(
        self, limits: Limits, vocab: Vocabulary, encoder: OutputEncoder, release: tuple[int, int], log_stats: bool
    ) -> None:
        self.limits = limits
        self.vocab = vocab
        self.log_stats = log_stats
        self.tokens_per_step = 1
        self.pause = Pause.RUNNING
        self.pool = BlockPool(limits.num_gpu_blocks, limits.block_size)
        self.requests: dict[str, Live] = {}
        self.waiting: deque[Live] = deque()
        self.finished: deque[str] = deque(maxlen=REMEMBERED)
        self.aborted: deque[str] = deque(maxlen=REMEMBERED)
        self.counts = {"added": 0, "finished": 0, "aborted": 0, "preempted": 0, "steps": 0, "outputs": 0}
        self._encoder = encoder
        self._prefilling: list[Live] = []
        self._ready: list[Live] = []
        self._decoding: dict[int, list[Live]] = {}
        self._dirty: set[int] = set()
        self._unflushed = False
        self._admissions = 0
        self._stats_keys = keys_at(STATS_KEYS, release)
        self._prefix_keys = keys_at(PREFIX_STATS_KEYS, release)
        self._prefix_stats: dict[str, int] = {}
        self._cache_reset = False

    @property
    def running(self) -> int:
        """Requests that hold a place in the batch."""
        return len(self._prefilling) + sum(map(len, self._decoding.values()))

    def has_work(self) -> bool:
        """Whether a step would do something; a request that ended leaves one more step behind it, as on vLLM."""
        if self._unflushed:
            return True
        if self.pause is Pause.FROZEN:
            return False
        return bool(self.running or (self.waiting and self.pause is Pause.RUNNING))

    def add(self, add: Add, now: float) -> None:
        """Queue a request; raises `EngineDied` for a live id and for a pooling request."""
        if add.pooling_params is not None:
            raise EngineDied(f"request {add.request_id}: a pooling task on a generation model")
        if add.request_id in self.requests:
            raise EngineDied(f"request {add.request_id}: the id is already alive")
        request = Live(add, self.vocab, self.limits, self._encoder.prefix(add.request_id))
        self._event(request, QUEUED, now)
        self.requests[add.request_id] = request
        self.waiting.append(request)
        self.counts["added"] += 1
        if add.abort_immediately:
            self.abort([add.request_id])

    def abort(self, request_ids: Iterable[str] | None) -> list[Live]:
        """Drop requests (None: all) without a terminal output; unknown ids pass. Returns those that were alive."""
        ids = list(self.requests) if request_ids is None else list(dict.fromkeys(request_ids))
        gone = [self.requests.pop(request_id) for request_id in ids if request_id in self.requests]
        if not gone:
            return gone
        waiting = any(request.phase is Phase.WAITING for request in gone)
        for request in gone:
            self._leave(request)
            self.aborted.append(request.request_id)
            self.counts["aborted"] += 1
        if waiting:
            self.waiting = deque(request for request in self.waiting if request.phase is not Phase.GONE)
        self._prefilling = [request for request in self._prefilling if request.phase is not Phase.GONE]
        self._sweep()
        self._unflushed = True
        return gone

    def schedule(self, now: float) -> tuple[int, int]:
        """Begin a step: (requests in the batch, prompt tokens it computes). Raises `EngineDied`."""
        self._unflushed = False
        self._ready = []
        if self.pause is Pause.FROZEN:
            return 0, 0
        decoding = sum(map(len, self._decoding.values()))
        budget = max(0, self.limits.max_num_batched_tokens - decoding * self.tokens_per_step)
        before = budget
        for request in self._prefilling:
            budget -= self._prefill(request, budget)
        while self.waiting and budget > 0 and self.pause is Pause.RUNNING:
            request = self.waiting[0]
            if self.running >= self.limits.max_num_seqs or not self._admit(request, now):
                break
            self.waiting.popleft()
            self._prefilling.append(request)
            budget -= self._prefill(request, budget)
        return self.running, before - budget

    def complete(self, now: float) -> dict[int, Batch]:
        """End the step that `schedule` began: outputs by client, the client of the oldest running request first."""
        self.counts["steps"] += 1
        if self._ready:
            self._prefilling = [request for request in self._prefilling if request.todo]
            for request in self._ready:
                if request.phase is Phase.PREFILL:
                    request.phase = Phase.DECODE
                    request.stop_at = request.index
                    self._decoding.setdefault(request.client, []).append(request)
        batches = {}
        if self.pause is not Pause.FROZEN:
            groups = sorted(self._decoding.items(), key=lambda group: group[1][0].sequence)
            for client, group in groups:
                parts = self._step(group, now)
                if parts:
                    batches[client] = Batch(parts, len(parts) // 2)
                    self.counts["outputs"] += len(parts) // 2
        self._sweep()
        return batches

    def stats(self) -> bytes | None:
        """The encoded scheduler statistics since the last call, or None when they are off."""
        if not self.log_stats:
            return None
        prefix: dict[str, Any] = {name: self._prefix_stats.get(name, 0) for name in self._prefix_keys}
        prefix["reset"] = self._cache_reset
        if "hits_by_source" in prefix:
            prefix["hits_by_source"] = {}
        self._prefix_stats = {}
        self._cache_reset = False
        values: dict[str, Any] = {
            "num_running_reqs": self.running,
            "num_waiting_reqs": len(self.waiting),
            "num_skipped_waiting_reqs": 0,
            "num_kv_fetch_reqs_by_stage": {"waiting_to_start": 0, "in_progress": 0, "completed_waiting": 0},
            "step_counter": 0,
            "current_wave": 0,
            "kv_cache_usage": self.pool.usage,
            "prefix_cache_stats": prefix,
            "kv_cache_eviction_events": [],
            "waiting_lora_adapters": {},
            "running_lora_adapters": {},
        }
        return encode({name: values.get(name) for name in self._stats_keys})

    def reset_prefix_cache(self, preempt: bool, now: float) -> bool:
        """Forget cached blocks; with `preempt` running requests go back to the queue first. False when blocks are held."""
        if preempt:
            for request in sorted(self._in_batch(), key=lambda request: request.sequence, reverse=True):
                self._preempt(request, now)
            self._prefilling = []
            self._sweep()
        done = self.pool.reset()
        self._cache_reset = self._cache_reset or done
        return done

    def state(self) -> dict[str, Any]:
        """What a test asks about: counts, and the ids alive and lately ended."""
        running = self._in_batch()
        return {
            "running": len(running),
            "waiting": len(self.waiting),
            "running_ids": [request.request_id for request in running],
            "waiting_ids": [request.request_id for request in self.waiting],
            "finished_ids": list(self.finished),
            "aborted_ids": list(self.aborted),
            "kv_blocks_used": self.pool.used,
            "paused": self.pause is not Pause.RUNNING,
            **self.counts,
        }

    def _in_batch(self) -> list[Live]:
        decoding = (request for group in self._decoding.values() for request in group)
        return [*self._prefilling, *(request for request in decoding if request.phase is Phase.DECODE)]

    def _admit(self, request: Live, now: float) -> bool:
        if request.fatal is not None:
            raise EngineDied(f"request {request.request_id}: {request.fatal}")
        size = self.limits.block_size
        total = request.prompt_tokens + request.produced
        hits = 0 if request.skip_cache else self.pool.hits(request.chain[: (total - 1) // size])
        if not self.pool.take(request.chain[:hits], -(-total // size) - hits):
            return False
        request.named = request.chain[:hits]
        request.nameless = -(-total // size) - hits
        for digest in request.chain[hits:]:
            self._name(request, digest)
        request.todo = total - hits * size
        preempted = "preempted_" if request.started else ""
        for name, value in (("requests", 1), ("queries", total), ("hits", hits * size)):
            self._prefix_stats[preempted + name] = self._prefix_stats.get(preempted + name, 0) + value
        if not request.started:
            request.cached = hits * size
        request.phase = Phase.PREFILL
        self._admissions += 1
        request.sequence = self._admissions
        self._event(request, SCHEDULED, now)
        return True

    def _prefill(self, request: Live, budget: int) -> int:
        tokens = min(request.todo, budget)
        request.todo -= tokens
        if request.todo == 0 and tokens:
            self._ready.append(request)
        return tokens

    def _step(self, group: list[Live], now: float) -> list[bytes]:
        """(prefix, body) pairs of one client's requests, flattened."""
        parts: list[bytes] = []
        append = parts.append
        for request in group:
            index = request.index
            if index != request.stop_at:
                append(request.prefix)
                append(request.bodies[index])
                request.index = index + 1
            else:
                body = self._turn(request, now)
                if body is not None:
                    append(request.prefix)
                    append(body)
        return parts

    def _turn(self, request: Live, now: float) -> bytes | None:
        """The next output of a request that is at its first token, its last one, or out of tokens made ahead."""
        if request.phase is not Phase.DECODE:
            return None
        if request.index == len(request.bodies) and not self._make_ahead(request, now):
            return None
        body = request.bodies[request.index]
        request.index += 1
        last = request.finish is not None and request.index == len(request.bodies)
        values: dict[str, bytes] = {}
        if last:
            values["finish_reason"] = encode(request.finish)
            values["stop_reason"] = request.stop_reason
        if request.events:
            values["events"] = encode(request.events)
            request.events = []
        if not request.started:
            request.started = True
            values["prefill_stats"] = encode(self._prefill_stats(request))
        if values:
            body = self._encoder.retail(body, request.trace_headers, values)
        if last:
            del self.requests[request.request_id]
            self._leave(request)
            self.finished.append(request.request_id)
            self.counts["finished"] += 1
            self._unflushed = True
        else:
            request.stop_at = len(request.bodies) - (request.finish is not None)
        return body

    def _make_ahead(self, request: Live, now: float) -> bool:
        """Make tokens to the end of the block; False when no block could be had and the request itself gave way."""
        size = self.limits.block_size
        if self.limits.prefix_caching:
            while len(request.pending) >= size:
                parent = request.chain[-1] if request.chain else request.root
                digest = chain(parent, request.pending[:size], size)[0]
                del request.pending[:size]
                request.chain.append(digest)
                self._name(request, digest)
        total = request.prompt_tokens + request.produced
        per_step = self.tokens_per_step
        count = max(1, (size - total % size) // per_step) * per_step
        count = min(count, request.limit - request.produced)
        room = min(total + count, self.limits.max_model_len)
        needed = -(-room // size) - len(request.named) - request.nameless
        while needed > 0 and not self.pool.take((), needed):
            victim = max(self._in_batch(), key=lambda other: other.sequence)
            self._preempt(victim, now)
            if victim is request:
                return False
        request.nameless += max(0, needed)
        tokens = request.stream.take(count)
        if request.stop_ids:
            tokens = self._cut(request, tokens)
        request.produced += len(tokens)
        if request.finish is None and request.produced >= request.limit:
            request.finish = LENGTH
        if self.limits.prefix_caching:
            request.pending.extend(tokens)
        request.bodies = self._encoder.bodies(tokens, per_step, request.trace_headers)
        request.index = 0
        return True

    def _cut(self, request: Live, tokens: list[int]) -> list[int]:
        """Tokens up to the first stop, which stays in. EOS names no stop reason, a stop id names itself."""
        stops = request.stop_ids
        for position, token in enumerate(tokens):
            if token in stops:
                request.finish = STOP
                request.stop_reason = stops[token]
                return tokens[: position + 1]
        return tokens

    def _prefill_stats(self, request: Live) -> dict[str, int]:
        prompt, cached = request.prompt_tokens, request.cached
        return {
            "num_prompt_tokens": prompt,
            "num_computed_tokens": prompt - cached,
            "num_cached_tokens": cached,
            "num_local_cached_tokens": cached,
            "num_external_cached_tokens": 0,
            "num_cache_creation_tokens": max(0, min(len(request.chain) * self.limits.block_size, prompt) - cached),
        }

    def _name(self, request: Live, digest: bytes) -> None:
        if self.pool.name(digest):
            request.nameless -= 1
            request.named.append(digest)

    def _release(self, request: Live) -> None:
        self.pool.release(request.named, request.nameless)
        request.named, request.nameless = [], 0

    def _leave(self, request: Live) -> None:
        if request.phase is Phase.DECODE:
            self._dirty.add(request.client)
        request.phase = Phase.GONE
        self._release(request)

    def _preempt(self, request: Live, now: float) -> None:
        if request.phase is Phase.DECODE:
            self._dirty.add(request.client)
        else:
            self._prefilling = [other for other in self._prefilling if other is not request]
        self._release(request)
        request.phase = Phase.WAITING
        request.stop_at = request.index
        self.waiting.appendleft(request)
        self.counts["preempted"] += 1
        self._event(request, PREEMPTED, now)

    def _sweep(self) -> None:
        """Take requests that left the batch out of the groups they were stepped in."""
        for client in self._dirty:
            group = [request for request in self._decoding.get(client, ()) if request.phase is Phase.DECODE]
            if group:
                self._decoding[client] = group
            else:
                self._decoding.pop(client, None)
        self._dirty.clear()

    def _event(self, request: Live, kind: int, now: float) -> None:
        if self.log_stats:
            request.events.append({"type": kind, "timestamp": now})


def ids_of(value: Any) -> Collection[str]:
    """The request ids of an ABORT's payload; raises `EngineDied` when it holds none, as vLLM's busy loop does."""
    if isinstance(value, str):
        return (value,)
    try:
        return set(value)
    except TypeError:
        raise EngineDied(f"an ABORT that holds a {type(value).__name__}, not request ids") from None
