"""Values by field: what a worker must accept, and what lies at or just past a limit. Unlisted fields go by their type."""

from __future__ import annotations

import math
import string
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor as Field

INT32_MAX, UINT32_MAX, INT64_MAX = 2**31 - 1, 2**32 - 1, 2**63 - 1
FLOAT_MAX = 3.4028234663852886e38
DENORMAL = 1.401298464324817e-45


@dataclass(frozen=True, kw_only=True)
class Model:
    """What the values depend on. Counts in tokens; `max_output` caps a valid request's answer, None leaves it free."""

    vocab_size: int
    max_model_len: int
    max_logprobs: int = 20
    ranks: int = 1
    max_output: int | None = None
    max_prompt: int = 64
    without: frozenset[str] = frozenset()
    """`Message.field` of what the worker's engine lacks, and no case asks for."""


@dataclass(frozen=True, kw_only=True)
class Values:
    """One field's values.

    `chance` is how often a valid request sets it. `valid(random, model)` makes a value of the field's Python type.
    `near(model)` lists values at the limits and past them; None in place of it takes those of the field's type.
    """

    chance: float = 0.3
    valid: Callable[[Random, Model], Any]
    near: Callable[[Model], list[Any]] | None = None


def float32_after(value: float, towards: float) -> float:
    """The next float of 32 bits."""
    bits: int = struct.unpack("<i", struct.pack("<f", value))[0]
    if value == 0:
        return math.copysign(DENORMAL, towards)
    bits += 1 if (towards > value) == (value > 0) else -1
    after: float = struct.unpack("<f", struct.pack("<i", bits))[0]
    return after


def around(*limits: float) -> list[float]:
    """Each limit with its two neighbours, and the floats that break comparisons."""
    near = [
        after for limit in limits for after in (float32_after(limit, -math.inf), limit, float32_after(limit, math.inf))
    ]
    return [*near, 0.0, -0.0, DENORMAL, FLOAT_MAX, -FLOAT_MAX, math.inf, -math.inf, math.nan]


def counts(*limits: int) -> list[int]:
    """Each limit with its neighbours; negative values reach an unsigned field as ten-byte varints."""
    near = {value for limit in limits for value in (limit - 1, limit, limit + 1)}
    return [*sorted(near), -1, -2, INT32_MAX, 2**31, UINT32_MAX, 2**32, -(2**31), INT64_MAX]


def token(random: Random, model: Model) -> int:
    return random.randrange(model.vocab_size)


def tokens(random: Random, model: Model, most: int) -> list[int]:
    return [token(random, model) for _ in range(random.randint(1, most))]


def bad_ids(model: Model) -> list[list[int]]:
    """Lists of ids of which one is outside the vocabulary, and the edges of those inside."""
    last = model.vocab_size - 1
    wrong = (last + 1, UINT32_MAX, INT32_MAX, -1, -(2**31), 2**32 + 5, INT64_MAX)
    return [[0], [last], [last, 0], [], *([last, value] for value in wrong), [5] * 4096]


WORDS = ("a", " the", "\n", "END", "é", "日本", "stop here", "a" * 64, "\u0000", "👩‍🚀")

SCHEMAS = (
    '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"],"additionalProperties":false}',
    '{"type":"string","enum":["x","y"]}',
    '{"type":"array","items":{"type":"boolean"},"maxItems":3}',
)
GRAMMARS = ('root ::= "yes" | "no"', "root ::= digit+\ndigit ::= [0-9]")
TAGS = ('{"type":"structural_tag","format":{"type":"json_schema","json_schema":{"type":"integer"}}}',)


def text(random: Random) -> str:
    alphabet = string.ascii_letters + string.digits + " .,;é日\n"
    return "".join(random.choices(alphabet, k=random.randint(1, 40)))


def deep_schema(levels: int) -> str:
    return '{"type":"array","items":' * levels + '{"type":"integer"}' + "}" * levels


def _max_tokens(random: Random, model: Model) -> int:
    return random.randint(1, model.max_output or model.max_model_len)


def _prompt_lengths(model: Model) -> list[list[int]]:
    return [[7] * length for length in (model.max_model_len - 1, model.max_model_len, model.max_model_len + 1)]


RARE = 0.03
"""How often a valid request uses a feature that costs the worker more than a plain one."""

