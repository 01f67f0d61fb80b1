"""The supervision tree of `serve`: what is bound, spawned and watched, in which order, and how it all ends.

    bind listeners → bind handshake and slots → leash → front end → engine and companion → handshake → token → EngineUp

One stack owns every part from the moment it exists, so a failure anywhere, a signal during the start included, stops
and reaps all of it in the opposite order. Once it serves, an engine that ends is started again by the restart policy,
behind the same listeners and front ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import msgspec

from bridge.supervisor.commands import CommandServer
from bridge.supervisor.companion import Companion
from bridge.supervisor.config import ServeConfig as ServeConfig
from bridge.supervisor.config import WarmUpLevel
from bridge.supervisor.control import EngineUp, Loading, Rank, RankLoad, RankWork, Start
from bridge.supervisor.engine_link import OWN_SLOT, EngineLink
from bridge.supervisor.engine_run import DEATH_GRACE_S, STOP_GRACE_S, EngineRun
from bridge.supervisor.engines import Launch, Launcher, LaunchSpec, find_python, launcher
from bridge.supervisor.errors import EXIT_REQUESTED, StartError, SupervisorError
from bridge.supervisor.front_end import FrontEnd
from bridge.supervisor.front_ends import SERVING_LIMIT_S, FrontEnds
from bridge.supervisor.lifeline import Lifeline
from bridge.supervisor.listeners import BoundListener, bind_admin, bind_metrics, bind_tcp, bind_unix
from bridge.supervisor.liveness import Liveness
from bridge.supervisor.logs import RELAYED
from bridge.supervisor.notify import Notifier
from bridge.supervisor.operations import Operations
from bridge.supervisor.policy import End, Part, Restarts
from bridge.supervisor.ready import StartPhase
from bridge.supervisor.state import StateFolder
from bridge.supervisor.warm_up import WarmUp
from bridge.wire.codec import Codec
from bridge.wire.companion import Facts
from bridge.wire.engines import codec_for
from bridge.wire.errors import LayoutError
from bridge.wire.handshake import Phase

DEATH_NOTICE_S = 1.0
"""For the front ends to end their streams when the engine is gone and so is the run."""
ENGINE_SHARE_S = 4.0
"""What a drain leaves of the stop's budget: vLLM 0.32 with nothing in flight stops in under three seconds."""
LEAST_GRACE_S = 1.0
RESTART_TAIL = 20
"""Lines of an engine's log told when it is started again."""

_log = logging.getLogger(__name__)
_relayed = logging.getLogger(RELAYED)


