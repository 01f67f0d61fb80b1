"""The seams of SGLang's scheduler that the lane takes hold of, through SGLang's own hook registry.

| seam | what happens there |
|---|---|
| `SchedulerIpcChannels.create` | the rank that owns request I/O gets a lane in place of the sockets to the tokenizer manager |
| `Scheduler.init_ipc_channels` | HELLO |
| `Scheduler.maybe_init_rust_server` | the model is up: INIT, READY, ready map; the lane opens, the idle sleeper watches it |
| `SchedulerRequestReceiver._pull_raw_reqs` | requests come from the lane |
| `Scheduler.maybe_sleep_on_idle` | the lane tells that the scheduler is idle |
| `Scheduler.__init__`, `Scheduler.run_event_loop` | their end, however it comes, is told |
| `SchedulerBatchResultProcessor`, grammar | an abort because a grammar refused a sampled token says so |
"""

from __future__ import annotations

import logging
import pkgutil
from collections.abc import Callable
from typing import Any

import zmq

from bridge.plugins.sglang.dial import Context, Dial, Socket
from bridge.plugins.sglang.lane import Lane
from bridge.plugins.sglang.lastword import LastWord
from bridge.plugins.sglang.ready import limits_of, rank_of, ready_map

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
COMPONENTS = "sglang.srt.managers.scheduler_components"
RESULTS = f"{COMPONENTS}.batch_result_processor.SchedulerBatchResultProcessor"
DECODE_BATCH = "sglang.srt.disaggregation.decode_schedule_batch_mixin.ScheduleBatchDisaggregationDecodeMixin"

SEAMS = (
    (f"{SCHEDULER}.__init__", "start_or_end", "around"),
    (f"{COMPONENTS}.ipc_channels.SchedulerIpcChannels.create", "channels", "around"),
    (f"{SCHEDULER}.init_ipc_channels", "hello", "after"),
    (f"{SCHEDULER}.maybe_init_rust_server", "model_up", "after"),
    (f"{COMPONENTS}.request_receiver.SchedulerRequestReceiver._pull_raw_reqs", "pull", "around"),
    (f"{SCHEDULER}.maybe_sleep_on_idle", "idle", "before"),
    (f"{SCHEDULER}.run_event_loop", "end", "around"),
)
"""(target, method of `Rank`, kind of hook); the lane cannot do without any."""

GRAMMAR_REJECTED = "GrammarRejectedToken"
"""The `err_type` that SMG 1.13 reads as the constraint failing."""
GRAMMAR_MESSAGE = "the grammar rejected a sampled token"
BARE_MESSAGES = (None, "Aborted", "Unknown error")
"""What SGLang's aborts say when they have nothing to say."""

_log = logging.getLogger(__name__)


