"""What the fuzzer sends: every field of every RPC, the same for the same seed, and each class as it says."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.descriptor import FieldDescriptor as Field
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from bridge.grpc.status import Code
from tests.fuzz import poison
from tests.fuzz.answers import surprise
from tests.fuzz.cases import CLASSES, HOSTILE, NEAR, VALID, Case, batches, case
from tests.fuzz.client import Answer
from tests.fuzz.fields import FIELDS, Model, float32_after
from tests.fuzz.make import GENERATE, METHODS, leaves, parsed
from tests.fuzz.refused import refused_feature

MODEL = Model(vocab_size=259, max_model_len=512, max_output=6)


def made(count: int, *kinds: str) -> list[Case]:
    return [one for batch in batches(1, count, 50, kinds, MODEL) for one in batch]


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return made(6000, *CLASSES)


def test_a_case_is_the_same_whichever_were_made_before(cases: list[Case]) -> None:
    assert made(200, *CLASSES) == cases[:200]
    assert all(case(1, number, cases[number].kind, MODEL) == cases[number] for number in (0, 49, 77, 5999))
    assert case(2, 0, VALID, MODEL) != cases[0]


def test_every_rpc_of_the_contract_is_called_in_every_class(cases: list[Case]) -> None:
    called = Counter((one.kind, one.method) for one in cases)
    assert {kind for kind, _ in called} == set(CLASSES)
    for kind in CLASSES:
        assert {method for had, method in called if had == kind} == set(METHODS)


def test_every_field_of_a_generation_gets_values_by_its_name() -> None:
    """A field that a new contract brings fails here until somebody says what it may hold."""
    paths = leaves(pb.GenerateRequest.DESCRIPTOR)
    names = {f"{path[-1].containing_type.name}.{path[-1].name}" for path in paths}
    parts = {name for name in names if name.split(".")[0] in ("GenerateRequest", "SamplingParams", "TokenizedInput")}
    assert parts <= set(FIELDS)


def _fields(descriptor: Descriptor) -> set[str]:
    return {f"{descriptor.name}.{field.name}" for field in descriptor.fields}


def test_the_table_of_values_has_no_field_that_the_contract_lacks() -> None:
    known: set[str] = set()
    for method in METHODS.values():
        known |= _fields(method.input_type)
        for path in leaves(method.input_type):
            known |= _fields(path[-1].containing_type)
    assert set(FIELDS) <= known


def test_valid_and_near_requests_parse_and_hostile_ones_are_no_request_or_hold_a_poison(cases: list[Case]) -> None:
    for one in cases:
        if one.kind == HOSTILE:
            assert one.says or one.headers or one.path or one.message is None
        else:
            assert one.message is not None and parsed(one.method, one.message) is not None


def test_every_poison_is_used_and_every_field_is_set_in_valid_requests(cases: list[Case]) -> None:
    names = {one.name for one in cases if one.kind == HOSTILE and one.method == GENERATE}
    assert {f"{GENERATE}, {name.strip()}" for name in poison.POISONS} <= names
    used: set[str] = set()
    for one in cases:
        request = one.request
        if one.kind == VALID and request is not None:
            used |= {field.name for field, _ in request.ListFields()}
            used |= {field.name for field, _ in request.sampling_params.ListFields()}
    never = {field.name for field in pb.SamplingParams.DESCRIPTOR.fields} - used
    assert not never


def test_a_model_without_a_feature_is_never_asked_for_it() -> None:
    without = Model(
        vocab_size=259, max_model_len=512, without=frozenset(("SamplingParams.logprobs", "SamplingParams.n"))
    )
    for number in range(1500):
        request = case(1, number, (VALID, NEAR)[number % 2], without).request
        if request is not None:
            assert not request.sampling_params.HasField("logprobs") and not request.sampling_params.n


def test_float_neighbours_are_the_next_ones() -> None:
    assert float32_after(1.0, math.inf) == 1.0 + 2**-23
    assert float32_after(1.0, -math.inf) == 1.0 - 2**-24
    assert float32_after(-2.0, -math.inf) == -2.0 - 2**-22
    assert float32_after(0.0, -math.inf) < 0 < float32_after(0.0, math.inf)


def test_a_refusal_by_name_is_one_only_with_its_status() -> None:
    text = "media_refs is 'set'; media inputs are not supported"
    assert refused_feature(Code.UNIMPLEMENTED, text) == "media"
    assert refused_feature(Code.INVALID_ARGUMENT, text) is None
    assert refused_feature(Code.UNIMPLEMENTED, "something else") is None


def _generation(kind: str, **fields: object) -> Case:
    message = pb.GenerateRequest(**fields).SerializeToString()  # type: ignore[arg-type]
    return Case(number=0, kind=kind, name="", method=GENERATE, body=b"", message=message, says=("top_p",))


def _terminal(*ids: int) -> bytes:
    complete = pb.GenerateComplete(output_ids=ids, completion_tokens=len(ids), finish_reason="length")
    return pb.GenerateResponse(complete=complete).SerializeToString()


OK = Answer("status", 0, "", [_terminal(5, 6)])


@pytest.mark.parametrize(
    ("one", "answer", "what"),
    [
        (_generation(VALID), OK, None),
        (_generation(VALID, stream=True), OK, "chunks say"),
        (_generation(VALID), Answer("status", 0), "terminals"),
        (_generation(VALID, sampling_params=pb.SamplingParams(max_tokens=1)), OK, "2 tokens"),
        (_generation(VALID, sampling_params=pb.SamplingParams(logprobs=1)), OK, "log-probabilities"),
        (_generation(VALID, sampling_params=pb.SamplingParams(n=2)), OK, "terminals"),
        (_generation(VALID), Answer("status", 3, "top_p is 2"), "INVALID_ARGUMENT"),
        (_generation(VALID), Answer("reset", None, "error code 2"), "reset"),
        (_generation(NEAR), Answer("status", 3, "top_p is 2"), None),
        (_generation(NEAR), Answer("status", 13, "internal error: KeyError"), "INTERNAL"),
        (_generation(NEAR), Answer("status", 3, ""), "without a message"),
        (_generation(NEAR), Answer("nothing", None, "no answer within 60 s"), "no answer"),
        (_generation(HOSTILE), OK, "accepted"),
        (_generation(HOSTILE), Answer("status", 3, "top_p is 2; it must be less"), None),
        (_generation(HOSTILE), Answer("status", 3, "something is wrong"), "does not name"),
        (_generation(HOSTILE), Answer("status", 14, "the engine is gone"), "UNAVAILABLE"),
    ],
)
def test_what_is_a_surprise(one: Case, answer: Answer, what: str | None) -> None:
    said = surprise(one, answer)
    assert said is None if what is None else said is not None and what in said


def test_field_kinds_are_those_of_the_descriptor() -> None:
    """`leaves` stops at what repeats, so that a list is one value."""
    paths = leaves(pb.GenerateRequest.DESCRIPTOR)
    assert ("tokenized", "input_ids") in [tuple(field.name for field in path) for path in paths]
    assert all(path[-1].is_repeated or path[-1].type != Field.TYPE_MESSAGE for path in paths)
