"""Server reflection, v1 and v1alpha: which services there are, and their protobuf files."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from typing import Any, cast

from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.descriptor import FileDescriptor
from grpc_reflection.v1alpha import reflection_pb2

from bridge.grpc.call import Call
from bridge.grpc.service import Method
from bridge.grpc.status import Code

ALPHA = "grpc.reflection.v1alpha"
V1 = "grpc.reflection.v1"


class ReflectionService:
    """One version of grpc.reflection.*.ServerReflection; the two differ in their package name only."""

    def __init__(self, package: str, services: Iterable[str]) -> None:
        self.name = f"{package}.ServerReflection"
        self._services = sorted(set(services))
        self._pools = (descriptor_pool.Default(), _v1_pool())

    def methods(self) -> Iterable[Method]:
        """ServerReflectionInfo."""
        request = reflection_pb2.ServerReflectionRequest
        yield Method(f"/{self.name}/ServerReflectionInfo", "bidi", request, self._info)

    async def _info(
        self, requests: AsyncIterator[reflection_pb2.ServerReflectionRequest], call: Call
    ) -> AsyncGenerator[reflection_pb2.ServerReflectionResponse, None]:
        async for request in requests:
            reply = reflection_pb2.ServerReflectionResponse(valid_host=request.host, original_request=request)
            try:
                self._answer(request, reply)
            except KeyError:
                reply.error_response.error_code = Code.NOT_FOUND
                reply.error_response.error_message = f"not found: {_asked(request)}"
            yield reply

    def _answer(
        self, request: reflection_pb2.ServerReflectionRequest, reply: reflection_pb2.ServerReflectionResponse
    ) -> None:
        kind = request.WhichOneof("message_request")
        if kind == "list_services":
            for name in self._services:
                reply.list_services_response.service.add(name=name)
        elif kind == "file_by_filename":
            self._files(reply, lambda pool: pool.FindFileByName(request.file_by_filename))
        elif kind == "file_containing_symbol":
            self._files(reply, lambda pool: _symbol_file(pool, request.file_containing_symbol))
        elif kind == "file_containing_extension":
            asked = request.file_containing_extension
            self._files(reply, lambda pool: _extension_file(pool, asked))
        elif kind == "all_extension_numbers_of_type":
            name = request.all_extension_numbers_of_type
            pool = descriptor_pool.Default()
            numbers = [field.number for field in pool.FindAllExtensions(pool.FindMessageTypeByName(name))]
            reply.all_extension_numbers_response.base_type_name = name
            reply.all_extension_numbers_response.extension_number.extend(sorted(numbers))
        else:
            reply.error_response.error_code = Code.INVALID_ARGUMENT
            reply.error_response.error_message = "the request asks nothing"

    def _files(
        self,
        reply: reflection_pb2.ServerReflectionResponse,
        find: Callable[[descriptor_pool.DescriptorPool], FileDescriptor],
    ) -> None:
        """Add the file that ``find`` finds, and what it imports; KeyError if no pool has it."""
        for pool in self._pools:
            try:
                found = find(pool)
            except KeyError:
                continue
            files: dict[str, FileDescriptor] = {}
            _with_imports(found, files)
            for file in files.values():
                proto = descriptor_pb2.FileDescriptorProto()
                file.CopyToProto(proto)
                reply.file_descriptor_response.file_descriptor_proto.append(proto.SerializeToString())
            return
        raise KeyError


def reflection_services(services: Iterable[str]) -> list[ReflectionService]:
    """Both versions of the reflection service, listing ``services`` and themselves.

    The protobuf files of ``services`` must be in the default descriptor pool, where generated modules put them.
    """
    names = [*services, f"{ALPHA}.ServerReflection", f"{V1}.ServerReflection"]
    return [ReflectionService(package, names) for package in (V1, ALPHA)]


def _symbol_file(pool: descriptor_pool.DescriptorPool, symbol: str) -> FileDescriptor:
    """The file of ``symbol``; protobuf 7's pool does not find methods and fields by name, so those go by their owner."""
    try:
        return pool.FindFileContainingSymbol(symbol)
    except KeyError:
        owner, _, member = symbol.rpartition(".")
        file = pool.FindFileContainingSymbol(owner)
        if not _has_member(pool, owner, member):
            raise
        return file


def _has_member(pool: descriptor_pool.DescriptorPool, owner: str, member: str) -> bool:
    for find, members in (
        (pool.FindServiceByName, "methods_by_name"),
        (pool.FindMessageTypeByName, "fields_by_name"),
        (pool.FindEnumTypeByName, "values_by_name"),
    ):
        try:
            return member in getattr(find(owner), members)
        except KeyError:
            continue
    return False


def _extension_file(pool: descriptor_pool.DescriptorPool, asked: reflection_pb2.ExtensionRequest) -> FileDescriptor:
    message = pool.FindMessageTypeByName(asked.containing_type)
    # types-protobuf 7.35 does not know FieldDescriptor.file.
    extension: Any = pool.FindExtensionByNumber(message, asked.extension_number)
    return cast(FileDescriptor, extension.file)


def _with_imports(file: FileDescriptor, files: dict[str, FileDescriptor]) -> None:
    """Collect ``file`` and everything it imports, itself first."""
    if file.name not in files:
        files[file.name] = file
        for dependency in file.dependencies:
            _with_imports(dependency, files)


def _asked(request: reflection_pb2.ServerReflectionRequest) -> str:
    kind = request.WhichOneof("message_request")
    return str(getattr(request, kind)).strip() if kind else "nothing"


def _v1_pool() -> descriptor_pool.DescriptorPool:
    """A pool with grpc.reflection.v1's file, made from v1alpha's: the same messages in another package."""
    proto = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(proto)
    proto.name = "grpc/reflection/v1/reflection.proto"
    proto.package = V1
    for message in proto.message_type:
        for field in message.field:
            if field.type_name:
                field.type_name = field.type_name.replace(f".{ALPHA}.", f".{V1}.")
    for service in proto.service:
        for method in service.method:
            method.input_type = method.input_type.replace(f".{ALPHA}.", f".{V1}.")
            method.output_type = method.output_type.replace(f".{ALPHA}.", f".{V1}.")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(proto)
    return pool
