"""SamplingParams as SGLang's scheduler receives it: a positional array, which the plugin normalizes and verifies.

Temperature 0 is greedy there, and -1 is no `top_k`; 0 is refused. EOS ids are not sent: the scheduler has them from the
model's configuration and its tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from bridge.wire.codec import Constraint, Sampling
from bridge.wire.layout import Field, Layouts, encoder_struct

STRUCT = "SamplingParams"

FIELDS = (
    Field("max_new_tokens", int),
    Field("stop", list[str] | None, None),
    Field("stop_token_ids", list[int] | None, None),
    Field("stop_regex", list[str] | None, None),
    Field("temperature", float),
    Field("top_p", float),
    Field("top_k", int),
    Field("min_p", float),
    Field("frequency_penalty", float),
    Field("presence_penalty", float),
    Field("repetition_penalty", float),
    Field("min_new_tokens", int),
    Field("n", int, 1),
    Field("beam_width", int | None, None),
    Field("json_schema", str | None, None),
    Field("regex", str | None, None),
    Field("ebnf", str | None, None),
    Field("structural_tag", str | None, None),
    Field("ignore_eos", bool, False),
    Field("skip_special_tokens", bool, True),
    Field("spaces_between_special_tokens", bool, True),
    Field("no_stop_trim", bool, False),
    Field("stream_interval", int | None, None),
    Field("logit_bias", dict[str, float] | None, None),
    Field("sampling_seed", int | None, None),
    Field("custom_params", dict[str, Any] | None, None),
)
"""The fields that requests set, 0.5.18 to 0.5.23, with the engine's own defaults; its internal ones follow."""

ANY_OBJECT = '{"type": "object"}'

_CONSTRAINTS = {"json_schema": "json_schema", "regex": "regex", "grammar": "ebnf", "structural_tag": "structural_tag"}
"""Our word for a constraint → its field."""


class Stops(msgspec.Struct, kw_only=True, gc=False):
    """How the scheduler matches stop strings, which it does on text it decodes itself, and how often it sends."""

    strings: list[str] = []
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    stream_interval: int | None = None
    """Tokens between two outputs of a streamed request; None is the engine's own --stream-interval."""


class SamplingEncoder:
    """Makes SamplingParams of one layout."""

    __slots__ = ("_struct",)

    def __init__(self, layouts: Layouts) -> None:
        self._struct: Callable[..., msgspec.Struct] = encoder_struct(layouts, STRUCT, FIELDS)

    def params(self, sampling: Sampling, stops: Stops, custom_params: dict[str, Any] | None) -> msgspec.Struct:
        """The engine's view of `sampling`; raises `ValueError` for a constraint it has no field for."""
        bias = sampling.logit_bias
        return self._struct(
            max_new_tokens=sampling.max_tokens,
            stop=stops.strings or None,
            stop_token_ids=sampling.stop_token_ids or None,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k or -1,
            min_p=sampling.min_p,
            frequency_penalty=sampling.frequency_penalty,
            presence_penalty=sampling.presence_penalty,
            repetition_penalty=sampling.repetition_penalty,
            min_new_tokens=sampling.min_tokens,
            ignore_eos=sampling.ignore_eos,
            skip_special_tokens=stops.skip_special_tokens,
            spaces_between_special_tokens=stops.spaces_between_special_tokens,
            no_stop_trim=stops.no_stop_trim,
            stream_interval=stops.stream_interval,
            logit_bias={str(token): value for token, value in bias.items()} if bias else None,
            sampling_seed=sampling.seed,
            custom_params=custom_params,
            **_constraint(sampling.constraint),
        )

    def of_embedding(self) -> msgspec.Struct:
        """What the scheduler expects beside a prompt that is embedded."""
        return self.params(Sampling(max_tokens=0), Stops(), None)


def _constraint(constraint: Constraint | None) -> dict[str, str]:
    if constraint is None:
        return {}
    if constraint.kind == "json_object":
        return {"json_schema": ANY_OBJECT}
    field = _CONSTRAINTS.get(constraint.kind)
    if field is None:
        raise ValueError(f"SGLang has no constraint {constraint.kind}")
    return {field: constraint.value}