class Supervisor:
    """One run of `serve`."""

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self._ended: asyncio.Future[End] | None = None
        self._stop_by = float("inf")
        self._hurry = asyncio.Event()
        self._restarts = Restarts(config.restart)
        self._engine: Launcher
        self._state: StateFolder
        self._link: EngineLink
        self._lifeline: Lifeline
        self._launch: Launch
        self._name = ""
        self._run: EngineRun | None = None
        self._front_ends: FrontEnds | None = None
        self._companion: Companion | None = None
        self._warm_up: WarmUp | None = None
        self._operations: Operations
        self.engine_restarts = 0

    async def run(self) -> int:
        """Serve until a stop is asked for (SIGTERM or SIGINT); returns the exit code for that, 0.

        Raises `SupervisorError`, whose `exit_code` is never 0, when the tree cannot be started or what ended in it is
        not started again.
        """
        self._ended = asyncio.get_running_loop().create_future()
        with self._signals():
            async with contextlib.AsyncExitStack() as owned:
                await self._until_end(self._bring_up(owned))
                end = await self._ended
                await self._wind_down(end)
        if end.part is Part.REQUEST:
            _log.info("stopped")
            return EXIT_REQUESTED
        raise SupervisorError(end.reason, end.tail)

    async def _until_end(self, bring_up: Coroutine[Any, Any, None]) -> None:
        """Run the start; an end that comes first cancels it."""
        assert self._ended is not None
        starting = asyncio.ensure_future(bring_up)
        both: set[asyncio.Future[Any]] = {starting, self._ended}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            return
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await starting

    # -- the start -----------------------------------------------------------------------------------------------------

    async def _bring_up(self, owned: contextlib.AsyncExitStack) -> None:
        """From nothing to serving. Every part is pushed on `owned` as soon as it exists."""
        config = self._config
        engine = self._engine = launcher(config.engine)
        python = find_python(engine, config.engine_python or None)
        model, arguments = engine.split_model(config.arguments)
        name = self._name = config.served_model_name or model or engine.name
        spec = LaunchSpec(python=python, model=model, args=tuple(arguments))
        engine.check(spec)

        operations = self._operations = Operations(Notifier(os.environ), engine=engine.name, counts=self._counts)
        owned.callback(operations.close)
        listeners = self._bind(owned)
        if config.metrics_port is not None:
            metrics = bind_metrics(config.metrics_host, config.metrics_port)
            owned.callback(metrics.close)
            await operations.serve(metrics)
        state = self._state = StateFolder.open(config.state_dir, config.socket_dir)
        owned.callback(state.close)
        link = self._link = EngineLink(
            state,
            port=config.handshake_port,
            on_phase=self._on_phase,
            on_load=self._on_load,
            on_death=self._die,
            on_step=self._on_step,
        )
        owned.callback(link.close)
        launch = engine.launch(spec, link.address)
        self._launch = dataclasses.replace(launch, environment={**launch.environment, **os.environ})

        lifeline = self._lifeline = Lifeline()
        owned.push_async_callback(lifeline.close)
        if state.temporary:
            lifeline.remove_later(state.path)
        resident = engine.resident(spec, str(state.companion))
        companion_socket = str(state.companion) if resident else ""
        front_ends = self._front_ends = FrontEnds(
            link,
            lifeline,
            lambda slot, at_once: self._start_message(slot, at_once, listeners, companion_socket),
            [listener.socket.fileno() for listener in listeners],
            self,
            upgrade_drain_s=config.upgrade_drain_s,
        )
        owned.push_async_callback(front_ends.stop)
        operations.source = front_ends
        await front_ends.start()
        owned.push_async_callback(self._stop_engine)
        run = self._spawn_engine()
        companion = self._companion = Companion(
            engine.name,
            resident or engine.companion(spec),
            self._launch.environment,
            lifeline,
            self._on_companion_line,
            stays=resident is not None,
        )
        owned.push_async_callback(companion.close)
        failing = asyncio.ensure_future(self._first_death(run))
        owned.callback(failing.cancel)
        facts = await self._bring_engine_up(run, companion.start())
        failing.cancel()
        commands = await CommandServer.listen(state.commands, {"reload": self._reload, "metrics": self._tell_metrics})
        owned.push_async_callback(commands.close)
        keeping = asyncio.ensure_future(self._keep_engine(run, facts))
        keeping.add_done_callback(self._kept)
        owned.push_async_callback(_cancel, keeping)
        operations.serving(name)
        where = listeners[0].address
        _log.info("serving %s (%s %s) on grpc://%s", name, facts.engine, facts.engine_version, where)

    def _bind(self, owned: contextlib.AsyncExitStack) -> list[BoundListener]:
        """The listener of the contracts, and the administrators' where they have their own."""
        config = self._config
        tls = "with TLS" if config.options.get("tls_cert") else "without TLS"
        listeners = []
        for what, bind in (("gRPC", _bind_grpc), ("admin gRPC", _bind_admin)):
            listener = bind(config)
            if listener is None:
                continue
            owned.callback(listener.close)
            listeners.append(listener)
            reach = "from this machine only" if listener.loopback else "from other machines too"
            _log.info("%s listens on %s, reachable %s, %s", what, listener.address, reach, tls)
        return listeners

    def _start_message(self, slot: int, at_once: bool, listeners: list[BoundListener], companion: str) -> Start:
        state, config = self._state, self._config
        input_address, output_address = state.slot(slot)
        return Start(
            engine=config.engine,
            served_model_name=self._name,
            slot=slot,
            incarnation=state.next_incarnation(slot),
            input_address=input_address,
            output_address=output_address,
            listeners=[listener.describe() for listener in listeners],
            contracts=list(config.contracts),
            options=config.options,
            companion=companion,
            latch=str(state.latch),
            listen_at_once=at_once,
        )

    # -- the engine ----------------------------------------------------------------------------------------------------

    def _spawn_engine(self) -> EngineRun:
        """Bind nothing, for everything is bound; forget what the last engine left behind; spawn."""
        config, launch = self._config, self._launch
        self._state.latch.unlink(missing_ok=True)
        self._link.expect(launch)
        self._run = EngineRun(
            self._engine,
            launch,
            self._lifeline,
            startup_timeout_s=config.startup_timeout_s,
            startup_ceiling_s=config.startup_ceiling_s,
        )
        return self._run

    async def _bring_engine_up(self, run: EngineRun, facts: Coroutine[Any, Any, Facts]) -> Facts:
        """From spawned to served: every rank, the facts, a token, the front ends. Raises `StartError`."""
        progress, link, front_ends = run.progress, self._link, self._front_ends
        assert front_ends is not None
        try:
            async with asyncio.TaskGroup() as group:
                showing = group.create_task(progress.show(self._tell_loading))
                reading = group.create_task(facts)
                await run.ranks_up.wait()
                run.watch_vitals()
                progress.advance(StartPhase.FACTS)
                known = msgspec.structs.replace(await reading, served_model_name=self._name)
                ranks = link.ranks()
                codec = self._codec(known, ranks)
                link.use(codec)
                if self._config.warm_up is WarmUpLevel.FAST and known.is_generation:
                    progress.advance(StartPhase.WARMING)
                    await self._warm(codec, ranks, known)
                showing.cancel()
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        progress.advance(StartPhase.UP)
        _log.info("%s is up after %.1f s", self._engine.name, progress.elapsed_s)
        liveness = Liveness(
            ((int.from_bytes(rank.identity, "little"), rank.identity) for rank in ranks),
            self._config.liveness,
            lambda identity, call_id: link.send(identity, codec.ping(call_id)),
            lambda reason: run.die(reason, hangs=True),
        )
        run.watch_liveness(liveness)
        try:
            await front_ends.engine_up(EngineUp(ranks=ranks, facts=known))
        except TimeoutError:
            raise StartError(f"no front end serves {SERVING_LIMIT_S:g} s after the engine was up") from None
        return known

    def _codec(self, facts: Facts, ranks: Sequence[Rank]) -> Codec:
        if facts.needs_coordinator and len(ranks) > 1:
            raise StartError(
                f"{facts.model_path} is a mixture of experts: its {len(ranks)} data-parallel ranks need a coordinator, "
                "which this bridge does not run; use one rank"
            )
        try:
            return codec_for(facts.engine, ranks[0].ready, facts.layouts, OWN_SLOT)
        except LayoutError as error:
            raise StartError(str(error)) from None

    async def _warm(self, codec: Codec, ranks: list[Rank], facts: Facts) -> None:
        prefix = f"{OWN_SLOT}.{self._state.next_incarnation(OWN_SLOT):x}"
        self._warm_up = WarmUp(facts, self._link.send, prefix)
        try:
            await self._warm_up.run(codec, ranks)
        finally:
            self._warm_up = None

    async def _first_death(self, run: EngineRun) -> None:
        """An engine that ends before it was ever served ends the run: its arguments or its model are the likely cause."""
        self._engine_is_gone(await run.end())

    async def _keep_engine(self, run: EngineRun, facts: Facts) -> None:
        """Start the engine again whenever it ends, as the policy says."""
        front_ends = self._front_ends
        assert front_ends is not None
        while True:
            reason = await run.end()
            while True:
                delay = self._restarts.next_delay(time.monotonic())
                if delay is None:
                    self._engine_is_gone(f"{reason}; it is not started again: {self._restarts.describe()}")
                    return
                front_ends.engine_down(reason)
                self._operations.restarting(reason)
                _log.error("%s; starting it again in %g s", reason, delay)
                for line in list(run.process.tail)[-RESTART_TAIL:]:
                    _log.error("  | %s", line)
                await asyncio.gather(self._stop_engine(), asyncio.sleep(delay))
                try:
                    run = await self._start_again(facts)
                    break
                except SupervisorError as error:
                    reason = error.reason
                    self._die(reason)
            self.engine_restarts += 1
            self._operations.serving(self._name)

    async def _start_again(self, facts: Facts) -> EngineRun:
        """Raises `SupervisorError` when the new engine does not come to be served."""
        run = self._spawn_engine()
        bringing = asyncio.ensure_future(self._bring_engine_up(run, _known(facts)))
        both: set[asyncio.Future[Any]] = {bringing, run.died}
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not bringing.done():
                raise StartError(run.died.result())
            bringing.result()
        finally:
            await _cancel(bringing)
        _log.info("%s serves again", self._engine.name)
        return run

    def _kept(self, keeping: asyncio.Future[None]) -> None:
        if not keeping.cancelled() and (error := keeping.exception()) is not None:
            _log.error("the engine is kept no more", exc_info=error)
            self._engine_is_gone(f"{self._engine.name} cannot be kept: {error}")

    def _engine_is_gone(self, reason: str) -> None:
        if self._front_ends is not None:
            self._front_ends.engine_down(reason)
        tail = self._run.process.tail if self._run is not None else ()
        self._end(End(Part.ENGINE, reason, tuple(tail)))

    # -- the end -------------------------------------------------------------------------------------------------------

    async def _wind_down(self, end: End) -> None:
        """Let the front ends finish; the stack stops everything after that."""
        front_ends = self._front_ends
        _log.info("stopping: %s", end.reason)
        self._operations.stopping(end.reason)
        if front_ends is None or end.part is Part.FRONT_END:
            return
        if end.part is Part.ENGINE:
            await front_ends.drain(DEATH_NOTICE_S, self._hurry)
            return
        grace = min(self._config.drain_s, max(0.0, self._left_s() - ENGINE_SHARE_S))
        await front_ends.drain(grace if front_ends.serving else 0.0, self._hurry)

    async def _stop_engine(self) -> None:
        if self._run is not None:
            dead = self._run.died.done()
            grace = DEATH_GRACE_S if dead else max(LEAST_GRACE_S, min(STOP_GRACE_S, self._left_s() - LEAST_GRACE_S))
            await self._run.stop(grace)

    def _left_s(self) -> float:
        """What is left of the stop's budget, in seconds."""
        return self._stop_by - time.monotonic()

    def _end(self, end: End) -> None:
        """The first end decides."""
        if self._ended is not None and not self._ended.done():
            if end.part is Part.REQUEST:
                self._stop_by = time.monotonic() + self._config.stop_s
            self._ended.set_result(end)

    # -- what the parts tell -------------------------------------------------------------------------------------------

    def _die(self, what: str) -> None:
        if self._run is not None:
            self._run.die(what)

    def front_ends_ended(self, reason: str) -> None:
        self._end(End(Part.FRONT_END, reason))

    def front_end_work(self, front_end: FrontEnd, ranks: Sequence[RankWork]) -> None:
        if self._run is not None and self._run.liveness is not None:
            self._run.liveness.work(front_end, ranks)

    def engine_lost(self, reason: str) -> None:
        self._die(reason)

    def companion_silent(self, what: str) -> None:
        if self._companion is not None:
            self._companion.restart(what)

    def _on_phase(self, phase: Phase) -> None:
        run = self._run
        if run is None:
            return
        run.progress.advance(StartPhase.IMPORTING if phase is Phase.AWAITED else StartPhase.LOADING)
        if self._link.done:
            run.ranks_up.set()

    def _on_load(self, load: RankLoad) -> None:
        if self._front_ends is not None:
            self._front_ends.send(load)

    def _on_step(self, codec: Codec, step: object) -> None:
        if self._warm_up is not None:
            self._warm_up.take(codec, step)
        reply = codec.reply(step)
        if reply is not None and self._run is not None and self._run.liveness is not None:
            self._run.liveness.answered(reply.call_id)

    def _on_companion_line(self, line: str) -> None:
        _relayed.debug("[%s companion] %s", self._config.engine, line)
        if self._run is not None:
            self._run.progress.sign()

    def _tell_loading(self, phase: StartPhase, elapsed_s: float) -> None:
        if self._front_ends is not None:
            self._front_ends.send(Loading(phase=phase.value, elapsed_s=elapsed_s))
        self._operations.loading(phase.value, elapsed_s)

    def _counts(self) -> dict[str, int]:
        """What was started again so far, by part."""
        front_ends, companion = self._front_ends, self._companion
        return {
            "engine": self.engine_restarts,
            "front_end": front_ends.restarts if front_ends is not None else 0,
            "upgrade": front_ends.upgrades if front_ends is not None else 0,
            "companion": companion.restarts if companion is not None else 0,
        }

    # -- orders --------------------------------------------------------------------------------------------------------

    async def _reload(self, say: Callable[[str], None]) -> None:
        """Replace the front end; for systemd the reload is over once the new one serves."""
        assert self._front_ends is not None  # commands are taken once it serves
        operations = self._operations

        def said(line: str) -> None:
            operations.reloaded()
            say(line)

        operations.reloading()
        try:
            await self._front_ends.upgrade(said)
        finally:
            operations.reloaded()

    async def _tell_metrics(self, say: Callable[[str], None]) -> None:
        await self._operations.refresh()
        for line in self._operations.exposition().splitlines():
            say(line)

    async def _reload_by_signal(self) -> None:
        if self._front_ends is None:
            return
        try:
            await self._reload(lambda line: _log.info("%s", line))
        except SupervisorError as error:
            _log.error("SIGHUP: %s", error)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        reloads: set[asyncio.Task[None]] = set()

        def reload() -> None:
            _log.info("SIGHUP: replacing the front end")
            reloads.add(task := asyncio.ensure_future(self._reload_by_signal()))
            task.add_done_callback(reloads.discard)

        numbers = (signal.SIGTERM, signal.SIGINT)
        for number in numbers:
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(signal.SIGHUP, reload)
        try:
            yield
        finally:
            for task in reloads:
                task.cancel()
            for number in (*numbers, signal.SIGHUP):
                loop.remove_signal_handler(number)

    def _on_signal(self, number: signal.Signals) -> None:
        """The first asks for the stop, the second cuts the drain short, the third kills the engine."""
        if self._ended is not None and not self._ended.done():
            self._end(End(Part.REQUEST, f"{number.name} asked for it"))
        elif not self._hurry.is_set():
            _log.warning("%s again: cutting the drain short", number.name)
            self._hurry.set()
        elif self._run is not None:
            _log.warning("%s once more: killing %s", number.name, self._engine.name)
            self._run.process.kill()


async def _cancel(task: asyncio.Future[Any]) -> None:
    """End a task whose failure somebody else has heard of."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()


async def _known(facts: Facts) -> Facts:
    return facts


def _bind_grpc(config: ServeConfig) -> BoundListener:
    return bind_unix(config.uds) if config.uds is not None else bind_tcp(config.host, config.port)


def _bind_admin(config: ServeConfig) -> BoundListener | None:
    return bind_admin(config.admin_bind) if config.admin_bind else None
