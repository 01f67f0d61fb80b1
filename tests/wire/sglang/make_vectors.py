"""Makes the golden vectors of one SGLang version with that version's own classes and decoder, and with SMG's lane plugin.

Run it with a Python that has SGLang's dependencies and smg-grpc-servicer; the package itself may be another version's
files (`pip download --no-deps sglang==0.5.18`, unzip the wheel into a folder):

    python make_vectors.py --package FOLDER       writes vectors/<version>.json
    python make_vectors.py                        the installed version
    python make_vectors.py --check                makes them again and compares; exit status 1 when they differ

A vector file holds what the package declares (`declared`), our requests for `cases.py` with what its decoder reads in
them and where that differs from what the same request is in its own words (`calls`), which sampling values it takes
(`values`), and messages that SMG's plugin makes of the package's outputs, as hex with what they say (`steps`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
VECTORS = HERE / "vectors"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--package", type=Path, help="folder that holds a `sglang` package, instead of the installed one"
    )
    parser.add_argument("--check", action="store_true", help="compare with the recorded vectors and write nothing")
    options = parser.parse_args()
    if options.package is not None:
        sys.path.insert(0, str(options.package))
    sys.path.append(str(HERE.parents[2]))
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    version = _version(options.package)
    _allow_known_configs()
    text = render(Maker(version).vectors())
    path = VECTORS / f"{version}.json"
    if not options.check:
        VECTORS.mkdir(exist_ok=True)
        path.write_text(text)
        print(f"{path.name}: {len(text)} bytes")
        return 0
    same = path.exists() and path.read_text() == text
    print(f"{path.name}: {'the same' if same else 'differs'}")
    return 0 if same else 1


def _version(package: Path | None) -> str:
    """Of the unpacked wheel, or the installed package: `sglang.__version__` asks the installed metadata alone."""
    from importlib.metadata import distributions

    folders = {} if package is None else {"path": [str(package)]}
    found = [one.version for one in distributions(name="sglang", **folders)]
    if not found:
        raise SystemExit(f"no metadata of sglang beside the package in {package}; unzip the whole wheel")
    return found[0]


def _allow_known_configs() -> None:
    """Older releases register model configurations that a newer transformers has by itself, and stop at the clash."""
    from transformers import AutoConfig

    register = AutoConfig.register
    AutoConfig.register = staticmethod(lambda name, config, exist_ok=False: register(name, config, exist_ok=True))


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


def plain(value: Any) -> Any:
    """`value` as JSON: a struct is its fields that are not at their default."""
    import msgspec

    if isinstance(value, msgspec.Struct):
        return {name: plain(content) for name, content in _non_default(value)}
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, (list, tuple, array)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    return value


def _non_default(value: Any) -> Iterator[tuple[str, Any]]:
    import msgspec

    for field in msgspec.structs.fields(value):
        content = getattr(value, field.name)
        default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        if default is msgspec.NODEFAULT or type(content) is not type(default) or content != default:
            yield field.name, content


class Maker:
    """Builds the vectors of the SGLang package that is importable."""

    def __init__(self, version: str) -> None:
        import msgspec
        from sglang.srt.managers import io_struct
        from sglang.srt.sampling.sampling_params import SamplingParams

        self.version = version
        self.structs = io_struct
        self.params = SamplingParams
        requests = io_struct.TokenizedGenerateReqInput | io_struct.TokenizedEmbeddingReqInput
        self.decode = msgspec.msgpack.Decoder(requests, dec_hook=_ids).decode

    def vectors(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "declared": self.declared(),
            "calls": self.calls(),
            "embeds": self.embeds(),
            "values": self.values(),
            "steps": self.steps(),
        }

    def declared(self) -> dict[str, list[str]]:
        """Field order of each positional struct, as the package has it."""
        from sglang.srt.managers import schedule_batch

        names = ("TokenizedGenerateReqInput", "TokenizedEmbeddingReqInput", "EncoderDispatchErrorReq")
        kinds = [getattr(self.structs, name) for name in names if hasattr(self.structs, name)]
        kinds += [self.params, schedule_batch.MultimodalProcessorOutput, schedule_batch.MultimodalDataItem]
        return {kind.__name__: list(kind.__struct_fields__) for kind in kinds if hasattr(kind, "__struct_fields__")}

    def codec(self) -> Any:
        from bridge.wire.sglang.codec import from_ready

        return from_ready({"vllm_version": f"sglang-{self.version}", "positional_layouts": self.declared()}, {}, 0)

    def calls(self) -> list[dict[str, Any]]:
        from cases import CALLS

        codec, entries = self.codec(), []
        for name, call in CALLS.items():
            frames = codec.add(call)
            read = self.decode(frames[1])
            expected = self.own_words(call)
            entries.append(
                {
                    "name": name,
                    "ours": [frame.hex() for frame in frames],
                    "says": plain(read),
                    "own_words_differ_in": _unequal(plain(read), plain(expected)),
                }
            )
        return entries

    def embeds(self) -> list[dict[str, Any]]:
        from cases import EMBEDS

        codec, entries = self.codec(), []
        for name, call in EMBEDS.items():
            frames = codec.add_embed(call)
            read = self.decode(frames[1])
            expected = self.structs.TokenizedEmbeddingReqInput(
                rid=call.wire_id,
                input_text=None,
                input_ids=array("q", call.prompt_token_ids),
                mm_inputs=None,
                token_type_ids=call.native.token_type_ids if call.native else None,
                sampling_params=self.params(max_new_tokens=0),
            )
            differ = _unequal(plain(read), plain(expected))
            entries.append(
                {"name": name, "ours": [f.hex() for f in frames], "says": plain(read), "own_words_differ_in": differ}
            )
        return entries

    def own_words(self, call: Any) -> Any:
        """The request as SGLang's tokenizer manager would build it, by name."""
        sampling, native = call.sampling, call.native
        if native is None:
            from bridge.wire.sglang.requests import Native

            native = Native()
        constraint = sampling.constraint
        fields = {"json_schema": "json_schema", "regex": "regex", "grammar": "ebnf", "structural_tag": "structural_tag"}
        params = self.params(
            max_new_tokens=sampling.max_tokens,
            min_new_tokens=sampling.min_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k or -1,
            min_p=sampling.min_p,
            frequency_penalty=sampling.frequency_penalty,
            presence_penalty=sampling.presence_penalty,
            repetition_penalty=sampling.repetition_penalty,
            ignore_eos=sampling.ignore_eos,
            stop=native.stops.strings or None,
            stop_token_ids=set(sampling.stop_token_ids) or None,
            skip_special_tokens=native.stops.skip_special_tokens,
            spaces_between_special_tokens=native.stops.spaces_between_special_tokens,
            no_stop_trim=native.stops.no_stop_trim,
            stream_interval=native.stops.stream_interval,
            sampling_seed=sampling.seed,
            logit_bias={str(k): v for k, v in sampling.logit_bias.items()} if sampling.logit_bias else None,
            custom_params=native.custom_params,
            **({fields[constraint.kind]: constraint.value} if constraint else {}),
        )
        start = 0 if sampling.prompt_logprobs is not None and native.logprob_start < 0 else native.logprob_start
        transfer = native.transfer
        return self.structs.TokenizedGenerateReqInput(
            rid=call.wire_id,
            input_text=None,
            input_ids=array("q", call.prompt_token_ids),
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=params,
            return_logprob=sampling.logprobs is not None or start >= 0 or native.scored_ids is not None,
            logprob_start_len=start,
            top_logprobs_num=max(sampling.logprobs or 0, sampling.prompt_logprobs or 0),
            token_ids_logprob=native.scored_ids,
            stream=call.stream,
            return_hidden_states=native.hidden_states,
            lora_id=native.lora_id,
            custom_logit_processor=native.logit_processor,
            bootstrap_host=transfer.host if transfer else None,
            bootstrap_port=transfer.port if transfer else None,
            bootstrap_room=transfer.room if transfer else None,
            require_reasoning=native.reasoning,
            cache_salt=call.cache_salt,
        )

    def values(self) -> list[dict[str, Any]]:
        """Values of sampling fields, as msgpack in hex: those the decoder and `verify` take, and those they refuse."""
        import msgspec
        from cases import VALUES, VOCABULARY

        order = self.declared()["SamplingParams"]
        defaults = {field.name: field.default for field in msgspec.structs.fields(self.params)}
        entries: dict[str, dict[str, Any]] = {}
        for name, field, value in VALUES:
            chosen = {**defaults, "max_new_tokens": 16, field: value}
            array_of = [chosen[one] for one in order[: order.index("custom_params") + 1]]
            try:
                params = msgspec.msgpack.decode(msgspec.msgpack.encode(array_of), type=self.params)
                params.normalize(_Tokenizer())
                params.verify(VOCABULARY)
                verdict = "takes"
            except Exception:
                verdict = "refuses"
            entry = entries.setdefault(name, {"field": name, "takes": [], "refuses": []})
            entry[verdict].append(msgspec.msgpack.encode(value).hex())
        return list(entries.values())

    def steps(self) -> list[dict[str, Any]]:
        """Messages of the lane, from this package's output structs by SMG's plugin."""
        from smg_grpc_servicer.sglang import zmq_msgpack as lane

        load = {"num_running": 5, "num_waiting": 6, "kv_used_tokens": 640, "kv_total_tokens": 1024}
        entries = []
        for name, output in self._outputs():
            if isinstance(output, self.structs.BatchTokenIDOutput):
                rows = lane.HiddenStateRows().column(output)
                slim = lane.BatchTokenIDSlimOutput.from_full(output, engine_index=3, hidden_rows=rows, **load)
            elif isinstance(output, self.structs.BatchEmbeddingOutput):
                slim = lane.BatchEmbeddingSlimOutput.from_full(output, engine_index=3, **load)
            else:
                slim = output
            says = {name: plain(getattr(slim, name)) for name in type(slim).__struct_fields__}
            entries.append(
                {"name": name, "kind": type(slim).__name__, "frames": [lane.encode(slim).hex()], "says": says}
            )
        for call_id, success, message in ((7, True, None), (2**40, False, "busy")):
            reply = lane.ControlReplySlim(call_id=call_id, success=success, message=message, engine_index=3)
            says = {name: getattr(reply, name) for name in type(reply).__struct_fields__}
            entries.append(
                {
                    "name": f"reply {call_id}",
                    "kind": "ControlReplySlim",
                    "frames": [lane.encode(reply).hex()],
                    "says": says,
                }
            )
        return entries

    def _outputs(self) -> Iterator[tuple[str, Any]]:
        yield "nothing", self._tokens([])
        yield "three deltas", self._tokens([("1.0.1", [15043]), ("1.0.2", [0]), ("1.0.3", [65536, 7, 262143])])
        reasons = [
            {"type": "stop", "matched": 2},
            {"type": "stop", "matched": "Ende"},
            {"type": "stop", "matched": [1, 2]},
            {"type": "length", "length": 9},
            {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None},
            {"type": "abort", "message": "too long", "status_code": 400, "err_type": "BadRequestError"},
            {"type": "abort", "message": "queue full", "status_code": 503, "err_type": None},
            {"type": "abort", "message": "broken", "status_code": 500, "err_type": "InternalServerError"},
            {"type": "abort", "message": "no such token", "status_code": None, "err_type": "GrammarRejectedToken"},
            {"type": "stop", "matched": "NaN happened"},
        ]
        rows = [(f"1.0.{number}", [number]) for number in range(len(reasons))]
        yield "every end", self._tokens(rows, finished_reasons=reasons)
        two = [("1.0.1", [11, 12]), ("1.0.2", [13])]
        columns = {
            "output_token_logprobs_val": [[-0.5, -1.25], []],
            "output_token_logprobs_idx": [[11, 12], []],
            "output_top_logprobs_val": [[[-0.5, -2.0], [-1.0, -1.25]], []],
            "output_top_logprobs_idx": [[[11, 4], [5, 12]], []],
            "output_token_ids_logprobs_val": [[[-3.0, -4.0], [-5.0, -6.0]], []],
            "output_token_ids_logprobs_idx": [[[7, 8], [7, 8]], []],
            "input_token_logprobs_val": [[None, -2.5], []],
            "input_token_logprobs_idx": [[1, 15043], []],
            "input_top_logprobs_val": [[None, [-2.5, -3.5]], []],
            "input_top_logprobs_idx": [[None, [15043, 6]], []],
            "input_token_ids_logprobs_val": [[None, [-1.0, -2.0]], []],
            "input_token_ids_logprobs_idx": [[None, [7, 8]], []],
        }
        yield "log-probabilities", self._tokens(two, **columns)
        scoring = {
            **{name: [[]] for name in columns},
            "output_token_logprobs_val": [[-0.75]],
            "output_token_logprobs_idx": [[21]],
            "output_token_ids_logprobs_val": [[[-3.0]]],
            "output_token_ids_logprobs_idx": [[[7]]],
        }
        ended = [{"type": "length", "length": 0}]
        yield "scores of a prompt", self._tokens([("1.0.1", [])], finished_reasons=ended, **scoring)
        yield (
            "reasoning and hidden states",
            self._tokens(
                two, reasoning_tokens=[2, 0], output_hidden_states=[[[[0.5, 1.5], [2.5, 3.5]], [4.5, 5.5]], None]
            ),
        )
        yield (
            "embeddings",
            self._embeddings([{"type": "stop", "matched": None}] * 2, [[0.25, -0.5, 1.0], [0.0, 2.0]]),
        )
        refused = [{"type": "abort", "message": "too long", "status_code": 400, "err_type": "BadRequestError"}] * 2
        yield "embeddings that were refused", self._embeddings(refused, [[], []])

    def _tokens(self, rows: list[tuple[str, list[int]]], **changed: Any) -> Any:
        import msgspec

        count = len(rows)
        kind = self.structs.BatchTokenIDOutput
        given: dict[str, Any] = {
            field.name: None for field in msgspec.structs.fields(kind) if field.default is msgspec.NODEFAULT
        }
        given |= {
            "rids": [rid for rid, _ in rows],
            "output_ids": [array("q", ids) for _, ids in rows],
            "finished_reasons": [None] * count,
            "prompt_tokens": [3] * count,
            "completion_tokens": [9] * count,
            "cached_tokens": [2] * count,
            "reasoning_tokens": [0] * count,
        }
        return kind(**{**given, **changed})

    def _embeddings(self, reasons: list[Any], vectors: list[list[float]]) -> Any:
        return self.structs.BatchEmbeddingOutput(
            rids=[f"1.0.{number}" for number in range(len(reasons))],
            finished_reasons=reasons,
            embeddings=vectors,
            prompt_tokens=[3] * len(reasons),
            cached_tokens=[0] * len(reasons),
            placeholder_tokens_idx=None,
            placeholder_tokens_val=None,
        )


class _Tokenizer:
    """Stands for a tokenizer in `normalize`, which only measures stop strings with it."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(text.encode())


def _ids(kind: type, value: Any) -> Any:
    """Token ids come as a plain array on the lane; SGLang types them `array`."""
    if kind is array and isinstance(value, list):
        return array("q", value)
    raise NotImplementedError(f"{kind} of {value!r}")


def _unequal(left: Any, right: Any, path: str = "") -> list[str]:
    if isinstance(left, dict) and isinstance(right, dict):
        return [
            place for key in {**left, **right} for place in _unequal(left.get(key), right.get(key), f"{path}.{key}")
        ]
    return [] if left == right else [path.removeprefix(".")]


if __name__ == "__main__":
    sys.exit(main())
