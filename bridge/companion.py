"""The front end's side of the companion: constraints are checked there before they are sent, and verdicts are kept.

Nothing here waits on the event loop, and no other request depends on it: while the companion is away, constraints are
UNAVAILABLE and the rest goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import msgspec

from bridge import __version__
from bridge.grpc.status import Code
from bridge.refusal import Refusal, invalid
from bridge.wire.codec import Constraint
from bridge.wire.companion import (
    COMPANION_VERSION,
    MAX_MESSAGE,
    Accepted,
    Cause,
    Check,
    FromCompanion,
    Hello,
    Refused,
    Verdict,
)
from bridge.wire.framing import Framing, FramingError, framed

log = logging.getLogger(__name__)

MAX_CONSTRAINT = 1 << 20
"""Bytes of UTF-8 of one constraint; each choice counts one more."""
ANSWER_LIMIT_S = 180.0
"""Longer than the companion's own limits together (30 s for a place, 120 s for a check): past it, it hangs."""
MAX_WAITING = 256
KEPT_VERDICTS = 1024
KEPT_BYTES = 16 << 20

TYPES: Mapping[str, type] = {
    "json_schema": str,
    "json_object": bool,
    "regex": str,
    "grammar": str,
    "choice": list,
    "structural_tag": str,
}
"""Kind of constraint → the type of its value."""

AWAY = "the companion, which checks constraints, is down and being restarted; requests without one are served"

_CODES = {
    Cause.INVALID: Code.INVALID_ARGUMENT,
    Cause.COST: Code.INVALID_ARGUMENT,
    Cause.BACKEND: Code.FAILED_PRECONDITION,
    Cause.UNABLE: Code.FAILED_PRECONDITION,
    Cause.AGAIN: Code.UNAVAILABLE,
}


class Latch:
    """What enforces constraints in this engine, once something does: the backend of the first constraint, for its life.

    The file makes it one for all front ends of an engine, and outlives them; without a path it lives in memory.
    """

    def __init__(self, path: str = "") -> None:
        self._path = Path(path) if path else None
        self.backend = self._read()

    def open(self) -> None:
        """Another engine starts, and nothing enforces constraints in it yet; its file is gone already."""
        self.backend = self._read()

    def take(self, backend: str) -> str:
        """Make `backend` the one, unless there is one; returns the one there is."""
        if self._path is not None and not self.backend:
            temporary = self._path.with_name(f"{self._path.name}.{os.getpid()}")
            temporary.write_text(backend)
            try:
                os.link(temporary, self._path)
            except FileExistsError:
                backend = self._read()
            finally:
                temporary.unlink()
        self.backend = self.backend or backend
        return self.backend

    def _read(self) -> str:
        if self._path is None:
            return ""
        with contextlib.suppress(FileNotFoundError):
            return self._path.read_text()
        return ""


class Verdicts:
    """The last verdicts, by what was asked. Bounded in number and in bytes."""

    def __init__(self) -> None:
        self._kept: OrderedDict[bytes, tuple[Verdict, int]] = OrderedDict()
        self._bytes = 0

    def get(self, key: bytes) -> Verdict | None:
        if key not in self._kept:
            return None
        self._kept.move_to_end(key)
        return self._kept[key][0]

    def put(self, key: bytes, verdict: Verdict, size: int) -> None:
        self._bytes -= self._kept.pop(key, (verdict, 0))[1]
        self._kept[key] = verdict, size
        self._bytes += size
        while len(self._kept) > KEPT_VERDICTS or self._bytes > KEPT_BYTES:
            _, (_, freed) = self._kept.popitem(last=False)
            self._bytes -= freed


