"""`VllmCodec`: the neutral core's view of one vLLM engine core."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bridge.wire.codec import EmbedCall, Finish, Frames, GenerateCall, Load, Logprobs
from bridge.wire.errors import LayoutError
from bridge.wire.layout import READY_MESSAGE, Layouts
from bridge.wire.tensors import Tensor
from bridge.wire.vllm import control
from bridge.wire.vllm.layouts import for_version
from bridge.wire.vllm.outputs import OutputReader, VllmStep
from bridge.wire.vllm.requests import RequestEncoder


class VllmCodec:
    """Implements `bridge.wire.codec.Codec` for vLLM 0.27 to 0.33, and for later versions that keep what we use.

    `client_index` is the slot whose output socket this front end reads. Raises `LayoutError` when `layouts` lack a
    struct or a field that is needed.
    """

    engine = "vllm"

    def __init__(self, version: str, layouts: Layouts, client_index: int) -> None:
        self.version = version
        self.layouts = layouts
        self._requests = RequestEncoder(layouts, client_index)
        self._outputs = OutputReader(layouts)
        self._control = control.ControlReader(layouts)
        # What every step or delta takes is called without a method of ours in between.
        self.step = self._outputs.step
        self.has_load = self._control.has_load
        self.reply = self._control.reply
        self.logprobs = self._outputs.logprobs

    def add(self, call: GenerateCall) -> Frames:
        return self._requests.add(call)

    def add_embed(self, call: EmbedCall) -> Frames:
        return self._requests.add_embed(call)

    def abort(self, wire_ids: Sequence[str]) -> Frames:
        return self._requests.abort(wire_ids)

    def utility(self, call_id: int, method: str, args: Sequence[Any]) -> Frames:
        return self._requests.utility(call_id, method, args)

    def ping(self, call_id: int) -> Frames:
        return self.utility(call_id, "is_sleeping", [])

    def is_death(self, frames: Sequence[Any]) -> bool:
        return control.is_death(frames)

    def load(self, step: VllmStep) -> Load | None:
        return self._control.load(step)

    def finish(self, delta: Any) -> tuple[Finish, int | None, str | None]:
        return self._outputs.finish(delta)

    def cached_tokens(self, delta: Any) -> int | None:
        return self._outputs.cached_tokens(delta)

    def prompt_logprobs(self, step: VllmStep, delta: Any) -> Logprobs | None:
        return self._outputs.prompt_logprobs(step, delta)

    def pooled(self, step: VllmStep, delta: Any) -> Tensor | None:
        return self._outputs.pooled(step, delta)

    def transfer_params(self, delta: Any) -> dict[str, Any] | None:
        return self._outputs.transfer_params(delta)

    def spec_counts(self, delta: Any) -> tuple[int, int]:
        return self._outputs.spec_counts(delta)


def from_ready(ready: Mapping[str, Any], declared: Mapping[str, Sequence[str]] | None, client_index: int) -> VllmCodec:
    """The codec for the engine that sent `ready`.

    Layouts in the ready map (a plugin's `layouts` key) win over `declared`, what the companion read, and that over the
    table of the version in the ready map. Raises `LayoutError` when the map names no version or no layout fits.
    """
    version = ready.get("vllm_version")
    if not isinstance(version, str):
        raise LayoutError("the engine's ready map has no vllm_version: it is older than vLLM 0.23, or not vLLM")
    layouts = for_version(version, declared)
    own = ready.get("layouts")
    if own is not None:
        if not isinstance(own, dict):
            raise LayoutError(f"the ready map's layouts are not a map of struct names: {own!r}")
        layouts = Layouts(own, READY_MESSAGE).over(layouts)
    return VllmCodec(version, layouts, client_index)
