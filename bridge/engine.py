"""The front end's view of its engine: the slot, the codec, the ranks, the load, utility calls, and the step pump.

One object for the engine's life as this front end sees it; `up` and `down` are told by whoever owns the handshake (the
supervisor over the control channel, or `attach` in this process).
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from bridge.grpc.status import Code
from bridge.metrics import Meters
from bridge.refusal import Refusal, invalid
from bridge.requests import EngineCall, Request, RequestTable, Rich
from bridge.supervisor.ledger import Ledger
from bridge.wire.codec import Codec, Load, Reply
from bridge.wire.companion import Facts
from bridge.wire.engines import codec_for
from bridge.wire.errors import WireError
from bridge.wire.link import LinkError, Slot

log = logging.getLogger(__name__)

STEPS_PER_WAKEUP = 64
"""Output messages read before the loop gets a turn; what waits beyond is read in the next one."""

UNDECODABLE_LIMIT = 3
"""Steps in a row that do not decode before the link counts as broken."""


class State(enum.Enum):
    """Where the engine is, as this front end knows it."""

    LOADING = "loading"
    UP = "up"
    DOWN = "down"


class RankView:
    """One rank: its identity, ready map and last known load."""

    __slots__ = ("_load", "_read", "identity", "index", "ready", "unread")

    def __init__(self, identity: bytes, ready: dict[str, Any], read: Callable[[Any], Load | None]) -> None:
        """`read` takes the load out of a step, or raises `WireError`."""
        self.identity = identity
        self.index = int.from_bytes(identity, "little")
        self.ready = ready
        self.unread: Any = None
        """The last step that carried this rank's load, until somebody asks."""
        self._read = read
        self._load = Load(rank=self.index)

    @property
    def load(self) -> Load:
        step, self.unread = self.unread, None
        if step is not None:
            try:
                self._load = self._read(step) or self._load
            except WireError as error:
                log.warning("rank %d: %s", self.index, error)
        return self._load

    def take(self, load: Load) -> None:
        self._load, self.unread = load, None


