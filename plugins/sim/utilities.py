"""Utility calls: what the busy loop answers between two steps, by vLLM's method names and positional arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from bridge.plugins.sim.requests import LoRARequest
from bridge.plugins.sim.scheduler import Pause

if TYPE_CHECKING:
    from bridge.plugins.sim.engine import Engine


class Deferred:
    """The answer of a call that completes once the engine is idle: `finish` gives the value then."""

    def __init__(self, finish: Callable[[], Any]) -> None:
        self.finish = finish


class Utilities:
    """One method for each call; an unknown name or wrong arguments are a failure text, never an engine's death."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._asleep = False
        self._weight_version = "default"
        self._adapters: set[int] = set()
        self._methods: Mapping[str, Callable[..., Any]] = {
            "get_supported_tasks": self._get_supported_tasks,
            "is_sleeping": self._is_sleeping,
            "sleep": self._sleep,
            "wake_up": self._wake_up,
            "pause_scheduler": self._pause_scheduler,
            "resume_scheduler": self._resume_scheduler,
            "is_scheduler_paused": self._is_scheduler_paused,
            "reset_prefix_cache": self._reset_prefix_cache,
            "reset_mm_cache": self._nothing,
            "reset_encoder_cache": self._nothing,
            "execute_dummy_batch": self._nothing,
            "profile": self._profile if engine.options.wire_version.startswith("0.33.") else self._profile_to_032,
            "list_loras": self._list_loras,
            "add_lora": self._add_lora,
            "remove_lora": self._remove_lora,
            "get_weight_version": self._get_weight_version,
            "set_weight_version": self._set_weight_version,
            "get_kv_cache_group_metadata": self._get_kv_cache_group_metadata,
            "sim_state": engine.state,
            "sim_fault": engine.order_fault,
        }

    @property
    def weight_version(self) -> str:
        return self._weight_version

    def call(self, method: Any, args: Any) -> Any:
        """The value of a call, or a `Deferred`; raises anything, which is the caller's failure text."""
        if not isinstance(method, str) or method not in self._methods:
            raise AttributeError(f"the engine has no method {method!r}")
        return self._methods[method](*args)

    def _get_supported_tasks(self) -> list[str]:
        return ["generate"]

    def _is_sleeping(self) -> bool:
        return self._asleep or self._is_scheduler_paused()

    def _sleep(self, level: int = 1, mode: str = "abort") -> Any:
        def fall_asleep() -> None:
            self._asleep = self._asleep or level >= 1

        return self._pause(mode, clear_cache=level >= 1, then=fall_asleep)

    def _wake_up(self, tags: list[str] | None = None) -> bool:
        if tags is None or any(tag != "scheduling" for tag in tags):
            self._asleep = False
        if not self._asleep:
            self._resume_scheduler()
        return not self._asleep

    def _pause_scheduler(self, mode: str = "abort", clear_cache: bool = True) -> Any:
        return self._pause(mode, clear_cache, then=lambda: None)

    def _pause(self, mode: str, clear_cache: bool, then: Callable[[], None]) -> Any:
        scheduler = self._engine.scheduler
        if mode not in ("abort", "wait", "keep"):
            raise ValueError(f"{mode!r} is not a pause mode; abort, wait and keep are")

        def finish() -> None:
            if clear_cache:
                scheduler.reset_prefix_cache(True, self._engine.now())
            then()

        if mode == "abort":
            self._engine.abort_aloud(None)
        scheduler.pause = Pause.FROZEN if mode == "keep" else Pause.NO_NEW
        if scheduler.has_work():
            return Deferred(finish)
        return finish()

    def _resume_scheduler(self) -> None:
        self._engine.scheduler.pause = Pause.RUNNING

    def _is_scheduler_paused(self) -> bool:
        return self._engine.scheduler.pause is not Pause.RUNNING

    def _reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        return self._engine.scheduler.reset_prefix_cache(reset_running_requests, self._engine.now())

    def _nothing(self) -> None:
        return None

    def _profile_to_032(
        self, is_start: bool = True, prefix: Any = None, delay_iterations: Any = None, max_iterations: Any = None
    ) -> None:
        self._profile(is_start, prefix, delay_iterations, max_iterations)

    def _profile(
        self,
        is_start: bool = True,
        prefix: Any = None,
        delay_iterations: Any = None,
        max_iterations: Any = None,
        profiler_kwargs: Any = None,
    ) -> None:
        if not self._engine.options.profiler:
            raise RuntimeError("profiling is not configured; start the simulated engine with --profiler")

    def _list_loras(self) -> list[int]:
        self._must_have_lora()
        return sorted(self._adapters)

    def _add_lora(self, lora_request: list[Any]) -> bool:
        self._must_have_lora()
        adapter = msgspec.convert(lora_request, LoRARequest)
        if not Path(adapter.lora_path).is_dir():
            raise ValueError(f"Loading lora {adapter.lora_name} failed: No adapter found for {adapter.lora_path}")
        self._adapters.add(adapter.lora_int_id)
        return True

    def _remove_lora(self, lora_id: int) -> bool:
        self._must_have_lora()
        found = lora_id in self._adapters
        self._adapters.discard(lora_id)
        return found

    def _must_have_lora(self) -> None:
        if not self._engine.options.lora:
            raise RuntimeError("LoRA is not enabled")

    def _get_weight_version(self) -> str:
        return self._weight_version

    def _set_weight_version(self, weight_version: str) -> None:
        self._weight_version = str(weight_version)

    def _get_kv_cache_group_metadata(self) -> list[dict[str, Any]]:
        size = self._engine.options.block_size
        return [{"group_idx": 0, "kind": "full_attention", "block_size": size, "sliding_window": None}]