FIELDS: Mapping[str, Values] = {
    "GenerateRequest.request_id": Values(
        chance=0.0,
        valid=lambda random, _: f"{random.getrandbits(64):x}",
        near=lambda _: ["", "same", "x" * 5000, "\n\0é"],
    ),
    "GenerateRequest.tokenized": Values(chance=0.8, valid=lambda *_: None),
    "GenerateRequest.text": Values(
        chance=0.2,
        valid=lambda random, _: text(random),
        near=lambda model: ["", "\0", " ", "é", "a" * model.max_model_len],
    ),
    "GenerateRequest.sampling_params": Values(chance=0.97, valid=lambda *_: None),
    "GenerateRequest.stream": Values(chance=0.5, valid=lambda *_: True),
    "GenerateRequest.kv_transfer_params": Values(chance=RARE / 4, valid=lambda *_: None),
    "GenerateRequest.kv_transfer_params_json": Values(
        chance=RARE / 3,
        valid=lambda *_: '{"do_remote_decode":true,"do_remote_prefill":false,"remote_block_ids":null}',
        near=lambda _: [
            *(
                "",
                "{",
                "[]",
                "null",
                "1",
                "{}",
                '{"":{}}',
                '{"a":NaN}',
                '{"a":1e999}',
                '{"a":1,"a":"\\u0000"}',
                "[" * 3000,
            ),
            *(f'{{"a":{value}}}' for value in (2**64, 2**64 - 1, -(2**63), -(2**63) - 1, 10**400)),
            *('{"a":"\\ud800"}', '{"\\udfff":1}', '{"a":"' + "x" * 60_000 + '"}'),
            *('{"a":' * levels + "1" + "}" * levels for levels in (50, 200, 500, 900, 3000)),
            *('{"a":' + "[" * levels + "]" * levels + "}" for levels in (200, 900)),
        ],
    ),
    "GenerateRequest.data_parallel_rank": Values(
        chance=0.1, valid=lambda random, model: random.randrange(model.ranks), near=lambda model: counts(0, model.ranks)
    ),
    "GenerateRequest.mm_inputs": Values(chance=0.0, valid=lambda *_: None),
    "GenerateRequest.extra_mm_inputs": Values(chance=0.0, valid=lambda *_: None),
    "GenerateRequest.media_refs": Values(chance=0.0, valid=lambda *_: None),
    "TokenizedInput.original_text": Values(chance=0.1, valid=lambda random, _: text(random)),
    "TokenizedInput.input_ids": Values(
        chance=1.0,
        valid=lambda random, model: tokens(random, model, random.choice((4, model.max_prompt))),
        near=lambda model: [*bad_ids(model), *_prompt_lengths(model)],
    ),
    "SamplingParams.temperature": Values(
        chance=0.7,
        valid=lambda random, _: random.choice((0.0, 0.001, 0.5, 1.0, 1.7, 2.0)),
        near=lambda _: around(2, 0.01),
    ),
    "SamplingParams.top_p": Values(
        valid=lambda random, _: random.choice((1.0, random.uniform(0.01, 1))), near=lambda _: around(1)
    ),
    "SamplingParams.top_k": Values(
        valid=lambda random, model: random.randint(1, model.vocab_size), near=lambda model: counts(1, model.vocab_size)
    ),
    "SamplingParams.min_p": Values(chance=0.1, valid=lambda random, _: random.random(), near=lambda _: around(1)),
    "SamplingParams.frequency_penalty": Values(
        chance=0.15, valid=lambda random, _: random.uniform(-2, 2), near=lambda _: around(-2, 2)
    ),
    "SamplingParams.presence_penalty": Values(
        chance=0.15, valid=lambda random, _: random.uniform(-2, 2), near=lambda _: around(-2, 2)
    ),
    "SamplingParams.repetition_penalty": Values(
        chance=0.15, valid=lambda random, _: random.uniform(0.1, 2), near=lambda _: around(1)
    ),
    "SamplingParams.max_tokens": Values(
        chance=0.9, valid=_max_tokens, near=lambda model: counts(1, model.max_model_len, INT32_MAX)
    ),
    "SamplingParams.min_tokens": Values(
        chance=0.1, valid=lambda random, _: random.randint(1, 4), near=lambda model: counts(1, model.max_model_len)
    ),
    "SamplingParams.stop": Values(
        chance=2 * RARE,
        valid=lambda random, _: random.sample(WORDS, random.randint(1, 3)),
        near=lambda _: [[""], ["a", ""], ["a"] * 300, ["a" * 5000], ["\ud7ff\U0010ffff"], [" "]],
    ),
    "SamplingParams.stop_token_ids": Values(
        chance=0.2,
        valid=lambda random, model: tokens(random, model, 4),
        near=lambda model: [*bad_ids(model), [*range(200)]],
    ),
    "SamplingParams.skip_special_tokens": Values(chance=0.3, valid=lambda *_: True),
    "SamplingParams.spaces_between_special_tokens": Values(chance=0.3, valid=lambda *_: True),
    "SamplingParams.ignore_eos": Values(chance=0.3, valid=lambda *_: True),
    "SamplingParams.n": Values(
        chance=2 * RARE, valid=lambda random, _: random.randint(1, 3), near=lambda _: [0, 1, 2, 16385, UINT32_MAX, -1]
    ),
    "SamplingParams.logprobs": Values(
        chance=RARE,
        valid=lambda random, model: random.randint(0, model.max_logprobs),
        near=lambda model: counts(0, model.max_logprobs),
    ),
    "SamplingParams.prompt_logprobs": Values(
        chance=RARE,
        valid=lambda random, model: random.randint(0, model.max_logprobs),
        near=lambda model: counts(0, model.max_logprobs),
    ),
    "SamplingParams.seed": Values(
        chance=0.2,
        valid=lambda random, _: random.randint(-(2**31), INT32_MAX),
        near=lambda _: [0, -1, INT32_MAX, -(2**31), 2**40],
    ),
    "SamplingParams.include_stop_str_in_output": Values(chance=RARE / 2, valid=lambda *_: True),
    "SamplingParams.logit_bias": Values(
        chance=RARE,
        valid=lambda random, model: {
            token(random, model): random.uniform(-100, 100) for _ in range(random.randint(1, 5))
        },
        near=lambda model: [
            {0: 100.0},
            {model.vocab_size - 1: -100.0},
            {model.vocab_size: 1.0},
            {-1: 1.0},
            {INT32_MAX: 1.0},
            {-(2**31): 1.0},
            *({3: bias} for bias in (101.0, FLOAT_MAX, math.inf, -math.inf, math.nan, 0.0)),
            dict.fromkeys(range(min(model.vocab_size, 1200)), -1.0),
            {},
        ],
    ),
    "SamplingParams.truncate_prompt_tokens": Values(
        chance=RARE,
        valid=lambda random, model: random.choice((-1, random.randint(1, model.max_model_len - 1))),
        near=lambda model: counts(0, model.max_model_len),
    ),
    "SamplingParams.grammar_from_first_token": Values(chance=RARE / 2, valid=lambda *_: True),
    "SamplingParams.json_schema": Values(
        chance=RARE / 4,
        valid=lambda random, _: random.choice(SCHEMAS),
        near=lambda _: [
            "",
            " ",
            "{}",
            "[]",
            "true",
            "null",
            "{",
            '{"type":"nope"}',
            deep_schema(63),
            deep_schema(70),
            "[" * 5000,
        ],
    ),
    "SamplingParams.regex": Values(
        chance=RARE / 4,
        valid=lambda random, _: random.choice((r"\d{1,3}", "(yes|no)", "[a-z]+")),
        near=lambda _: ["", "(", "[", "a{99999}", "\0", "(?<=a)b", "(a+)+$", r"\p{L}", "a" * 4000],
    ),
    "SamplingParams.grammar": Values(
        chance=RARE / 4,
        valid=lambda random, _: random.choice(GRAMMARS),
        near=lambda _: [
            "",
            " ",
            "root ::=",
            "root ::= root",
            "start: /a+/",
            "root ::= nothing",
            '%llguidance {}\nstart: "a"',
        ],
    ),
    "SamplingParams.structural_tag": Values(
        chance=RARE / 8,
        valid=lambda random, _: random.choice(TAGS),
        near=lambda _: ["", " ", "{}", "[", '{"type":"structural_tag"}'],
    ),
    "SamplingParams.json_object": Values(chance=RARE / 4, valid=lambda *_: True),
    "SamplingParams.choice": Values(chance=RARE / 4, valid=lambda *_: None),
    "ChoiceConstraint.choices": Values(
        chance=1.0,
        valid=lambda random, _: random.sample(("yes", "no", "maybe", "é"), random.randint(1, 3)),
        near=lambda _: [[], [""], ["a", "a"], ["\0"], ["x"] * 500],
    ),
    "AbortRequest.request_ids": Values(
        valid=lambda random, _: [f"{random.getrandbits(32):x}" for _ in range(random.randint(0, 3))],
        near=lambda _: [[], [""], ["same"], ["same"] * 3000, ["x" * 5000], ["0.1.1"], ["1.1.1", "1.1.2"]],
    ),
    "GetLoadsRequest.dp_rank": Values(
        valid=lambda random, model: random.randrange(model.ranks), near=lambda model: counts(0, model.ranks)
    ),
    "FlushCacheRequest.timeout_s": Values(
        valid=lambda *_: 0.0, near=lambda _: [0.0, -0.0, -1.0, DENORMAL, 0.2, -math.inf]
    ),
    "StartProfileRequest.output_dir": Values(chance=0.0, valid=lambda *_: "", near=lambda _: ["", "/tmp", "../x"]),
    "StartProfileRequest.start_step": Values(chance=0.0, valid=lambda *_: 0),
    "StartProfileRequest.num_steps": Values(chance=0.0, valid=lambda *_: 0),
    "StartProfileRequest.activities": Values(chance=0.0, valid=lambda *_: ["CPU"]),
    "StartProfileRequest.with_stack": Values(chance=0.0, valid=lambda *_: True),
    "StartProfileRequest.record_shapes": Values(chance=0.0, valid=lambda *_: True),
    "StartProfileRequest.profile_by_stage": Values(chance=0.0, valid=lambda *_: True),
}
"""`Message.field` → its values. Limits are vLLM's (0.32), whose front end is what the bridge stands in for."""

