"""The codec is built from what the engine declares, and says what is missing."""

from __future__ import annotations

import logging

import pytest

from bridge.wire.codec import GenerateCall, Sampling
from bridge.wire.engines import codec_for
from bridge.wire.errors import LayoutError
from bridge.wire.sglang.codec import from_ready
from bridge.wire.sglang.requests import REQUEST, REQUEST_FIELDS
from tests.wire.sglang.recorded import VECTORS, VERSIONS, oracle, ready_of

CALL = GenerateCall(wire_id="w", prompt_token_ids=[1, 2], sampling=Sampling(), arrival_time=1.5)


@pytest.mark.parametrize("version", VERSIONS)
def test_no_field_of_a_supported_release_is_sent_as_nil_for_want_of_knowing_it(
    version: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        codec = codec_for("sglang", ready_of(version), {}, 1)
    assert (codec.engine, codec.version) == ("sglang", version)
    assert not caplog.records


@pytest.mark.parametrize("version", ["0.32.0", "", None, 5])
def test_another_engine_is_refused(version: object) -> None:
    with pytest.raises(LayoutError, match="an SGLang engine says"):
        from_ready({**ready_of("0.5.23"), "vllm_version": version}, {}, 0)


@pytest.mark.parametrize("declared", [None, {}, []])
def test_an_engine_that_declares_nothing_is_refused(declared: object) -> None:
    with pytest.raises(LayoutError, match="declares no positional_layouts"):
        from_ready(ready_of("0.5.23", positional_layouts=declared), {}, 0)


@pytest.mark.parametrize("struct", ["TokenizedGenerateReqInput", "TokenizedEmbeddingReqInput", "SamplingParams"])
def test_a_struct_that_is_not_declared_is_named(struct: str) -> None:
    declared = {name: order for name, order in VECTORS["0.5.23"]["declared"].items() if name != struct}
    with pytest.raises(LayoutError, match=f"no layout of {struct}"):
        from_ready(ready_of("0.5.23", positional_layouts=declared), {}, 0)


def test_a_field_that_a_release_dropped_is_named() -> None:
    declared = dict(VECTORS["0.5.23"]["declared"])
    declared[REQUEST] = [name for name in declared[REQUEST] if name != "input_ids"]
    with pytest.raises(LayoutError, match="has no field input_ids"):
        from_ready(ready_of("0.5.23", positional_layouts=declared), {}, 0)


def test_a_release_that_moves_a_field_is_followed() -> None:
    declared = dict(VECTORS["0.5.23"]["declared"])
    declared[REQUEST] = ["brand_new", *reversed(declared[REQUEST])]
    codec = from_ready(ready_of("0.5.23", positional_layouts=declared), {}, 0)
    tag, *values = oracle(codec.add(CALL)[1])
    sent = dict(zip(declared[REQUEST], values, strict=False))
    assert tag == REQUEST
    assert (sent["rid"], sent["input_ids"], sent["brand_new"], sent["stream"]) == ("w", [1, 2], None, True)


def test_the_fields_are_those_of_some_release() -> None:
    known = {name for version in VERSIONS for name in VECTORS[version]["declared"][REQUEST]}
    assert {field.name for field in REQUEST_FIELDS} <= known
