"""The real smg gateway in front of `serve sglang`."""

from __future__ import annotations

from tests.gateways import get_json
from tests.sglang import gateway_cases as cases
from tests.sglang.worker import SglangWorker


def test_the_gateway_lists_the_served_model(smg: str) -> None:
    assert [model["id"] for model in get_json(f"{smg}/v1/models")["data"]] == ["smol"]


def test_chat_answers_paris_whole_and_streamed(smg: str) -> None:
    assert "Paris" in cases.chat_says_paris(smg, "smol")


def test_logprobs_of_each_token(smg: str) -> None:
    assert cases.logprobs_come_once(smg, "smol") > 3


def test_a_json_schema_shapes_the_answer(smg: str) -> None:
    assert 0 <= cases.a_schema_shapes_the_answer(smg, "smol")["population"] <= 9999


def test_a_client_that_disconnects_frees_the_engine(smg: str, served: SglangWorker) -> None:
    served.wait_idle(5)
    with cases.streaming(smg, "smol"):
        served.wait_running(1, 2)
    assert served.wait_idle(1.5) < 2.0
