"""Does once, at a cost that is limited, what the engine would do with a constraint: compile it and compute token masks.

vLLM's validation only parses. What comes after it happens in the engine, to everybody's loss: a list of 10,000 choices
compiles for nine seconds in the one thread that compiles, and with the regex `(.{1,20}a?){20}` (accepted, compiled in
0.1 s) xgrammar 0.2 computes masks that take seconds each, in the busy loop, which serves nobody meanwhile (vLLM 0.32). A
grammar that guidance gives up on is only a warning in the engine's log, and its request ends early.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from bridge.plugins.resident.worker import unlimited
from bridge.plugins.vllm.installed import CompanionError, module, named

BACKENDS = {
    "xgrammar": ("vllm.v1.structured_output.backend_xgrammar", "XgrammarBackend"),
    "guidance": ("vllm.v1.structured_output.backend_guidance", "GuidanceBackend"),
    "outlines": ("vllm.v1.structured_output.backend_outlines", "OutlinesBackend"),
    "lm-format-enforcer": ("vllm.v1.structured_output.backend_lm_format_enforcer", "LMFormatEnforcerBackend"),
}

STEP_LIMIT_S = 0.1
"""CPU time of one token: its mask, and accepting it. Common constraints take 0.0002 s; the engine does it for each token
of each request in turn."""
WALK_STEPS = 256
WALK_BUDGET_S = 0.5
"""CPU time after which a walk has seen enough."""
LEAST_STEPS = 64
"""Tokens that the budget must suffice for."""
MAX_EMBEDDED = 64
"""Constraints inside one structural tag that are tried by themselves."""

PREFERRED = ('"', "}", "]", ",", ":", "{", "[", "1")
"""What leads to the end of a JSON value soon, so that the walk comes past its other parts."""


class CostError(Exception):
    """The constraint costs the engine too much."""


class _EngineConfig:
    """Stands in for VllmConfig, of which the backends read three parts (vLLM 0.27 to 0.33)."""

    def __init__(self, model: Any, structured_outputs: Any, speculative: Any) -> None:
        self.model_config = model
        self.structured_outputs_config = structured_outputs
        self.speculative_config = speculative

    def __getattr__(self, name: str) -> Any:
        version = module("vllm").__version__
        raise CompanionError(f"the grammar backends of vLLM {version} read {name}; known to work: 0.27 to 0.33")


class _Speculative:
    """What the backends read of SpeculativeConfig."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.num_speculative_tokens = int(config.get("num_speculative_tokens") or 0)