class Rank:
    """What this process is to the lane: nothing until its scheduler turns out to own request I/O."""

    def __init__(self, address: str, first_index: int) -> None:
        self._address = address
        self._first_index = first_index
        self._lane: Lane | None = None
        self._context: Context | None = None
        self._dial: Dial | None = None
        self._last_word: LastWord | None = None
        self._index = 0

    # -- start -------------------------------------------------------------------------------------------------------

    def channels(self, create: Callable[..., Any], kind: Any, **arguments: Any) -> Any:
        """AROUND `SchedulerIpcChannels.create`."""
        if not arguments["is_rank_zero"]:
            return create(kind, **arguments)
        self._context = zmq.Context()
        self._lane = Lane()
        return kind(
            recv_from_tokenizer=_quiet(self._context, "tokenizer"),
            recv_from_rpc=_quiet(self._context, "rpc"),
            send_to_tokenizer=self._lane,
            send_to_detokenizer=self._lane,
            send_metrics_from_scheduler=_closed(self._context),
        )

    def hello(self, result: Any, scheduler: Any, *arguments: Any, **named: Any) -> None:
        """AFTER `Scheduler.init_ipc_channels`."""
        if self._lane is None or self._context is None:
            return
        self._index = self._first_index + rank_of(scheduler)
        self._dial = Dial(self._context, self._address, self._index)
        _log.info("rank %d dials %s", self._index, self._address)

    def model_up(self, result: Any, scheduler: Any) -> None:
        """AFTER `Scheduler.maybe_init_rust_server`."""
        lane, dial = self._lane, self._dial
        if lane is None or dial is None:
            return
        sockets = dial.finish(ready_map(scheduler, self._index))
        self._last_word = LastWord(sockets.output_addresses)
        self._last_word.arm()
        lane.open(
            sockets,
            engine_index=self._index,
            limits=limits_of(scheduler),
            tokenizer=scheduler.tokenizer,
            load=lambda: scheduler.load_inquirer.get_loads(),
            trace=_Traces(scheduler).start,
        )
        if scheduler.idle_sleeper is not None:
            for socket in sockets.inputs:
                scheduler.idle_sleeper.poller.register(socket, zmq.POLLIN)
        _log.info("rank %d serves %d slots", self._index, len(sockets.inputs))

    # -- the loop ----------------------------------------------------------------------------------------------------

    def pull(self, original: Callable[..., Any], receiver: Any) -> Any:
        """AROUND `SchedulerRequestReceiver._pull_raw_reqs`."""
        lane = self._lane
        return original(receiver) if lane is None else lane.pull(receiver.max_recv_per_poll)

    def idle(self, *arguments: Any, **named: Any) -> None:
        """BEFORE `Scheduler.maybe_sleep_on_idle`."""
        if self._lane is not None:
            self._lane.idle()

    def end(self, original: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """AROUND `Scheduler.run_event_loop`, which ends with the rank."""
        try:
            return original(*arguments, **named)
        finally:
            self.say_last_word()

    def start_or_end(self, original: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """AROUND `Scheduler.__init__`: after the handshake a part may still fail."""
        try:
            return original(*arguments, **named)
        except BaseException:
            self.say_last_word()
            raise

    def say_last_word(self) -> None:
        if self._last_word is not None:
            self._last_word.say()


class _Traces:
    """Starts the trace of a request from its caller's context, as the tokenizer manager would."""

    def __init__(self, scheduler: Any) -> None:
        from sglang.srt.disaggregation.utils import DisaggregationMode
        from sglang.srt.observability import req_time_stats, trace

        self._stats = req_time_stats.APIServerReqTimeStats
        self._enabled = trace.get_global_tracing_enabled
        self._plain = DisaggregationMode.NULL
        self._scheduler = scheduler

    def start(self, request: Any, headers: dict[str, str] | None) -> Any:
        """None when nobody looks at it. The disaggregated paths read a request's times without asking if it has any."""
        tracing = self._enabled()
        mode = self._scheduler.disaggregation_mode
        if not tracing and mode == self._plain:
            return None
        stats = self._stats(disagg_mode=mode)
        if tracing:
            stats.init_trace_ctx(request.rid, getattr(request, "bootstrap_room", None), headers)
            stats.set_created_time()
        return stats


def _quiet(context: Context, name: str) -> Socket:
    """A socket that never has anything to read, for a place where the scheduler polls one."""
    socket = context.socket(zmq.PULL)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind(f"inproc://headless-bridge-quiet-{name}")
    return socket


def _closed(context: Context) -> Socket:
    """A socket that takes nothing, for a place where the scheduler asks whether it is closed."""
    socket = context.socket(zmq.PUSH)
    socket.close(0)
    return socket


def name_grammar_abort(original: Callable[..., Any], processor: Any, *arguments: Any, **named: Any) -> Any:
    """AROUND a step that feeds a request's grammar: the one thing it aborts for is the grammar's refusal."""
    request = named.get("req", arguments[0] if arguments else None)
    before = getattr(request, "to_finish", None)
    result = original(processor, *arguments, **named)
    _name(request, before)
    return result


def name_prebuilt_aborts(original: Callable[..., Any], batch: Any, *arguments: Any, **named: Any) -> Any:
    """AROUND `process_prebuilt`, which feeds the grammars of a transferred prefill."""
    watched = [(one, one.to_finish) for one in batch.reqs if getattr(one, "grammar", None) is not None]
    result = original(batch, *arguments, **named)
    for request, before in watched:
        _name(request, before)
    return result


def _name(request: Any, before: Any) -> None:
    finish = getattr(request, "to_finish", None)
    if finish is None or finish is before or not hasattr(finish, "err_type"):
        return
    finish.err_type = GRAMMAR_REJECTED
    if finish.message in BARE_MESSAGES:
        finish.message = GRAMMAR_MESSAGE


GRAMMAR_SEAMS = (
    (f"{RESULTS}._accept_grammar_tokens", name_grammar_abort),
    (f"{RESULTS}._apply_prefill_grammar", name_grammar_abort),
    (f"{DECODE_BATCH}.process_prebuilt", name_prebuilt_aborts),
)
"""Not every release has all of them."""


def register_hooks(address: str, first_index: int) -> Rank:
    """Register every hook with SGLang, which applies them when all plugins are loaded."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    rank = Rank(address, first_index)
    for target, name, kind in SEAMS:
        HookRegistry.register(target, getattr(rank, name), HookType(kind))
    for target, hook in GRAMMAR_SEAMS:
        if _exists(target):
            HookRegistry.register(target, hook, HookType.AROUND)
        else:
            _log.info("this SGLang has no %s; its grammar aborts stay unnamed", target)
    return rank


def missing_seams() -> list[str]:
    """The seams the lane cannot do without that this SGLang lacks."""
    return [target for target, _, _ in SEAMS if not _exists(target)]


def _exists(target: str) -> bool:
    try:
        return callable(pkgutil.resolve_name(target))
    except (ImportError, AttributeError):
        return False
