"""What a contract may use: the engine, the guard, text encoding, the tokenizer's files."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any, ClassVar, Protocol

from bridge.engine import Engine
from bridge.grpc.status import Code
from bridge.guard import Guard
from bridge.refusal import Refusal
from bridge.text import TextEncoder
from bridge.wire.codec import Adapter, Constraint
from bridge.wire.engines import rules_for
from bridge.wire.model_folder import ModelFolderError
from bridge.wire.tokenizer_files import tokenizer_archive


class Grammar(Protocol):
    """Validates constraints for the engine."""

    async def prepare(self, kind: str, value: Any) -> Constraint:
        """What to send for a constraint; raises `Refusal` for one that the engine cannot enforce."""
        ...


class NoGrammar:
    """Stands where no companion runs, so nothing can be validated and nothing is sent unvalidated."""

    async def prepare(self, kind: str, value: Any) -> Constraint:
        raise Refusal(
            Code.FAILED_PRECONDITION,
            f"{kind} needs the companion that validates constraints; it runs under `serve` with a real engine",
        )


class OwnGrammar:
    """Stands for an engine that checks constraints itself, of the kinds it has."""

    def __init__(self, engine: str, kinds: Collection[str]) -> None:
        self._engine = engine
        self._kinds = kinds

    async def prepare(self, kind: str, value: Any) -> Constraint:
        if kind not in self._kinds:
            raise Refusal(
                Code.UNIMPLEMENTED, f"{kind} is set; {self._engine} has only {', '.join(sorted(self._kinds))}"
            )
        return Constraint(kind=kind, value=value, backend="")


class Context:
    """Shared by the contracts of one front end; complete once the engine is up."""

    TOKENIZER_CHUNK: ClassVar[int] = 64 * 1024
    """Bytes of the tokenizer archive in one GetTokenizer chunk."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.draining = False
        self.grammar: Grammar = NoGrammar()
        self.text = TextEncoder("")
        self.adapters: dict[str, Adapter] = {}
        """Those that were loaded through this front end, by name."""
        self._guard: Guard | None = None
        self._archive: asyncio.Future[tuple[bytes, str]] | None = None

    def engine_up(self) -> None:
        """Build what depends on the facts. Call after `Engine.up`."""
        facts = self.engine.facts
        ready = self.engine.ranks[0].ready
        limit = int(ready.get("max_model_len") or facts.max_model_len)
        rules = rules_for(self.engine.name)
        self._guard = Guard(facts, limit, rules)
        own = getattr(rules, "OWN_CONSTRAINTS", None)
        if own is not None:
            self.grammar = OwnGrammar(self.engine.name, own)
        self.text = TextEncoder(facts.tokenizer_path)

    @property
    def ready(self) -> bool:
        """Whether `engine_up` was called."""
        return self._guard is not None

    @property
    def guard(self) -> Guard:
        """Raises `Refusal` UNAVAILABLE until the engine was up."""
        if self._guard is None:
            raise Refusal(Code.UNAVAILABLE, f"the engine is not ready: {self.engine.detail}")
        return self._guard

    @property
    def default_sampling_json(self) -> str:
        """The model's sampling defaults as a JSON object, "" when it has none."""
        defaults = self.engine.facts.default_sampling
        return json.dumps(defaults, sort_keys=True) if defaults else ""

    async def tokenizer_archive(self) -> tuple[bytes, str]:
        """The zip of the tokenizer's files and its SHA-256, built once and off the loop."""
        folder = Path(self.engine.facts.tokenizer_path)
        if self._archive is None:
            self._archive = asyncio.ensure_future(asyncio.to_thread(tokenizer_archive, folder))
        try:
            return await asyncio.shield(self._archive)
        except (OSError, ModelFolderError) as error:
            self._archive = None
            raise Refusal(Code.FAILED_PRECONDITION, f"the tokenizer at {folder} cannot be read: {error}") from None