_INTEGERS = {
    Field.TYPE_INT32: (0, 1, -1, INT32_MAX, -(2**31)),
    Field.TYPE_INT64: (0, 1, -1, INT64_MAX, -(2**63)),
    Field.TYPE_UINT32: (0, 1, UINT32_MAX),
    Field.TYPE_UINT64: (0, 1, 2**64 - 1),
    Field.TYPE_ENUM: (0, 1, 2, 3, 4, -1, INT32_MAX),
    Field.TYPE_BOOL: (0, 1, 2, UINT32_MAX),
}


def name_of(field: Field) -> str:
    return f"{field.containing_type.name}.{field.name}"


def values_of(field: Field) -> Values | None:
    return FIELDS.get(name_of(field))


def valid_value(field: Field, random: Random, model: Model) -> Any:
    """A value of the field's Python type; a list for a repeated one."""
    values = values_of(field)
    if values is not None:
        return values.valid(random, model)
    if field.is_repeated:
        return [_typical(field, random) for _ in range(random.randint(0, 3))]
    return _typical(field, random)


def _typical(field: Field, random: Random) -> Any:
    if field.type == Field.TYPE_STRING:
        return text(random)
    if field.type == Field.TYPE_BYTES:
        return random.randbytes(random.randint(0, 16))
    if field.type in (Field.TYPE_FLOAT, Field.TYPE_DOUBLE):
        return random.uniform(0, 1)
    if field.type == Field.TYPE_BOOL:
        return random.random() < 0.5
    return random.randint(0, 3)


def near_values(field: Field, model: Model) -> Iterable[Any]:
    """Values at and past the limits; for a repeated field each is a list, for a map a dict."""
    values = values_of(field)
    if values is not None and values.near is not None:
        return values.near(model)
    if field.type == Field.TYPE_MESSAGE:
        return [[], [b""], [b""] * 300]
    single: list[Any]
    if field.type in _INTEGERS:
        single = [*_INTEGERS[field.type]]
    elif field.type in (Field.TYPE_FLOAT, Field.TYPE_DOUBLE):
        single = around(1)
    elif field.type == Field.TYPE_BYTES:
        single = [b"", b"\0", b"\xff" * 300]
    else:
        single = ["", "\0", "é" * 300, "a" * 70_000]
    return [[value] for value in single] if field.is_repeated else single