class Trial:
    """The engine's grammar backends, without the engine."""

    def __init__(
        self, model: Any, tokenizer: Any, config: Any, speculative: dict[str, Any] | None, regex_limit_s: float
    ) -> None:
        """`speculative` is the argument of `--speculative-config`; past `regex_limit_s` the engine stops compiling."""
        self._tokenizer = tokenizer
        self._vocab_size = int(model.get_vocab_size())
        self._config = _EngineConfig(model, config, _Speculative(speculative) if speculative else None)
        self._regex_limit_s = regex_limit_s
        self._backends: dict[str, Any] = {}
        self._key_of = named("vllm.v1.structured_output.request", "get_structured_output_key")
        self._options = named("vllm.v1.structured_output.backend_types", "StructuredOutputOptions")
        self._single, self._preferred = self._marked_tokens()

    def backend(self, name: str) -> Any:
        """vLLM's backend of that name; raises `CompanionError` where it cannot run."""
        if name not in self._backends:
            if name not in BACKENDS:
                raise CompanionError(f"the grammar backend {name} is not known here; known: {', '.join(BACKENDS)}")
            try:
                with unlimited():
                    self._backends[name] = named(*BACKENDS[name])(
                        vllm_config=self._config, tokenizer=self._tokenizer, vocab_size=self._vocab_size
                    )
            except (ImportError, ValueError, RuntimeError) as error:
                raise CompanionError(f"the grammar backend {name} cannot run here: {error}") from None
        return self._backends[name]

    def run(self, params: Any) -> None:
        """Compile validated StructuredOutputsParams for the backend they name, and walk through them.

        Raises `CostError`, or what the backend raises for a constraint that it cannot compile.
        """
        backend = self.backend(params._backend)
        kind, text = self._key_of(params)
        self._try(backend, kind, text)
        if kind == self._options.STRUCTURAL_TAG:
            for inner_kind, inner in self._embedded(text):
                self._try(backend, inner_kind, inner)

    def _try(self, backend: Any, kind: Any, text: str) -> None:
        grammar = self._compiled(backend, kind, text)
        mask = self._mask_for(backend)
        chance = random.Random(0)
        self._walk(grammar, mask, lambda bits: self._closing(bits, chance))
        grammar.reset()
        if grammar.is_terminated():
            grammar = self._compiled(backend, kind, text)
        self._walk(grammar, mask, lambda bits: self._lingering(bits, chance))

    def _mask_for(self, backend: Any) -> Any:
        """One row of tokens, as bits. The backends' own allocation pins memory, which takes a CUDA context of its own."""
        tokens = getattr(getattr(backend, "ll_tokenizer", None), "vocab_size", backend.vocab_size)
        torch = module("torch")
        return torch.full((1, (tokens + 31) // 32), -1, dtype=torch.int32)

    def _compiled(self, backend: Any, kind: Any, text: str) -> Any:
        started = time.process_time()
        grammar = backend.compile_grammar(kind, text)
        spent = time.process_time() - started
        by_regex = kind == self._options.REGEX or backend is self._backends.get("outlines")
        if by_regex and 0 < self._regex_limit_s < spent:
            raise CostError(
                f"it compiles for {spent:.1f} s; the engine gives up after {self._regex_limit_s:g} s "
                "(VLLM_REGEX_COMPILATION_TIMEOUT_S)"
            )
        _raise_given_up(grammar)
        return grammar

    def _walk(self, grammar: Any, mask: Any, choose: Callable[[Any], int]) -> None:
        """Take one way through the grammar, token by token. It ends where the grammar does, or where no token fits."""
        started = time.process_time()
        for step in range(WALK_STEPS):
            before = time.process_time()
            if before - started > WALK_BUDGET_S and step < LEAST_STEPS:
                raise _too_costly((before - started) / step, WALK_BUDGET_S / LEAST_STEPS)
            if grammar.is_terminated() or before - started > WALK_BUDGET_S:
                return
            mask.fill_(-1)
            grammar.fill_bitmask(mask, 0)
            _check_cost(before)
            _raise_given_up(grammar)
            bits = np.unpackbits(mask.numpy().view(np.uint8)[0], bitorder="little")[: self._vocab_size]
            if not bits.any():
                if step == 0:
                    raise ValueError("no token of this model's vocabulary can begin it")
                return
            if not grammar.accept_tokens("trial", [choose(bits)]):
                return
            _check_cost(before)

    def _closing(self, bits: Any, chance: random.Random) -> int:
        """A token that ends what is open, where there is one. `bits` says of each token whether it is allowed."""
        for token in self._preferred:
            if bits[token]:
                return token
        return self._lingering(bits, chance)

    def _lingering(self, bits: Any, chance: random.Random) -> int:
        """A token of one character, where there is one: the smaller the steps, the more of them."""
        single = self._single[bits[self._single] != 0]
        choices = single if len(single) else np.flatnonzero(bits)
        return int(choices[chance.randrange(len(choices))])

    def _marked_tokens(self) -> tuple[Any, list[int]]:
        """(ids of the tokens of one printable ASCII character, those of `PREFERRED` in that order)."""
        ids = {}
        for code in range(33, 127):
            found = self._tokenizer.encode(chr(code), add_special_tokens=False)
            if len(found) == 1 and found[0] < self._vocab_size:
                ids[chr(code)] = found[0]
        return np.array(sorted(ids.values()), dtype=np.int64), [ids[mark] for mark in PREFERRED if mark in ids]

    def _embedded(self, tag: str) -> Iterator[tuple[Any, str]]:
        """The constraints inside a structural tag, which a walk would not come to: free text leads up to them."""
        options = self._options
        waiting: list[Any] = [json.loads(tag)]
        found = 0
        while waiting and found < MAX_EMBEDDED:
            node = waiting.pop()
            if isinstance(node, list):
                waiting += node
                continue
            if not isinstance(node, dict):
                continue
            for name, kind in (("schema", options.JSON), ("json_schema", options.JSON)):
                if isinstance(node.get(name), dict):
                    found += 1
                    yield kind, json.dumps(node[name])
            for name, kind in (("pattern", options.REGEX), ("grammar", options.GRAMMAR)):
                if node.get("type") in ("regex", "grammar") and isinstance(node.get(name), str):
                    found += 1
                    yield kind, node[name]
            waiting += [value for name, value in node.items() if name not in ("schema", "json_schema")]


def _check_cost(before: float) -> None:
    """`before` is the process's CPU time when the step began."""
    spent = time.process_time() - before
    if spent > STEP_LIMIT_S:
        raise _too_costly(spent, STEP_LIMIT_S)


def _too_costly(spent: float, limit: float) -> CostError:
    return CostError(
        f"one token takes {spent * 1e3:.0f} ms of CPU time, over the limit of {limit * 1e3:.0f} ms "
        "(nested repetitions do that)"
    )


def _raise_given_up(grammar: Any) -> None:
    """guidance stops with an error where it finds a grammar too complex, or impossible to satisfy."""
    matcher = getattr(grammar, "ll_matcher", None)
    if matcher is not None and (error := matcher.get_error()):
        raise ValueError(f"guidance gives up on it: {error}")