class Engine:
    """One engine behind one slot. Everything runs on the event loop's thread."""

    def __init__(
        self,
        name: str,
        slot: Slot,
        *,
        wire_prefix: str,
        max_in_flight: int,
        on_death: Callable[[str], None],
        meters: Meters | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        """`on_death(reason)` is called when the slot itself learns of the end. Without `meters` nothing is measured.
        `ledger` keeps what is in flight for whoever cleans up after this process.
        """
        self.name = name
        self.slot = slot
        self.state = State.LOADING
        self.detail = "waiting for the engine"
        self.started_at = time.time()
        self.last_receive_at = 0.0
        self.ranks: list[RankView] = []
        self._wire_prefix = wire_prefix
        self._max_in_flight = max_in_flight
        self._cork: Callable[[], None] = lambda: None
        self._flush: Callable[[], None] = lambda: None
        self._on_death = on_death
        self._meters = meters
        self._ledger = ledger
        self.abort_elsewhere: Callable[[list[str]], None] = lambda request_ids: None
        """Told of client ids to abort that are not in flight here: another front end of this engine may have them."""
        self._codec: Codec | None = None
        self._table: RequestTable | None = None
        self._facts: Facts | None = None
        self._early: deque[list[bytes]] = deque()
        self._undecodable = 0
        self.undecodable_total = 0
        self._call_counter = 0
        self._calls: dict[int, asyncio.Future[Reply]] = {}
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(slot.output_fd, self._readable)
        self._rate_at = time.monotonic()
        self._rate_tokens = 0
        self._rate = 0.0

    def write_through(self, cork: Callable[[], None], flush: Callable[[], None]) -> None:
        """`cork` comes before a drain is rendered, and `flush` writes what was; until this is called nobody listens."""
        self._cork, self._flush = cork, flush

    # -- life --------------------------------------------------------------------------------------------------------

    def loading(self, detail: str) -> None:
        """An engine is being started; what the one before it sent is dropped."""
        if self.state is State.DOWN:
            self._readable()
            self.state = State.LOADING
        self.detail = detail

    def up(self, ranks: Sequence[tuple[bytes, dict[str, Any]]], facts: Facts) -> None:
        """Every rank answered and the facts are known: of the first engine, or of one that takes its place.

        Raises `LayoutError` when no codec fits the engine.
        """
        up = sorted(ranks)
        codec = self._codec = codec_for(self.name, up[0][1], facts.layouts, self.slot.index)
        self.ranks = [RankView(identity, ready, codec.load) for identity, ready in up]
        self._facts = facts
        self._table = RequestTable(
            self._codec,
            self.slot.send,
            self._wire_prefix,
            max_in_flight=self._max_in_flight,
            call_later=self._loop.call_later,
            meters=self._meters,
            ledger=self._ledger,
            counter=0 if self._table is None else self._table.counter,
        )
        self._undecodable = 0
        self._rate_tokens = 0
        for rank in self.ranks:
            self._table.per_rank[rank.identity] = 0
        self.state = State.UP
        self.detail = ""
        self._readable()

    def down(self, reason: str) -> None:
        """The engine is gone: every request and utility call ends now."""
        if self.state is State.DOWN:
            return
        self.state = State.DOWN
        self.detail = reason
        if self._table is not None:
            self._table.fail_all(Code.UNAVAILABLE, f"the engine is gone: {reason}")
        for future in self._calls.values():
            if not future.done():
                future.set_exception(Refusal(Code.UNAVAILABLE, f"the engine is gone: {reason}"))
        self._calls.clear()
        self._codec = None
        self._early.clear()
        self._flush()

    def close(self) -> None:
        self._loop.remove_reader(self.slot.output_fd)
        self.slot.close()

    @property
    def gone(self) -> bool:
        return self.state is State.DOWN

    @property
    def table(self) -> RequestTable:
        """The request table; raises `Refusal` UNAVAILABLE unless the engine is up."""
        if self.state is not State.UP or self._table is None:
            raise self._unavailable()
        return self._table

    @property
    def requests(self) -> RequestTable | None:
        """The request table, whatever the engine's state; None before it was up."""
        return self._table

    @property
    def facts(self) -> Facts:
        """The facts; raises `Refusal` UNAVAILABLE until the engine was up once."""
        if self._facts is None:
            raise self._unavailable()
        return self._facts

    @property
    def active_requests(self) -> int:
        return 0 if self._table is None else len(self._table)

    def _unavailable(self) -> Refusal:
        if self.state is State.DOWN:
            return Refusal(Code.UNAVAILABLE, f"the engine is gone: {self.detail}")
        return Refusal(Code.UNAVAILABLE, f"the engine is not ready: {self.detail}")

    # -- requests ----------------------------------------------------------------------------------------------------

    def abort(self, request_ids: Sequence[str]) -> list[str]:
        """Abort requests by their clients' ids; returns those that are not in flight here, which siblings are told.

        Raises `Refusal` unless up.
        """
        table = self.table
        unknown = [request_id for request_id in request_ids if not table.abort(request_id)]
        if unknown:
            self.abort_elsewhere(unknown)
        return unknown

    def abort_here(self, request_ids: Sequence[str]) -> None:
        """A sibling was asked to abort these and does not have them."""
        if self.state is State.UP and self._table is not None:
            for request_id in request_ids:
                self._table.abort(request_id)
            self._flush()

    def work(self) -> list[tuple[int, int, int]]:
        """(rank, sequences in flight, prompt tokens of those without output) for each rank."""
        table = self._table
        if self.state is not State.UP or table is None:
            return []
        return [
            (rank.index, table.per_rank.get(rank.identity, 0), table.waiting_prompt_tokens.get(rank.identity, 0))
            for rank in self.ranks
        ]

    def choose_rank(self, session: str = "") -> bytes:
        """The rank with the fewest live requests here, the lower index on a tie; always the same one for a session."""
        if len(self.ranks) == 1:
            return self.ranks[0].identity
        if session:
            return self.ranks[zlib.crc32(session.encode()) % len(self.ranks)].identity
        counts = self.table.per_rank
        return min(self.ranks, key=lambda rank: (counts[rank.identity], rank.load.waiting, rank.index)).identity

    def pinned_rank(self, field: str, index: int) -> bytes:
        """The rank a request names; raises `Refusal` INVALID_ARGUMENT when the engine has no such rank."""
        for rank in self.ranks:
            if rank.index == index:
                return rank.identity
        raise invalid(field, index, "one of " + ", ".join(str(rank.index) for rank in self.ranks))

    def submit(
        self,
        request: Request,
        rank: bytes,
        calls: list[EngineCall],
        rich: Callable[[], Rich] | None = None,
    ) -> None:
        """Send a checked request to `rank`, one call a sequence; raises `Refusal`."""
        try:
            self.table.admit(request, rank, calls, rich)
        except LinkError as error:
            raise Refusal(Code.UNAVAILABLE, str(error)) from None

    async def utility(self, method: str, args: Sequence[Any] = (), *, timeout_s: float = 60.0) -> list[Reply]:
        """Call an engine method on every rank; raises `Refusal` UNAVAILABLE or DEADLINE_EXCEEDED."""
        self.table  # noqa: B018  (refuses unless up)
        assert self._codec is not None
        futures: dict[int, asyncio.Future[Reply]] = {}
        for rank in self.ranks:
            self._call_counter += 1
            call_id = self._call_counter
            futures[call_id] = self._calls[call_id] = self._loop.create_future()
            try:
                self.slot.send(rank.identity, self._codec.utility(call_id, method, args))
            except LinkError as error:
                for pending in futures:
                    del self._calls[pending]
                raise Refusal(Code.UNAVAILABLE, str(error)) from None
        try:
            async with asyncio.timeout(timeout_s):
                return list(await asyncio.gather(*futures.values()))
        except TimeoutError:
            raise Refusal(
                Code.DEADLINE_EXCEEDED, f"the engine did not answer {method} within {timeout_s:g} s"
            ) from None
        finally:
            for call_id in futures:
                self._calls.pop(call_id, None)

    # -- load --------------------------------------------------------------------------------------------------------

    def take_load(self, load: Load) -> None:
        """Load figures of one rank that reached slot 0, by way of the supervisor."""
        for rank in self.ranks:
            if rank.index == load.rank:
                rank.take(load)

    def tokens_per_second(self) -> float:
        """Output tokens a second since the previous reading at least a second ago; O(live requests)."""
        now = time.monotonic()
        elapsed = now - self._rate_at
        if elapsed >= 1.0 and self._table is not None:
            tokens = self._table.tokens_out
            self._rate = (tokens - self._rate_tokens) / elapsed
            self._rate_at, self._rate_tokens = now, tokens
        return self._rate

    # -- the step pump -----------------------------------------------------------------------------------------------

    def _readable(self) -> None:
        """Drain the output socket: all waiting steps first, then one render, then one write a connection."""
        codec, early, receive = self._codec, self._early, self.slot.receive
        if codec is None:
            # The engine connects before it is up; what it says so early (its death, at most) waits for the codec.
            while (frames := receive()) is not None:
                if self.state is State.LOADING:
                    early.append(frames)
            return
        steps = []
        for _ in range(STEPS_PER_WAKEUP):
            frames = early.popleft() if early else receive()
            if frames is None:
                break
            try:
                step = codec.step(frames)
            except WireError as error:
                self._undecodable_step(codec, frames, error)
                if self._codec is not codec:  # that was its end
                    break
                continue
            self._undecodable = 0
            if step.outputs:
                steps.append(step)
            self._take_extras(codec, step)
        else:
            self._loop.call_soon(self._readable)
        if steps and self._table is not None and self._codec is codec:
            self.last_receive_at = time.time()
            meters = self._meters
            began = 0.0 if meters is None else meters.clock()
            self._cork()
            try:
                self._table.deliver(steps)
            finally:
                self._flush()
            for step in steps:
                # A rank keeps its last step, for the load in it; the deltas go while they are still in the cache.
                step.outputs = ()
            if meters is not None:
                meters.rendered(began, len(steps))

    def _take_extras(self, codec: Codec, step: Any) -> None:
        if codec.has_load(step):
            for rank in self.ranks:
                if rank.index == step.engine_index:
                    rank.unread = step
        reply = codec.reply(step)
        if reply is not None:
            future = self._calls.pop(reply.call_id, None)
            if future is not None and not future.done():
                future.set_result(reply)

    def _undecodable_step(self, codec: Codec, frames: Sequence[Any], error: WireError) -> None:
        """The engine's last word, or a step that may have held anybody's tokens: then its requests cannot be trusted."""
        if codec.is_death(frames):
            self._on_death("it reported its own death (see its log)")
            return
        self._undecodable += 1
        self.undecodable_total += 1
        log.error("an engine message does not fit the wire layout: %s", error)
        if self._table is not None:
            self._table.fail_running(Code.INTERNAL, f"an engine message could not be decoded: {error}")
            self._flush()
        if self._undecodable >= UNDECODABLE_LIMIT:
            self._on_death(f"{self._undecodable} messages in a row could not be decoded, the last: {error}")
