"""`SglangCodec`: the neutral core's view of one SGLang scheduler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bridge.wire.codec import EmbedCall, Finish, Frames, GenerateCall, Load, Logprobs, Reply
from bridge.wire.layout import Layouts
from bridge.wire.sglang import control
from bridge.wire.sglang.layouts import layouts_of, version_of
from bridge.wire.sglang.outputs import OutputReader, SglangDelta, SglangStep
from bridge.wire.sglang.requests import RequestEncoder
from bridge.wire.tensors import Tensor


class SglangCodec:
    """Implements `bridge.wire.codec.Codec` for SGLang 0.5.18 to 0.5.23, and for later ones that keep what we use.

    Raises `LayoutError` when `layouts` lack a struct or a field that is needed.
    """

    engine = "sglang"

    def __init__(self, version: str, layouts: Layouts) -> None:
        self.version = version
        self.layouts = layouts
        self._requests = RequestEncoder(layouts)
        self._outputs = OutputReader()

    def add(self, call: GenerateCall) -> Frames:
        return self._requests.add(call)

    def add_embed(self, call: EmbedCall) -> Frames:
        return self._requests.add_embed(call)

    def abort(self, wire_ids: Sequence[str]) -> Frames:
        return self._requests.abort(wire_ids)

    def utility(self, call_id: int, method: str, args: Sequence[Any]) -> Frames:
        return self._requests.control(call_id, method, args)

    def ping(self, call_id: int) -> Frames:
        return self._requests.control(call_id, "ping", [])  # refused by name, by the scheduler's own loop

    def is_death(self, frames: Sequence[Any]) -> bool:
        return control.is_death(frames)

    def step(self, frames: Sequence[Any]) -> SglangStep:
        return self._outputs.step(frames)

    def has_load(self, step: SglangStep) -> bool:
        return self._outputs.has_load(step)

    def load(self, step: SglangStep) -> Load | None:
        return self._outputs.load(step)

    def reply(self, step: SglangStep) -> Reply | None:
        return self._outputs.reply(step)

    def finish(self, delta: SglangDelta) -> tuple[Finish, int | str | None, str | None]:
        return self._outputs.finish(delta)

    def cached_tokens(self, delta: SglangDelta) -> int | None:
        return self._outputs.cached_tokens(delta)

    def logprobs(self, step: SglangStep, delta: SglangDelta) -> Logprobs | None:
        return self._outputs.logprobs(delta)

    def prompt_logprobs(self, step: SglangStep, delta: SglangDelta) -> Logprobs | None:
        return self._outputs.prompt_logprobs(delta)

    def pooled(self, step: SglangStep, delta: SglangDelta) -> Tensor | None:
        return self._outputs.pooled(delta)

    def transfer_params(self, delta: SglangDelta) -> dict[str, Any] | None:
        """The lane hands nothing over: both legs are paired by the gateway."""
        return None

    def spec_counts(self, delta: SglangDelta) -> tuple[int, int]:
        """The lane has no column for them."""
        return 0, 0


def from_ready(
    ready: Mapping[str, Any], declared: Mapping[str, Sequence[str]] | None, client_index: int
) -> SglangCodec:
    """The codec for the engine that sent `ready`, whose own layouts it uses; the other sources are not needed.

    A rank answers on the slot that a request came from, so `client_index` is not sent. Raises `LayoutError`.
    """
    return SglangCodec(version_of(ready), layouts_of(ready))