class CompanionGrammar:
    """Validates constraints by the companion at a unix socket."""

    def __init__(
        self,
        address: str,
        latch: Latch,
        on_silence: Callable[[float], None],
        on_other_version: Callable[[str], None] = lambda version: None,
    ) -> None:
        """`on_silence(seconds)` is called when the companion took a check and does not answer, `on_other_version(version)`
        when it is of another headless-bridge than this."""
        self._address = address
        self._latch = latch
        self._on_silence = on_silence
        self._on_other_version = on_other_version
        self._verdicts = Verdicts()
        self._asked: dict[bytes, asyncio.Future[Verdict]] = {}
        self._link: _Link | None = None
        self._connecting = asyncio.Lock()
        self._count = 0

    async def prepare(self, kind: str, value: Any) -> Constraint:
        """What to send for a constraint, as the engine's own front end would.

        Raises `Refusal`: INVALID_ARGUMENT naming `kind` and the engine's reason, FAILED_PRECONDITION for what this
        engine cannot enforce any more or at all, UNAVAILABLE while there is no companion.
        """
        size = _check_shape(kind, value)
        while True:
            backend = self._latch.backend
            verdict = await self._verdict(kind, value, size, backend)
            if isinstance(verdict, Refused):
                raise _refusal(kind, verdict)
            if self._latch.take(verdict.backend) == verdict.backend:
                if not backend:
                    self._verdicts.put(_key(kind, value, verdict.backend), verdict, size)
                return Constraint(
                    kind=verdict.kind,
                    value=verdict.value,
                    backend=verdict.backend,
                    backend_was_auto=verdict.backend_was_auto,
                )

    async def meet(self) -> None:
        """Connect now, so that one of another version is found before it is needed."""
        with contextlib.suppress(Refusal):
            await self._connected()

    def close(self) -> None:
        if self._link is not None:
            self._link.close()

    async def _verdict(self, kind: str, value: Any, size: int, backend: str) -> Verdict:
        key = _key(kind, value, backend)
        kept = self._verdicts.get(key)
        if kept is not None:
            return kept
        asked = self._asked.get(key)
        if asked is None:
            if len(self._asked) >= MAX_WAITING:
                raise Refusal(Code.RESOURCE_EXHAUSTED, f"{len(self._asked)} constraints wait for the companion")
            asked = self._asked[key] = asyncio.ensure_future(self._ask(kind, value, backend))
            asked.add_done_callback(lambda future: self._take(key, future, size))
        return await asyncio.shield(asked)  # others may wait for the same verdict

    def _take(self, key: bytes, future: asyncio.Future[Verdict], size: int) -> None:
        del self._asked[key]
        if future.cancelled() or future.exception() is not None:
            return
        verdict = future.result()
        if isinstance(verdict, Accepted) or verdict.cause is not Cause.AGAIN:
            self._verdicts.put(key, verdict, size)

    async def _ask(self, kind: str, value: Any, backend: str) -> Verdict:
        link = await self._connected()
        self._count += 1
        try:
            async with asyncio.timeout(ANSWER_LIMIT_S):
                return await link.ask(Check(id=self._count, kind=kind, value=value, backend=backend))
        except TimeoutError:
            log.error("the companion did not answer for %g s", ANSWER_LIMIT_S)
            link.close()
            self._on_silence(ANSWER_LIMIT_S)
            raise Refusal(Code.UNAVAILABLE, AWAY) from None

    async def _connected(self) -> _Link:
        async with self._connecting:
            if self._link is None or self._link.lost:
                try:
                    _, self._link = await asyncio.get_running_loop().create_unix_connection(
                        lambda: _Link(self._on_other_version), self._address
                    )
                except OSError:
                    raise Refusal(Code.UNAVAILABLE, AWAY) from None
            return self._link


class _Link(asyncio.Protocol):
    """One connection to the companion."""

    def __init__(self, on_other_version: Callable[[str], None]) -> None:
        self.lost = False
        self._on_other_version = on_other_version
        self._framing = Framing(MAX_MESSAGE)
        self._decoder: msgspec.msgpack.Decoder[FromCompanion] = msgspec.msgpack.Decoder(FromCompanion)
        self._transport: asyncio.Transport | None = None
        self._waiting: dict[int, asyncio.Future[Verdict]] = {}

    async def ask(self, check: Check) -> Verdict:
        """Raises `Refusal` UNAVAILABLE when the connection ends first."""
        if self.lost or self._transport is None:
            raise Refusal(Code.UNAVAILABLE, AWAY)
        future: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self._waiting[check.id] = future
        self._transport.write(framed(check))
        try:
            return await future
        finally:
            self._waiting.pop(check.id, None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._framing.feed(data):
                self._take(self._decoder.decode(body))
        except (FramingError, msgspec.MsgspecError) as error:
            log.error("the companion sent what is no message of its protocol: %s", error)
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(Refusal(Code.UNAVAILABLE, AWAY))

    def close(self) -> None:
        self.lost = True
        if self._transport is not None:
            self._transport.abort()

    def _take(self, message: FromCompanion) -> None:
        if isinstance(message, Hello):
            if (message.version, message.bridge_version) != (COMPANION_VERSION, __version__):
                log.error(
                    "the companion is of headless-bridge %s, this is %s: install headless-bridge==%s there too",
                    message.bridge_version,
                    __version__,
                    __version__,
                )
                self.close()
                self._on_other_version(message.bridge_version)
            return
        future = self._waiting.get(message.id)
        if future is not None and not future.done():
            future.set_result(message)


def _key(kind: str, value: Any, backend: str) -> bytes:
    return hashlib.blake2b(msgspec.msgpack.encode((kind, value, backend)), digest_size=16).digest()


def _check_shape(kind: str, value: Any) -> int:
    """Bytes of the value; raises `Refusal` for one that no engine takes."""
    if kind not in TYPES:
        raise Refusal(Code.UNIMPLEMENTED, f"{kind} is no constraint that is checked here; known: {', '.join(TYPES)}")
    if not isinstance(value, TYPES[kind]):
        raise invalid(kind, value, f"a {TYPES[kind].__name__}")
    words = value if isinstance(value, list) else [value] if isinstance(value, str) else []
    try:
        size = sum(len(word.encode()) + 1 for word in words)
    except UnicodeEncodeError:
        raise invalid(kind, value, "text without lone surrogates") from None
    if size > MAX_CONSTRAINT:
        raise invalid(f"the size of {kind}", size, f"at most {MAX_CONSTRAINT} bytes")
    return size


def _refusal(kind: str, refused: Refused) -> Refusal:
    if refused.cause is Cause.AGAIN:
        return Refusal(Code.UNAVAILABLE, f"{kind} could not be checked now: {refused.reason}; try again")
    text = f"{kind} cannot be enforced: {refused.reason}"
    if refused.cause is Cause.BACKEND:
        text += (
            "; an engine keeps the backend of its first constraint for its life, "
            "unless it is started with the one you need"
        )
    return Refusal(_CODES[refused.cause], text)
