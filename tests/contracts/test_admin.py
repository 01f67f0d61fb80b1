"""`--admin-bind`: methods for administrators on a listener of their own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as pb_grpc

from bridge.contracts.proto import message
from tests.contracts.asking import Stub, control, engine_v1, inference
from tests.contracts.conftest import Served
from tests.running import Running

LIMIT_S = 20


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A short path, because unix sockets have 107 bytes."""
    with TemporaryDirectory(prefix="admin-") as path:
        yield Path(path)


@pytest.fixture(scope="module")
def apart(smollm2: Path, folder: Path) -> Iterator[Served]:
    with Served(smollm2, folder / "log", "--admin-bind", f"unix:{folder}/admin", "--step-ms", "2") as served:
        served.wait_until_serving(30)
        yield served


@pytest.fixture(scope="module")
def admin(apart: Served, folder: Path) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"unix:{folder}/admin") as channel:
        yield channel


def administrative(channel: grpc.Channel) -> dict[str, Any]:
    """A call of each contract that only administrators may make."""
    engine = pb_grpc.VllmEngineStub(channel)
    stub, newer = Stub(channel, "vllm.Control"), Stub(channel, "vllm.engine.v1.VllmEngine")
    return {
        "FlushCache": lambda: engine.FlushCache(common_pb2.FlushCacheRequest(timeout_s=5), timeout=LIMIT_S),
        "ResumeGeneration": lambda: stub.ResumeGeneration(control("ResumeGeneration"), timeout=LIMIT_S),
        "UpdateWeightVersion": lambda: stub.UpdateWeightVersion(
            control("UpdateWeightVersion", weight_version="default"), timeout=LIMIT_S
        ),
        "ResetPrefixCache": lambda: newer.ResetPrefixCache(message("vllm.engine.v1.EmptyRequest")(), timeout=LIMIT_S),
    }


def test_what_is_for_administrators_is_served_on_their_listener_only(apart: Served, admin: grpc.Channel) -> None:
    for name, call in administrative(apart.channel).items():
        with pytest.raises(grpc.RpcError) as error:
            call()
        assert error.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert str(error.value.details()).startswith(name)
    for call in administrative(admin).values():
        call()


@pytest.mark.parametrize("where", ["everybody", "administrators"])
def test_everything_else_is_served_on_both(apart: Served, admin: grpc.Channel, where: str) -> None:
    channel = apart.channel if where == "everybody" else admin
    asked = inference(token_ids={"ids": [5, 6]}, stopping={"max_new_tokens": 40}, response={"output_token_ids": True})
    replies = list(Stub(channel, "vllm.Inference").GenerateStream(asked, timeout=LIMIT_S))
    assert [token for reply in replies for token in reply.outputs.token_ids] == apart.tokens([5, 6], 40)
    newer = engine_v1(prompt_token_ids=[5, 6], sampling_params={"max_tokens": 4})
    reply = Stub(channel, "vllm.engine.v1.VllmEngine").Generate(newer, timeout=LIMIT_S)
    assert list(reply.output_token_ids) == apart.tokens([5, 6], 4)
    for name in ("GetServerInfo", "GetModelInfo", "IsPaused"):
        getattr(Stub(channel, "vllm.Control"), name)(control(name), timeout=LIMIT_S)


def test_without_the_flag_everything_is_on_one_listener(served: Served) -> None:
    replies = {name: call() for name, call in administrative(served.channel).items()}
    assert replies["FlushCache"].success
    assert not Stub(served.channel, "vllm.Control").IsPaused(control("IsPaused"), timeout=LIMIT_S).paused


@pytest.mark.parametrize(("where", "words"), [("nowhere", "HOST:PORT"), ("203.0.113.1:0", "203.0.113.1")])
def test_an_address_that_cannot_be_is_one_line(tmp_path: Path, where: str, words: str) -> None:
    command = [sys.executable, "-m", "bridge", "serve", "sim", "--port", "0", "--admin-bind", where]
    with Running([*command, "--log-level", "error"], tmp_path / "log") as running:
        assert running.process.wait(20) == 2
        (line,) = running.output().splitlines()
        assert "--admin-bind" in line and words in line
