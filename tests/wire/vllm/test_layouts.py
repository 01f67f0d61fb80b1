"""Which layout a vLLM version gets, and what happens when a layout is not what we know."""

from __future__ import annotations

import logging

import msgspec
import pytest

from bridge.wire.codec import GenerateCall, Sampling
from bridge.wire.errors import LayoutError
from bridge.wire.vllm.codec import from_ready
from bridge.wire.vllm.layouts import TABLE, for_version
from tests.wire.vllm.recorded import VECTORS, VERSIONS

CALL = GenerateCall(wire_id="w", prompt_token_ids=[1, 2], sampling=Sampling(), arrival_time=1.5)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_table_is_what_the_package_declares(version: str) -> None:
    layouts = for_version(version)
    declared = VECTORS[version]["declared"]
    assert {struct: list(layouts.order(struct)) for struct in layouts.structs} == declared
    assert layouts.source == f"table {version}"


def test_every_version_of_the_table_has_vectors() -> None:
    assert {(int(v.split(".")[0]), int(v.split(".")[1])) for v in VERSIONS} == set(TABLE)


@pytest.mark.parametrize(
    ("version", "table"),
    [
        ("0.32.0+cpu", "0.32.0"),
        ("0.32.4", "0.32.0"),
        ("0.33.0rc1", "0.33.0"),
        ("0.33.1.dev7+g1a2b3c4d5", "0.33.0"),
        ("v0.27.1", "0.27.0"),
        ("0.28", "0.28.0"),
    ],
)
def test_patches_candidates_and_local_builds_are_their_minor_version(
    version: str, table: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert for_version(version).source == f"table {table}"
    assert not caplog.records


@pytest.mark.parametrize("version", ["0.34.0", "0.40.1rc0", "1.0.0", "dev", ""])
def test_an_unknown_newer_version_gets_the_newest_table_and_a_warning(
    version: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        layouts = for_version(version)
    assert layouts.source == "table 0.33.0"
    assert [record.getMessage() for record in caplog.records] == [
        f"vLLM {version} is newer than the newest known layout; using that of 0.33.0"
    ]


@pytest.mark.parametrize("version", ["0.26.0", "0.9.2", "0.11.0+cpu"])
def test_an_older_version_is_refused_by_name(version: str) -> None:
    with pytest.raises(LayoutError, match=rf"vLLM {version.replace('+', '.')} is older than 0\.27\.0"):
        for_version(version, VECTORS["0.27.0"]["declared"])


def test_a_ready_map_without_a_version_is_refused() -> None:
    with pytest.raises(LayoutError, match="no vllm_version"):
        from_ready({"max_model_len": 4096}, {}, 0)


def test_what_the_companion_declares_wins_over_the_table(caplog: pytest.LogCaptureFixture) -> None:
    layouts = for_version("0.40.0", VECTORS["0.28.0"]["declared"])
    assert layouts.order("EngineCoreOutput") == tuple(VECTORS["0.28.0"]["declared"]["EngineCoreOutput"])
    assert layouts.source == "companion"
    assert not caplog.records


def test_structs_the_companion_did_not_declare_come_from_the_table() -> None:
    layouts = for_version("0.32.0", {"UtilityOutput": ["call_id", "failure_message", "result", "more"]})
    assert layouts.source_of("UtilityOutput") == "companion"
    assert layouts.source_of("EngineCoreOutput") == "table 0.32.0"
    assert layouts.source == "table 0.32.0 + companion"


def test_layouts_in_the_ready_map_win_over_all() -> None:
    own = {
        "EngineCoreRequest": ["prompt_token_ids", "request_id", *VECTORS["0.32.0"]["declared"]["EngineCoreRequest"][2:]]
    }
    codec = from_ready({"vllm_version": "0.32.0", "layouts": own}, VECTORS["0.32.0"]["declared"], 0)
    assert msgspec.msgpack.decode(codec.add(CALL)[1])[:2] == [[1, 2], "w"]
    assert codec.layouts.source_of("EngineCoreRequest") == "ready message"


@pytest.mark.parametrize("own", [[], {"EngineCoreRequest": "request_id"}, {"EngineCoreRequest": [1]}, 5])
def test_layouts_in_the_ready_map_that_are_none_are_refused(own: object) -> None:
    with pytest.raises(LayoutError):
        from_ready({"vllm_version": "0.32.0", "layouts": own}, {}, 0)


def test_a_release_that_moves_a_field_is_followed() -> None:
    declared = dict(VECTORS["0.32.0"]["declared"])
    declared["EngineCoreRequest"] = ["new_first", *reversed(declared["EngineCoreRequest"])]
    declared["EngineCoreOutput"] = list(reversed(declared["EngineCoreOutput"]))
    declared["EngineCoreOutputs"] = list(reversed(declared["EngineCoreOutputs"]))
    codec = from_ready({"vllm_version": "0.34.0"}, declared, 3)
    request = dict(zip(declared["EngineCoreRequest"], msgspec.msgpack.decode(codec.add(CALL)[1]), strict=True))
    assert (request["request_id"], request["client_index"], request["new_first"]) == ("w", 3, None)
    output = {"request_id": "w", "new_token_ids": [7], "finish_reason": 1}
    array = [output.get(name) for name in declared["EngineCoreOutput"]]
    message = [{"engine_index": 2, "outputs": [array]}.get(name) for name in declared["EngineCoreOutputs"]]
    step = codec.step([msgspec.msgpack.encode(message)])
    assert step.engine_index == 2
    assert [(o.request_id, o.new_token_ids, o.finish_reason) for o in step.outputs] == [("w", [7], 1)]


def test_fields_that_a_newer_release_appends_are_not_sent() -> None:
    declared = dict(VECTORS["0.32.0"]["declared"])
    declared["EngineCoreRequest"] = [*declared["EngineCoreRequest"], "brand_new"]
    known = from_ready({"vllm_version": "0.32.0"}, {}, 0).add(CALL)
    assert from_ready({"vllm_version": "0.34.0"}, declared, 0).add(CALL) == known


def test_an_inserted_field_is_sent_as_nil_and_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    declared = dict(VECTORS["0.32.0"]["declared"])
    declared["EngineCoreRequest"] = ["request_id", "inserted", *declared["EngineCoreRequest"][1:]]
    with caplog.at_level(logging.WARNING):
        codec = from_ready({"vllm_version": "0.34.0"}, declared, 0)
    assert msgspec.msgpack.decode(codec.add(CALL)[1])[:3] == ["w", None, [1, 2]]
    assert "sent as nil: inserted" in caplog.text


@pytest.mark.parametrize("field", ["request_id", "prompt_token_ids", "sampling_params", "client_index", "priority"])
def test_a_release_without_a_field_we_must_send_is_a_named_error(field: str) -> None:
    declared = dict(VECTORS["0.32.0"]["declared"])
    declared["EngineCoreRequest"] = [name for name in declared["EngineCoreRequest"] if name != field]
    with pytest.raises(LayoutError, match=rf"EngineCoreRequest \(companion\) has no field {field}"):
        from_ready({"vllm_version": "0.34.0"}, declared, 0)


@pytest.mark.parametrize(
    ("struct", "field"),
    [
        ("EngineCoreOutput", "new_token_ids"),
        ("UtilityOutput", "call_id"),
        ("LogprobsLists", "sampled_token_ranks"),
        ("LogprobsTensors", "logprobs"),
    ],
)
def test_a_release_without_a_field_we_must_read_is_a_named_error(struct: str, field: str) -> None:
    declared = dict(VECTORS["0.32.0"]["declared"])
    declared[struct] = [name for name in declared[struct] if name != field]
    with pytest.raises(LayoutError, match=rf"{struct} \(companion\) has no field {field}"):
        from_ready({"vllm_version": "0.34.0"}, declared, 0)
