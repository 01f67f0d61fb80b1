"""The guard: every value of a request is checked here, from facts and the engine's rules, before anything is sent.

vLLM's scheduler trusts its front end: one value its decoder rejects silently wedges it, one token id outside the
vocabulary kills it. So nothing reaches a slot that did not pass here, and every default the engine's own front end would
fill in is filled in here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Protocol

import msgspec

from bridge.grpc.status import Code
from bridge.prompt import LONG, LongPrompt, encode_long
from bridge.refusal import Refusal, invalid, unsupported
from bridge.wire.codec import Sampling
from bridge.wire.companion import Facts
from bridge.wire.rule import Rule

log = logging.getLogger(__name__)


class Ask(msgspec.Struct, kw_only=True, gc=False):
    """The sampling values of one request in neutral words. None is "unset"."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: list[int] = []
    n: int | None = None
    stop: list[str] = []
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    logit_bias: dict[int, float] | None = None
    truncate_prompt_tokens: int | None = None
    allowed_token_ids: list[int] | None = None
    bypass_prefix_cache: bool | None = None
    priority: int | None = None


OURS = ("truncate_prompt_tokens",)
"""Fields of `Ask` that no engine sees."""


class EngineRules(Protocol):
    """An engine's `rules` module: its limits as data."""

    @property
    def RULES(self) -> Mapping[str, Rule]: ...

    @property
    def MAX_HELD_BACK_STOP_IDS(self) -> int: ...

    @property
    def MAX_BIAS(self) -> float | None: ...

    @property
    def GREEDY_SAMPLES_DIFFER(self) -> bool: ...


