"""Which contracts are served: by flag, in health, in reflection; several on one port."""

from __future__ import annotations

import sys
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from bridge.contracts.names import contracts_for
from bridge.supervisor.errors import UsageError
from tests.contracts.asking import inference
from tests.contracts.conftest import Served
from tests.running import Running

SERVICES = {"vllm.grpc.engine.VllmEngine", "vllm.Inference", "vllm.Control", "vllm.engine.v1.VllmEngine"}


def test_health_and_reflection_list_what_is_served(served: Served) -> None:
    health = health_pb2_grpc.HealthStub(served.channel)
    statuses = health.List(health_pb2.HealthListRequest(), timeout=5).statuses
    assert set(statuses) == {"", *SERVICES}
    for name in ("", *SERVICES):
        reply = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
    reflected = ProtoReflectionDescriptorDatabase(served.channel)
    assert set(reflected.get_services()) >= {*SERVICES, "grpc.health.v1.Health"}
    file = reflected.FindFileContainingSymbol("vllm.Inference")
    assert "GenerateRequest" in {one.name for one in file.message_type}


def test_a_contract_that_was_not_named_is_not_there(smollm2: Path, tmp_path: Path) -> None:
    with Served(smollm2, tmp_path / "log", contracts=["vllm.Inference"]) as only:
        health = health_pb2_grpc.HealthStub(only.channel)
        reply = health.Check(health_pb2.HealthCheckRequest(), timeout=20, wait_for_ready=True)
        assert set(health.List(health_pb2.HealthListRequest(), timeout=5).statuses) == {
            "",
            "vllm.Inference",
            "vllm.Control",
        }
        with pytest.raises(grpc.RpcError) as error:
            health.Check(health_pb2.HealthCheckRequest(service="vllm.grpc.engine.VllmEngine"), timeout=5)
        assert error.value.code() is grpc.StatusCode.NOT_FOUND
        while reply.status != health_pb2.HealthCheckResponse.SERVING:
            reply = health.Check(health_pb2.HealthCheckRequest(), timeout=20)
        request = inference(token_ids={"ids": [5]}, stopping={"max_new_tokens": 2})
        assert only.inference.Generate(request, timeout=20).outputs.num_tokens == 2


def test_names() -> None:
    assert contracts_for("sim", []) == ["vllm.grpc.engine"], "the engine's native one"
    assert contracts_for("sim", ["vllm.Inference"]) == ["vllm.Inference", "vllm.Control"], "it replaces the default"
    both = ["vllm.grpc.engine", "vllm.Inference", "vllm.Inference"]
    assert contracts_for("sim", both) == ["vllm.grpc.engine", "vllm.Inference", "vllm.Control"]
    with pytest.raises(UsageError, match=r"vllm\.Nothing does not exist; known: .*vllm\.Inference"):
        contracts_for("sim", ["vllm.Nothing"])


def test_an_unknown_contract_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bridge", "serve", "sim", "--port", "0", "--contract", "vllm.Nothing"]
    with Running(command, tmp_path / "log") as running:
        assert running.process.wait(20) == 2
        (line,) = running.output().splitlines()
        assert "vllm.Nothing" in line
