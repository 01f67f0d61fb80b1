"""Request frames → the scheduler's native requests.

`[type] [payload] [aux…]`: 0x00 ADD is a tagged positional struct of the scheduler's own, its token ids a plain array of
integers, with an optional map of metadata behind it; 0x01 ABORT is an array of ids; 0x02 CONTROL is
`[call id, method, arguments]`. Nothing is ever unpickled: the one pickled field a request has is emptied.
"""

from __future__ import annotations

import logging
import os
import time
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

ADD, ABORT, CONTROL = b"\x00", b"\x01", b"\x02"
TRACE_HEADERS = "trace_headers"

_log = logging.getLogger(__name__)
_aborts = msgspec.msgpack.Decoder(list[str])
_control = msgspec.msgpack.Decoder(tuple[int, str, list[Any]])
_metadata = msgspec.msgpack.Decoder(dict[str, Any])


class ControlRefused(Exception):
    """A control call that this scheduler cannot be asked; `call_id` is the caller's."""

    def __init__(self, call_id: int, message: str) -> None:
        super().__init__(message)
        self.call_id = call_id


class RequestReader:
    """Decodes the scheduler's own request structs, told apart by their tag.

    SamplingParams ends in fields that only `normalize` sets. They are ours to set, so a front end may write there what
    another release has: SMG 1.13 writes those of 0.5.21 to every SGLang, whose `watermark` has moved them since.
    """

    def __init__(self) -> None:
        from sglang.srt.managers import io_struct
        from sglang.srt.sampling.sampling_params import SamplingParams

        try:
            from sglang.srt.utils.msgpack_utils import dec_hook, ext_hook
        except ImportError:  # 0.5.18 has them beside the structs
            dec_hook, ext_hook = io_struct.dec_hook, io_struct.ext_hook

        def from_list(kind: type, value: Any) -> Any:
            if kind is array and isinstance(value, list):
                return array("q", value)
            return dec_hook(kind, value)

        generate, embed = io_struct.TokenizedGenerateReqInput, io_struct.TokenizedEmbeddingReqInput
        kinds = generate | embed | io_struct.EncoderDispatchErrorReq
        self._decoder = msgspec.msgpack.Decoder(kinds, dec_hook=from_list, ext_hook=ext_hook)
        self._sampling = {
            kind.__name__: kind.__struct_fields__.index("sampling_params") + 1 for kind in (generate, embed)
        }
        self._asked = SamplingParams.__struct_fields__.index("stop_strs")

    def decode(self, payload: bytes | memoryview) -> Any:
        """Raises `msgspec.MsgspecError`."""
        try:
            return self._decoder.decode(payload)
        except msgspec.ValidationError:
            fields = msgspec.msgpack.decode(payload)
            sampling = self._sampling_of(fields)
            if sampling is None or len(sampling) <= self._asked:
                raise
            del sampling[self._asked :]
            return self._decoder.decode(msgspec.msgpack.encode(fields))

    def _sampling_of(self, fields: Any) -> list[Any] | None:
        if not isinstance(fields, list) or not fields:
            return None
        index = self._sampling.get(fields[0], len(fields)) if isinstance(fields[0], str) else len(fields)
        sampling = fields[index] if index < len(fields) else None
        return sampling if isinstance(sampling, list) else None


def id_of(payload: bytes | memoryview) -> str | None:
    """The request id of an ADD that does not decode, when it is where it should be."""
    try:
        fields = msgspec.msgpack.decode(payload)
    except msgspec.MsgspecError:
        return None
    if isinstance(fields, list) and len(fields) > 1 and isinstance(fields[1], str):
        return fields[1]
    return None


def abort_ids(payload: bytes | memoryview) -> list[str]:
    """Raises `msgspec.MsgspecError`."""
    return _aborts.decode(payload)


def trace_headers(frames: Sequence[bytes | memoryview]) -> dict[str, str] | None:
    """The W3C trace context behind an ADD. Metadata that cannot be read counts as none: the request itself is whole."""
    if len(frames) < 3:
        return None
    try:
        headers = _metadata.decode(frames[2]).get(TRACE_HEADERS)
    except msgspec.MsgspecError as error:
        _log.warning("unreadable request metadata: %s", error)
        return None
    if not isinstance(headers, dict):
        return None
    return {name: value for name, value in headers.items() if isinstance(name, str) and isinstance(value, str)}


def control_request(payload: bytes | memoryview, mark: str) -> Any:
    """The scheduler's own request for a control call; its rid is `mark` and the call id, so that the answer is known.

    Raises `ControlRefused`, or `msgspec.MsgspecError` when not even the call id can be read.
    """
    call_id, method, args = _control.decode(payload)
    try:
        request = _control_request(method, args)
    except (TypeError, ValueError, AttributeError) as error:
        raise ControlRefused(call_id, f"{method}: {error}") from None
    if request is None:
        known = "flush_cache, start_profile and stop_profile"
        raise ControlRefused(call_id, f"{method!r} is no control call of this lane; it knows {known}")
    request.rid = f"{mark}{call_id}"
    return request


def _control_request(method: str, args: list[Any]) -> Any:
    from sglang.srt.managers import io_struct

    if method == "flush_cache":
        return io_struct.FlushCacheReqInput(timeout_s=float(args[0]) if args and args[0] is not None else None)
    if method == "stop_profile":
        return io_struct.ProfileReq(req_type=io_struct.ProfileReqType.STOP_PROFILE)
    if method == "start_profile":
        return io_struct.ProfileReq(**_profile_options(dict(args[0]) if args else {}))
    return None


def _profile_options(options: dict[str, Any]) -> dict[str, Any]:
    """The options as SGLang's HTTP server hands them on, with its defaults from the environment; raises `ValueError`."""
    from sglang.srt.managers.io_struct import ProfileReq

    known = set(ProfileReq.__struct_fields__) - {"rid", "http_worker_ipc", "req_type"}
    unknown = sorted(set(options) - known)
    if unknown:
        raise ValueError(f"unknown option {unknown[0]}")
    given = {name: value for name, value in options.items() if value is not None}
    for name in ("with_stack", "record_shapes"):
        allowed = os.environ.get(f"SGLANG_PROFILE_{name.upper()}", "true").lower() in ("true", "1")
        given[name] = bool(given.get(name, True)) and allowed
    given.setdefault("profile_id", str(time.time()))
    return given
