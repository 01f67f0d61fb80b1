"""The supervision tree of `serve`: what is bound, spawned and watched, in which order, and how it all ends.

    bind listeners → bind handshake and slots → leash → front end → engine and companion → handshake → EngineUp → serving

One stack owns every part from the moment it exists, so a failure anywhere, a signal during the start included, stops
and reaps all of it in the opposite order.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Coroutine, Iterator, Mapping
from typing import Any

import msgspec

from bridge.supervisor.companion import Companion
from bridge.supervisor.config import ServeConfig as ServeConfig
from bridge.supervisor.control import EngineDown, EngineUp, Loading, RankLoad, Start
from bridge.supervisor.engine_link import FRONT_END_SLOT, OWN_SLOT, EngineLink
from bridge.supervisor.engines import Launch, Launcher, LaunchSpec, find_python, launcher
from bridge.supervisor.errors import EXIT_REQUESTED, StartError, SupervisorError
from bridge.supervisor.front_end import FrontEnd
from bridge.supervisor.lifeline import Lifeline
from bridge.supervisor.listeners import BoundListener, bind_tcp, bind_unix
from bridge.supervisor.logs import RELAYED
from bridge.supervisor.policy import Decision, End, Part, decide
from bridge.supervisor.process import Process
from bridge.supervisor.ready import Progress, StartPhase
from bridge.supervisor.state import StateFolder
from bridge.supervisor.vitals import Vitals
from bridge.wire.companion import Facts
from bridge.wire.engines import codec_for
from bridge.wire.errors import LayoutError
from bridge.wire.handshake import Phase

ENGINE_GRACE_S = 15.0
"""From SIGTERM to SIGKILL at a stop. vLLM 0.32 with nothing in flight takes under three seconds."""
FRONT_END_WORD_S = 0.1
"""A front end that ends for the engine's death may be heard first; the engine's own end explains more."""
DEATH_NOTICE_S = 1.0
"""For the front end to end its streams when the engine is gone."""
SERVING_LIMIT_S = 30.0
"""From the engine being up to the front end serving it."""

_log = logging.getLogger(__name__)
_relayed = logging.getLogger(RELAYED)


class Supervisor:
    """One run of `serve`."""

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self._ended: asyncio.Future[End] | None = None
        self._hurry = asyncio.Event()
        self._ranks_up = asyncio.Event()
        self._engine: Process | None = None
        self._front_end: FrontEnd | None = None
        self._companion: Companion | None = None
        self._link: EngineLink | None = None
        self._progress: Progress | None = None

    async def run(self) -> int:
        """Serve until a stop is asked for (SIGTERM, SIGINT or SIGHUP); returns the exit code for that, 0.

        Raises `SupervisorError`, whose `exit_code` is never 0, when the tree cannot be started or a part of it ends.
        """
        self._ended = asyncio.get_running_loop().create_future()
        with self._signals():
            async with contextlib.AsyncExitStack() as owned:
                await self._until_end(self._bring_up(owned))
                end = await self._ended
                if decide(end) is Decision.EXIT:
                    await self._wind_down(end)
        if end.part is Part.REQUEST:
            _log.info("stopped")
            return EXIT_REQUESTED
        raise SupervisorError(end.reason, self._engine.tail if self._engine and end.part is Part.ENGINE else ())

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

    async def _bring_up(self, owned: contextlib.AsyncExitStack) -> None:
        """From nothing to serving. Every part is pushed on `owned` as soon as it exists."""
        config = self._config
        engine = launcher(config.engine)
        python = find_python(engine, config.engine_python or None)
        model, arguments = engine.split_model(config.arguments)
        name = config.served_model_name or model or engine.name
        spec = LaunchSpec(python=python, model=model, args=tuple(arguments))
        engine.check(spec)

        listener = self._bind(owned)
        state = StateFolder.open(config.state_dir)
        owned.callback(state.close)
        link = self._link = EngineLink(
            state,
            port=config.handshake_port,
            on_phase=self._on_phase,
            on_load=self._on_load,
            on_death=self._on_engine_death,
        )
        owned.callback(link.close)
        launch = engine.launch(spec, link.address)
        link.expect(launch)

        lifeline = Lifeline()
        owned.push_async_callback(lifeline.close)
        if state.temporary:
            lifeline.remove_later(state.path)
        state.latch.unlink(missing_ok=True)
        resident = engine.resident(spec, str(state.companion))
        socket = str(state.companion) if resident else ""
        front_end = await self._spawn_front_end(owned, lifeline, listener, state, name, socket)
        environment = {**launch.environment, **os.environ}
        process = self._spawn_engine(owned, lifeline, launch, environment)
        companion = self._companion = Companion(
            engine.name,
            resident or engine.companion(spec),
            environment,
            lifeline,
            self._on_companion_line,
            stays=resident is not None,
        )
        owned.push_async_callback(companion.close)
        facts = await self._wait_until_up(engine, companion)
        await self._go_up(front_end, link, msgspec.structs.replace(facts, served_model_name=name))
        vitals = Vitals(process, engine.vital, self._on_vital_death)
        owned.callback(vitals.close)
        _log.info("serving %s (%s %s) on grpc://%s", name, facts.engine, facts.engine_version, listener.address)

    def _bind(self, owned: contextlib.AsyncExitStack) -> BoundListener:
        config = self._config
        listener = bind_unix(config.uds) if config.uds is not None else bind_tcp(config.host, config.port)
        owned.callback(listener.close)
        reach = "from this machine only" if listener.loopback else "from other machines too"
        tls = "with TLS" if config.options.get("tls_cert") else "without TLS"
        _log.info("gRPC listens on %s, reachable %s, %s", listener.address, reach, tls)
        return listener

    async def _spawn_front_end(
        self,
        owned: contextlib.AsyncExitStack,
        lifeline: Lifeline,
        listener: BoundListener,
        state: StateFolder,
        name: str,
        companion: str,
    ) -> FrontEnd:
        config = self._config
        input_address, output_address = state.slot(FRONT_END_SLOT)
        start = Start(
            engine=config.engine,
            served_model_name=name,
            slot=FRONT_END_SLOT,
            incarnation=state.next_incarnation(FRONT_END_SLOT),
            input_address=input_address,
            output_address=output_address,
            listeners=[listener.describe()],
            contracts=list(config.contracts),
            options=config.options,
            companion=companion,
            latch=str(state.latch),
        )
        front_end = await FrontEnd.spawn(
            start, [listener.socket.fileno()], lifeline, self._on_front_end_end, self._on_companion_silence
        )
        owned.push_async_callback(_end_process, front_end, lifeline)
        self._front_end = front_end
        return front_end

    def _spawn_engine(
        self, owned: contextlib.AsyncExitStack, lifeline: Lifeline, launch: Launch, environment: Mapping[str, str]
    ) -> Process:
        config = self._config
        process = Process.spawn(
            config.engine,
            launch.argv,
            env=environment,
            parent_death=signal.SIGTERM,
            on_line=self._on_engine_line,
        )
        lifeline.watch(process)
        owned.push_async_callback(self._stop_engine, process, lifeline)
        self._engine = process
        self._progress = Progress(
            config.engine, process, timeout_s=config.startup_timeout_s, ceiling_s=config.startup_ceiling_s
        )
        _log.info("started %s, process %d", config.engine, process.pid)
        watch = asyncio.ensure_future(self._watch_engine(process))
        owned.callback(watch.cancel)
        return process

    async def _wait_until_up(self, engine: Launcher, companion: Companion) -> Facts:
        """Show progress until every rank is up and the facts are read; raises `StartError`."""
        progress = self._progress
        assert progress is not None
        try:
            async with asyncio.TaskGroup() as group:
                showing = group.create_task(progress.show(self._tell_loading))
                reading = group.create_task(companion.start())
                await self._ranks_up.wait()
                progress.advance(StartPhase.FACTS)
                facts = await reading
                showing.cancel()
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        progress.advance(StartPhase.UP)
        _log.info("%s is up after %.1f s", engine.name, progress.elapsed_s)
        return facts

    async def _go_up(self, front_end: FrontEnd, link: EngineLink, facts: Facts) -> None:
        """Tell the front end that the engine is up and wait until it serves it."""
        ranks = link.ranks()
        if facts.needs_coordinator and len(ranks) > 1:
            raise StartError(
                f"{facts.model_path} is a mixture of experts: its {len(ranks)} data-parallel ranks need a coordinator, "
                "which this bridge does not run; use one rank"
            )
        try:
            link.use(codec_for(facts.engine, ranks[0].ready, facts.layouts, OWN_SLOT))
        except LayoutError as error:
            raise StartError(str(error)) from None
        front_end.send(EngineUp(ranks=ranks, facts=facts))
        try:
            await asyncio.wait_for(front_end.serving.wait(), SERVING_LIMIT_S)
        except TimeoutError:
            raise StartError(f"the front end does not serve {SERVING_LIMIT_S:g} s after the engine was up") from None

    async def _wind_down(self, end: End) -> None:
        """Let the front end finish; the stack stops everything after that."""
        front_end = self._front_end
        _log.info("stopping: %s", end.reason)
        if front_end is None or end.part is Part.FRONT_END:
            return
        serving = front_end.serving.is_set()
        if end.part is Part.ENGINE:
            await front_end.drain(DEATH_NOTICE_S if serving else 0.0, self._hurry)
        else:
            await front_end.drain(self._config.drain_s if serving else 0.0, self._hurry)

    async def _stop_engine(self, process: Process, lifeline: Lifeline) -> None:
        await process.stop(ENGINE_GRACE_S)
        lifeline.forget(process)

    async def _watch_engine(self, process: Process) -> None:
        await process.exited.wait()
        progress = self._progress
        if progress is not None and progress.phase is not StartPhase.UP:
            self._on_engine_death(
                f"{process.describe_exit()} while {progress.phase.value}, {progress.elapsed_s:.0f} s in"
            )
        else:
            self._on_engine_death(f"{process.describe_exit()} though nobody stopped it")

    def _end(self, end: End) -> None:
        """The first end decides; an engine's death is told to the front end in any case."""
        if end.part is Part.ENGINE and self._front_end is not None:
            self._front_end.send(EngineDown(reason=end.reason))
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(end)

    def _on_engine_death(self, what: str) -> None:
        self._end(End(Part.ENGINE, f"{self._config.engine} {what}"))

    def _on_vital_death(self, pid: int, title: str) -> None:
        self._on_engine_death(f"lost its process {pid} ({title})")

    def _on_front_end_end(self, reason: str) -> None:
        asyncio.get_running_loop().call_later(FRONT_END_WORD_S, self._end, End(Part.FRONT_END, reason))

    def _on_companion_silence(self, what: str) -> None:
        if self._companion is not None:
            self._companion.restart(what)

    def _on_phase(self, phase: Phase) -> None:
        if self._progress is not None:
            self._progress.advance(StartPhase.IMPORTING if phase is Phase.AWAITED else StartPhase.LOADING)
        if self._link is not None and self._link.done:
            self._ranks_up.set()

    def _on_load(self, load: RankLoad) -> None:
        if self._front_end is not None:
            self._front_end.send(load)

    def _on_engine_line(self, line: str) -> None:
        _relayed.info("[%s] %s", self._config.engine, line)
        if self._progress is not None:
            self._progress.sign()

    def _on_companion_line(self, line: str) -> None:
        _relayed.debug("[%s companion] %s", self._config.engine, line)
        if self._progress is not None:
            self._progress.sign()

    def _tell_loading(self, phase: StartPhase, elapsed_s: float) -> None:
        if self._front_end is not None:
            self._front_end.send(Loading(phase=phase.value, elapsed_s=elapsed_s))

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        for number in numbers:
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def _on_signal(self, number: signal.Signals) -> None:
        """The first asks for the stop, the second cuts the drain short, the third kills the engine."""
        if self._ended is not None and not self._ended.done():
            self._end(End(Part.REQUEST, f"{number.name} asked for it"))
        elif not self._hurry.is_set():
            _log.warning("%s again: cutting the drain short", number.name)
            self._hurry.set()
        elif self._engine is not None:
            _log.warning("%s once more: killing %s", number.name, self._engine.name)
            self._engine.kill()


async def _end_process(front_end: FrontEnd, lifeline: Lifeline) -> None:
    await front_end.stop()
    lifeline.forget(front_end.process)
