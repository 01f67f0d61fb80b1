"""`vllm.Inference`: the contract vLLM Router speaks to a worker, on the neutral core.

What a zero means here: only temperature, seed, output_text and skip_special_tokens have presence; any other zero is
"unset", and an unset value is the model's generation default, else the engine's. Checked against vllm-rs 0.33.0, which
differs in five things (`tests/vllm/test_inference_parity.py` lists them).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from google.protobuf.json_format import MessageToDict

from bridge.contracts import amounts
from bridge.contracts.admission import Admission, Answer, Wanted, whole_numbers
from bridge.contracts.amounts import at_most
from bridge.contracts.context import Context
from bridge.contracts.proto import message
from bridge.contracts.vllm_inference_render import FullSink, IdsSink, Shown, maker
from bridge.detokenizer import TextRules
from bridge.grpc.call import Call
from bridge.grpc.service import Method, Rest
from bridge.grpc.status import Code
from bridge.guard import Ask
from bridge.refusal import Refusal, invalid, shown, unsupported
from bridge.stops import StopRules
from bridge.wire.codec import Adapter, Sampling

NAME = "vllm.Inference"

GenerateRequest = message("vllm.GenerateRequest")


class VllmInference:
    """The service. One instance a front end."""

    name = NAME

    def __init__(self, context: Context) -> None:
        self._context = context
        self._admission = Admission(context)

    def methods(self) -> Iterable[Method]:
        yield Method(f"/{NAME}/Generate", "raw_stream", GenerateRequest, partial(self.generate, stream=False))
        yield Method(f"/{NAME}/GenerateStream", "raw_stream", GenerateRequest, partial(self.generate, stream=True))

    def generate(self, request: Any, call: Call, *, stream: bool) -> Rest | None:
        """Both methods: without `stream` the one reply comes at the end."""
        check_model(self._context, request.model)
        _refuse_unsupported(request)
        kind = request.WhichOneof("prompt")
        if kind is None:
            raise Refusal(Code.INVALID_ARGUMENT, "prompt is unset; give token_ids or text")
        ask = _ask(request)
        if ask.n is not None and ask.n > 1 and not stream:
            raise invalid("sampling.num_sequences", ask.n, "1 for Generate, whose reply holds one; use GenerateStream")
        view = _shown(request.response, request.stopping)
        ask.logprobs, ask.prompt_logprobs = view.logprobs, view.prompt_logprobs
        return self._admission.submit(
            Wanted(
                request_id=request.request_id,
                ask=ask,
                answer=lambda ids, sampling: self._answer(request, call, view, ids, sampling, stream=stream),
                stream=stream,
                ids=request.token_ids.ids,
                text=request.text if kind == "text" else None,
                text_out=view.text,
                constraint=_constraint(request.decoding),
                session_id=request.session_id,
                adapter=_adapter(self._context, request.lora_name),
                cache_salt=request.kv.cache_salt,
                transfer=_transfer(request.kv),
                keep_stop_text=view.keep_stop_text,
                keep_prompt=view.prompt_token_ids,
            ),
            call,
        )

    def _answer(
        self, request: Any, call: Call, view: Shown, ids: Sequence[int], sampling: Sampling, *, stream: bool
    ) -> Answer:
        eos = frozenset(sampling.eos_token_ids)
        rules, stops = self._rules(request, view, ids, sampling)
        rich = maker(view, stops)
        sequences = request.sampling.num_sequences or 1
        if rich is None and view.only_ids and sequences == 1:
            return IdsSink(call, view, eos, stream=stream), None
        return FullSink(call, view, eos, rules, stream=stream, sequences=sequences), rich

    def _rules(
        self, request: Any, view: Shown, ids: Sequence[int], sampling: Sampling
    ) -> tuple[TextRules | None, StopRules | None]:
        """(how shown text is made, the stop strings); each None where there is none."""
        tokenizer, strings = self._context.text.loaded, request.stopping.stop_strings
        if tokenizer is None or not (view.text or strings):
            return None, None
        skip = _or_true(request.response, "skip_special_tokens")
        if not strings:
            return TextRules(tokenizer, ids, skip_special_tokens=skip), None
        stops = StopRules(tokenizer, strings, ids, min_tokens=sampling.min_tokens, skip_special_tokens=skip)
        return (stops if view.text else None), stops


def check_model(context: Context, name: str) -> None:
    """Raises `Refusal` NOT_FOUND for a model that is not the served one; the empty name is any."""
    if name and name != context.engine.facts.served_model_name:
        served = context.engine.facts.served_model_name
        raise Refusal(Code.NOT_FOUND, f"model {name!r} is not found; this server has {served!r}")


def _adapter(context: Context, name: str) -> Adapter | None:
    """The adapter of that name; raises `Refusal` FAILED_PRECONDITION or NOT_FOUND."""
    if not name:
        return None
    if not context.engine.facts.supports_lora:
        raise Refusal(Code.FAILED_PRECONDITION, f"lora_name is {shown(name)}, and the engine was started without LoRA")
    found = context.adapters.get(name)
    if found is None:
        loaded = ", ".join(sorted(context.adapters)) or "none"
        raise Refusal(Code.NOT_FOUND, f"lora_name is {shown(name)}; loaded: {loaded}. LoadLora loads one")
    return found


def _refuse_unsupported(request: Any) -> None:
    """Refuse by name what this contract can say and the bridge or its engine does not do; and excess of the rest."""
    if request.media:
        raise unsupported(
            "media", f"{len(request.media)} items", "media inputs are not supported; send text or ids only"
        )
    if request.kv.HasField("ec_transfer_params"):
        raise unsupported("kv.ec_transfer_params", "set", "encoder caches are not transferred")
    at_most("stopping.stop_token_ids", request.stopping.stop_token_ids, amounts.STOP_IDS, "ids")
    at_most("decoding.logit_bias", request.decoding.logit_bias, amounts.BIASES, "entries")
    at_most("decoding.allowed_token_ids", request.decoding.allowed_token_ids, amounts.BIASES, "ids")


def _ask(request: Any) -> Ask:
    """The contract's values in neutral words: None where the contract's zero means "unset"."""
    sampling, decoding, stopping = request.sampling, request.decoding, request.stopping
    return Ask(
        temperature=request.temperature if request.HasField("temperature") else None,
        top_p=sampling.top_p or None,
        top_k=sampling.top_k or None,
        min_p=sampling.min_p or None,
        frequency_penalty=decoding.frequency_penalty or None,
        presence_penalty=decoding.presence_penalty or None,
        repetition_penalty=decoding.repetition_penalty or None,
        max_tokens=stopping.max_new_tokens or None,
        min_tokens=stopping.min_new_tokens or None,
        seed=sampling.seed if sampling.HasField("seed") else None,
        ignore_eos=stopping.ignore_eos,
        stop_token_ids=list(stopping.stop_token_ids),
        n=sampling.num_sequences or None,
        stop=list(stopping.stop_strings),
        logit_bias=dict(decoding.logit_bias) or None,
        truncate_prompt_tokens=request.truncate_prompt_tokens or None,
        allowed_token_ids=list(decoding.allowed_token_ids) or None,
        bypass_prefix_cache=request.kv.bypass_prefix_cache or None,
        priority=request.priority or None,
    )


def _shown(response: Any, stopping: Any) -> Shown:
    return Shown(
        token_ids=response.output_token_ids,
        text=_or_true(response, "output_text"),
        logprobs=_candidates(response, "output"),
        prompt_token_ids=response.prompt_token_ids,
        prompt_logprobs=_candidates(response, "prompt"),
        keep_stop_text=stopping.include_stop_strings,
    )


def _candidates(response: Any, side: str) -> int | None:
    """How many candidates are shown beside each token, -1 for all; None without log-probabilities.

    Candidates without log-probabilities are not shown (vllm-rs 0.33.0).
    """
    if not getattr(response, f"{side}_logprobs"):
        return None
    field = f"{side}_candidates"
    wanted = getattr(response, field)
    kind = wanted.WhichOneof("select")
    if kind == "token_ids":
        raise unsupported(f"response.{field}.token_ids", "set", "candidates are chosen by top_n or all")
    if kind == "all":
        return -1 if wanted.all else 0
    return int(wanted.top_n)


def _constraint(decoding: Any) -> tuple[str, Any] | None:
    kind = decoding.WhichOneof("structured_output")
    if kind is None or (kind == "json_object" and not decoding.json_object):
        return None
    if kind == "choice":
        return kind, list(decoding.choice.choices)
    return ("json_schema" if kind == "json" else kind), getattr(decoding, kind)


def _transfer(kv: Any) -> dict[str, Any] | None:
    if not kv.HasField("kv_transfer_params"):
        return None
    at_most("kv.kv_transfer_params", kv.kv_transfer_params.SerializeToString(), amounts.TRANSFER_CHARACTERS, "bytes")
    found: dict[str, Any] = whole_numbers(MessageToDict(kv.kv_transfer_params))
    return found


def _or_true(message: Any, field: str) -> bool:
    return bool(getattr(message, field)) if message.HasField(field) else True
