"""Server reflection, both versions, as grpcurl and friends use it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from bridge.contracts.health import HealthService
from bridge.contracts.reflection import reflection_services
from tests.grpc.conftest import Starter

Request = reflection_pb2.ServerReflectionRequest
Reply = reflection_pb2.ServerReflectionResponse


@pytest.fixture
async def channel(serve: Starter) -> AsyncIterator[grpc.aio.Channel]:
    running = await serve(services=[HealthService(), *reflection_services(["grpc.health.v1.Health"])])
    async with grpc.aio.insecure_channel(running.target) as channel:
        yield channel


async def ask(channel: grpc.aio.Channel, version: str, *requests: Request) -> list[Reply]:
    method = f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
    stream = channel.stream_stream(method, Request.SerializeToString, Reply.FromString)(iter(requests), timeout=5)
    return [reply async for reply in stream]


def files(reply: Reply) -> list[descriptor_pb2.FileDescriptorProto]:
    return [
        descriptor_pb2.FileDescriptorProto.FromString(data)
        for data in reply.file_descriptor_response.file_descriptor_proto
    ]


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_services_are_listed(channel: grpc.aio.Channel, version: str) -> None:
    (reply,) = await ask(channel, version, Request(host="h", list_services=""))
    assert [service.name for service in reply.list_services_response.service] == [
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
    ]
    assert reply.valid_host == "h"
    assert reply.original_request.host == "h"


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_files_by_symbol_and_name(channel: grpc.aio.Channel, version: str) -> None:
    health = health_pb2.DESCRIPTOR.name
    replies = await ask(
        channel,
        version,
        Request(file_containing_symbol="grpc.health.v1.Health"),
        Request(file_containing_symbol="grpc.health.v1.Health.Check"),
        Request(file_containing_symbol="grpc.health.v1.HealthCheckRequest.service"),
        Request(file_by_filename=health),
        Request(file_containing_symbol="grpc.reflection.v1.ServerReflection"),
    )
    names = [[file.name for file in files(reply)] for reply in replies]
    assert names == [[health]] * 4 + [["grpc/reflection/v1/reflection.proto"]]
    assert files(replies[4])[0].service[0].method[0].input_type == ".grpc.reflection.v1.ServerReflectionRequest"


async def test_imports_come_with_a_file(channel: grpc.aio.Channel) -> None:
    from smg_grpc_proto.generated import vllm_engine_pb2

    name = vllm_engine_pb2.DESCRIPTOR.name
    (reply,) = await ask(channel, "v1", Request(file_by_filename=name))
    sent = files(reply)
    assert sent[0].name == name
    assert {file.name for file in sent} >= {name, *sent[0].dependency}
    assert len({file.name for file in sent}) == len(sent)


async def test_extensions(channel: grpc.aio.Channel) -> None:
    asked = reflection_pb2.ExtensionRequest(containing_type="google.protobuf.MessageOptions", extension_number=99999)
    replies = await ask(
        channel,
        "v1",
        Request(all_extension_numbers_of_type="grpc.health.v1.HealthCheckRequest"),
        Request(file_containing_extension=asked),
    )
    assert replies[0].all_extension_numbers_response.base_type_name == "grpc.health.v1.HealthCheckRequest"
    assert not replies[0].all_extension_numbers_response.extension_number
    assert replies[1].error_response.error_code == 5


async def test_what_is_not_there_is_an_answer_and_the_stream_goes_on(channel: grpc.aio.Channel) -> None:
    replies = await ask(
        channel,
        "v1",
        Request(file_containing_symbol="no.Such"),
        Request(file_containing_symbol="grpc.health.v1.Health.Nothing"),
        Request(file_by_filename="no/such.proto"),
        Request(),
        Request(list_services=""),
    )
    assert [reply.error_response.error_code for reply in replies] == [5, 5, 5, 3, 0]
    assert replies[0].error_response.error_message == "not found: no.Such"