class Guard:
    """Checks against one engine. `max_model_len` is the engine's own figure from its ready map, in tokens."""

    def __init__(self, facts: Facts, max_model_len: int, rules: EngineRules) -> None:
        self._facts = facts
        self._rules = {name: rules.RULES[name].resolved(facts) for name in Ask.__struct_fields__ if name in rules.RULES}
        self._unknown = [name for name in Ask.__struct_fields__ if name not in rules.RULES and name not in OURS]
        self._max_held_back = rules.MAX_HELD_BACK_STOP_IDS
        self._max_bias = rules.MAX_BIAS
        self._greedy_samples_differ = rules.GREEDY_SAMPLES_DIFFER
        self._vocab_size = facts.vocab_size
        self._valid_ids = list[Annotated[int, msgspec.Meta(ge=0, lt=facts.vocab_size)]]
        self._turn = asyncio.Lock()
        self.max_model_len = max_model_len
        self._eos = [token for token in facts.eos_token_ids if 0 <= token < facts.vocab_size]
        self._defaults = self._checked_defaults(facts.default_sampling)

    def _checked_defaults(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """The model's own sampling defaults, without those that the engine would not accept."""
        checked = {}
        for name, value in defaults.items():
            rule = self._rules.get(name)
            if rule is None or value is None:
                continue
            if rule.allows(value):
                checked[name] = value
            else:
                log.warning("the model's default %s is %r, which the engine refuses; it is not used", name, value)
        return checked

    def is_long(self, tokens: int, limit: int | None) -> bool:
        """Whether what `limit` leaves of a prompt of so many tokens takes `long_prompt`, or is refused by it."""
        return tokens > LONG and (limit is None or not 1 <= limit <= LONG)

    def prompt(self, ids: Sequence[int], limit: int | None) -> list[int]:
        """The last `limit` ids, all if it is None; raises `Refusal` for too many before they are a list."""
        kept = ids[self._start(len(ids), limit) :]  # a quarter faster than list(ids)
        return kept if isinstance(kept, list) else list(kept)

    async def any_prompt(self, ids: Sequence[int], limit: int | None) -> Sequence[int]:
        """`prompt` or `long_prompt`."""
        return await self.long_prompt(ids, limit) if self.is_long(len(ids), limit) else self.prompt(ids, limit)

    async def long_prompt(self, ids: Sequence[int], limit: int | None) -> LongPrompt:
        """As `prompt`, checked and encoded in pieces; one prompt after the other, so that a turn has one piece."""
        start = self._start(len(ids), limit)
        async with self._turn:
            encoded = await encode_long(ids, start, partial(self._check_ids, "input_ids"))
        return LongPrompt(ids, start, encoded, self)

    def _start(self, tokens: int, limit: int | None) -> int:
        """Where the part of a prompt that `limit` keeps begins; -1 keeps what leaves room for one output token."""
        if limit is None:
            self.room(tokens)
            return 0
        if limit != -1 and not 1 <= limit <= self.max_model_len:
            raise invalid("truncate_prompt_tokens", limit, f"-1 or from 1 to {self.max_model_len}")
        return max(0, tokens - (self.max_model_len - 1 if limit == -1 else limit))

    async def check_embed(self, prompt: Sequence[int]) -> Sequence[int]:
        """The prompt; raises `Refusal` unless the model embeds and the prompt fits it."""
        if self._facts.is_generation:
            raise Refusal(Code.FAILED_PRECONDITION, f"{self._facts.served_model_name} generates; it does not embed")
        if not 1 <= len(prompt) <= self.max_model_len:
            raise invalid("the number of input_ids", len(prompt), f"from 1 to {self.max_model_len}")
        if len(prompt) > LONG:
            return await self.long_prompt(prompt, len(prompt))
        ids = list(prompt)
        self._check_ids("input_ids", ids)
        return ids

    def check(self, prompt: Sequence[int], ask: Ask, called: Mapping[str, str] = {}) -> Sampling:
        """The values to send for a prompt of token ids; raises `Refusal` naming the field, the value and the limit.

        `called` has the contract's own names of fields where they differ.
        """
        return self.check_values(self.check_prompt(prompt), ask, called)

    def check_prompt(self, prompt: Sequence[int]) -> int:
        """Tokens of output that fit behind a prompt; raises `Refusal` for one that cannot be sent."""
        if not self._facts.is_generation:
            raise Refusal(Code.FAILED_PRECONDITION, f"{self._facts.served_model_name} embeds; it does not generate")
        room = self.room(len(prompt))
        if not isinstance(prompt, LongPrompt):
            self._check_ids("input_ids", prompt)
        elif prompt.checked_by is not self:
            self._check_ids("input_ids", prompt[:])
        return room

    def check_values(self, room: int, ask: Ask, called: Mapping[str, str] = {}) -> Sampling:
        """The values to send where `room` tokens of output fit.

        As long as what `ask.max_tokens` asks for fits, they are the same for every room.
        """
        asked_max_tokens = ask.max_tokens
        if asked_max_tokens is not None:
            ask.max_tokens = min(asked_max_tokens, room)
        for name in self._unknown:
            value = getattr(ask, name)
            if value is not None and value is not False and value != []:
                raise unsupported(name, value, f"{self._facts.engine} has no such setting; leave it unset")
        for name, rule in self._rules.items():
            value = getattr(ask, name)
            if value is not None and not rule.allows(value):
                raise invalid(called.get(name, name), value, rule.limit)
        facts = self._facts
        max_tokens = min(self._pick(ask, "max_tokens", room), room)
        min_tokens = self._pick(ask, "min_tokens", 0)
        if min_tokens > max_tokens:
            limit = f"at most {called.get('max_tokens', 'max_tokens')}, which is {max_tokens} in this context"
            raise invalid(called.get("min_tokens", "min_tokens"), min_tokens, limit)
        stop_ids = self._stop_ids(ask)
        held_back = len({*stop_ids, *self._eos})
        if min_tokens and held_back > self._max_held_back:
            limit = f"0 with {held_back} stop and EOS ids: the engine holds back at most {self._max_held_back}"
            raise invalid("min_tokens", min_tokens, limit)
        temperature = self._pick(ask, "temperature", 1.0)
        if ask.n is not None and ask.n > 1 and temperature == 0 and not self._greedy_samples_differ:
            raise invalid("n", ask.n, "1 with temperature 0: greedy samples are all the same")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(ask, name) == -1 and facts.max_logprobs < self._vocab_size:
                raise invalid(name, -1, f"from 0 to {facts.max_logprobs}; --max-logprobs -1 lets the engine send all")
        return Sampling(
            temperature=temperature,
            top_p=self._pick(ask, "top_p", 1.0),
            top_k=self._pick(ask, "top_k", 0),
            min_p=self._pick(ask, "min_p", 0.0),
            frequency_penalty=self._pick(ask, "frequency_penalty", 0.0),
            presence_penalty=self._pick(ask, "presence_penalty", 0.0),
            repetition_penalty=self._pick(ask, "repetition_penalty", 1.0),
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            seed=None if ask.seed == -1 else ask.seed,
            ignore_eos=ask.ignore_eos,
            stop_token_ids=stop_ids,
            eos_token_ids=self._eos,
            logprobs=ask.logprobs,
            prompt_logprobs=ask.prompt_logprobs,
            logit_bias=self._bias(ask.logit_bias),
            allowed_token_ids=ask.allowed_token_ids,
            bypass_prefix_cache=bool(ask.bypass_prefix_cache),
        )

    def _bias(self, bias: dict[int, float] | None) -> dict[int, float] | None:
        most = self._max_bias
        if not bias or most is None:
            return bias or None
        return {token: max(-most, min(most, value)) for token, value in bias.items()}

    def _stop_ids(self, ask: Ask) -> list[int]:
        return list(dict.fromkeys([*ask.stop_token_ids, *self._defaults.get("stop_token_ids", ())]))

    def _pick(self, ask: Ask, name: str, last: Any) -> Any:
        """The request's value, else the model's default, else the engine's."""
        value = getattr(ask, name)
        return self._defaults.get(name, last) if value is None else value

    def room(self, tokens: int) -> int:
        """Tokens of output that fit behind a prompt of so many; raises `Refusal` when none do, or for an empty one."""
        if not tokens:
            raise Refusal(Code.INVALID_ARGUMENT, "input_ids is empty; a prompt has at least one token")
        room = self.max_model_len - tokens
        if room < 1:
            raise Refusal(
                Code.INVALID_ARGUMENT,
                f"input_ids has {tokens} tokens; it must be at most {self.max_model_len - 1}, "
                f"so that one output token fits the context of {self.max_model_len}",
            )
        return room

    def _check_ids(self, field: str, ids: Sequence[int], first: int = 0) -> None:
        """`first` is the position of the first of `ids` in the field."""
        try:
            msgspec.convert(ids, self._valid_ids)  # a third of what max() and min() take
        except msgspec.ValidationError:
            at, wrong = next((at, token) for at, token in enumerate(ids, first) if not 0 <= token < self._vocab_size)
            raise invalid(f"{field}[{at}]", wrong, f"a token id below {self._vocab_size}") from None
