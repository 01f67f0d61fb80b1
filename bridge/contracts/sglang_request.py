"""Reads requests of `sglang.grpc.scheduler` into neutral words.

What a zero means here. Only max_new_tokens, stream_interval and data_parallel_rank of Generate have presence.

| field | zero |
|---|---|
| temperature | greedy |
| top_p, repetition_penalty | unset: 1, which is off |
| top_k | unset: -1, which is off |
| min_p, frequency_penalty, presence_penalty | 0, which is off |
| n | unset: 1 |
| min_new_tokens | 0 |
| max_new_tokens | unset is what fits the context; 0 scores the prompt and generates nothing |
| logprob_start_len | 0: the whole prompt, with return_logprob; -1 is the output only |
| top_logprobs_num | 0: the tokens' own log-probabilities alone |
| stop, stop_token_ids, logit_bias, token_ids_logprob | none |
| bootstrap_host, bootstrap_port | unset; bootstrap_room 0 is a room |
| data_parallel_rank of Embed | unset; of Generate, rank 0 |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from google.protobuf.json_format import MessageToDict
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb

from bridge.contracts import amounts
from bridge.contracts.admission import whole_numbers
from bridge.contracts.amounts import at_most
from bridge.contracts.sglang_render import Collected
from bridge.guard import Ask
from bridge.logprobs import Columns
from bridge.refusal import invalid
from bridge.requests import Rich
from bridge.wire.codec import Constraint, Sampling
from bridge.wire.sglang.requests import NO_PROMPT_LOGPROBS, Native, Transfer

CALLED: Mapping[str, str] = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "logprobs": "top_logprobs_num",
    "prompt_logprobs": "top_logprobs_num",
    "logprob_token_ids": "token_ids_logprob",
}
"""The contract's names of what the guard calls otherwise."""

CONSTRAINTS: Mapping[str, str] = {
    "regex": "regex",
    "json_schema": "json_schema",
    "ebnf_grammar": "grammar",
    "structural_tag": "structural_tag",
}
"""Field of the contract → kind of constraint."""

ANY_JSON = "$$ANY$$"
"""What SGLang takes for any JSON object in place of a schema."""

CUSTOM_PARAMS_BYTES = 1 << 16


def refuse_excess(message: pb.GenerateRequest) -> None:
    """Refuse what would take long to look at piece by piece."""
    params = message.sampling_params
    at_most("request_id", message.request_id, amounts.REQUEST_ID_CHARACTERS, "characters")
    at_most("stop", params.stop, amounts.STOP_STRINGS, "strings")
    at_most("stop_token_ids", params.stop_token_ids, amounts.STOP_IDS, "ids")
    at_most("logit_bias", params.logit_bias, amounts.BIASES, "entries")
    at_most("token_ids_logprob", message.token_ids_logprob, amounts.STOP_IDS, "ids")


def prompt_logprobs_start(message: pb.GenerateRequest, tokens: int) -> int:
    """The first prompt position with log-probabilities, -1 when none are asked for."""
    if not message.return_logprob:
        return NO_PROMPT_LOGPROBS
    start: int = message.logprob_start_len
    if not -1 <= start <= tokens:
        raise invalid("logprob_start_len", start, f"from 0 to {tokens}, the number of input_ids, or -1 for none")
    return NO_PROMPT_LOGPROBS if start == tokens else start


def ask_of(message: pb.GenerateRequest, start: int) -> Ask:
    """The contract's values in neutral words; the zeros as in the table above."""
    params = message.sampling_params
    top = message.top_logprobs_num if message.return_logprob else None
    return Ask(
        temperature=params.temperature,
        top_p=params.top_p or 1.0,
        top_k=params.top_k or -1,
        min_p=params.min_p,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty or 1.0,
        max_tokens=params.max_new_tokens if params.HasField("max_new_tokens") else None,
        min_tokens=params.min_new_tokens,
        ignore_eos=params.ignore_eos,
        stop_token_ids=list(params.stop_token_ids),
        n=params.n or 1,
        stop=list(params.stop),
        logprobs=top,
        prompt_logprobs=top if start != NO_PROMPT_LOGPROBS else None,
        logprob_token_ids=list(message.token_ids_logprob) or None,
        logit_bias=_biases(params.logit_bias),
    )


def _biases(biases: Mapping[str, float]) -> dict[int, float] | None:
    """Token ids are strings in this contract."""
    try:
        return {int(token): bias for token, bias in biases.items()} or None
    except ValueError:
        wrong = next(token for token in biases if not token.strip().lstrip("+-").isdecimal())
        raise invalid("a key of logit_bias", wrong, "a token id") from None


def constraint_of(params: pb.SamplingParams) -> Constraint | None:
    """What the output must match; the empty text is none, as in SGLang. Raises `Refusal` for JSON that is none."""
    field = params.WhichOneof("constraint")
    value: str = getattr(params, field) if field is not None else ""
    if field is None or not value:
        return None
    at_most(field, value, amounts.CONSTRAINT_CHARACTERS, "characters")
    if field in ("json_schema", "structural_tag") and value != ANY_JSON:
        try:
            msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError) as error:
            raise invalid(field, value, f"JSON ({error})") from None
    return Constraint(kind=CONSTRAINTS[field], value=value, backend="")


def check_processor(text: str) -> None:
    """Raises `Refusal` unless the text is what SGLang's `CustomLogitProcessor.to_str` makes."""
    try:
        found = msgspec.json.decode(text, type=dict[str, Any])
        bytes.fromhex(found["callable"])
    except (msgspec.MsgspecError, RecursionError, KeyError, TypeError, ValueError):
        limit = 'JSON of a map whose "callable" is hexadecimal, as CustomLogitProcessor.to_str() makes it'
        raise invalid("custom_logit_processor", text, limit) from None


def custom_params_of(params: pb.SamplingParams) -> dict[str, Any] | None:
    if not params.HasField("custom_params"):
        return None
    at_most("custom_params", params.custom_params.SerializeToString(), CUSTOM_PARAMS_BYTES, "bytes")
    found: dict[str, Any] = whole_numbers(MessageToDict(params.custom_params))
    for name, value in found.items():
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        if any(isinstance(one, (dict, list)) for one in inner):
            raise invalid(f"custom_params[{name!r}]", value, "a value, a list of values or a map of values, no deeper")
    return found


def transfer_of(message: pb.GenerateRequest) -> Transfer | None:
    if not message.HasField("disaggregated_params"):
        return None
    pair = message.disaggregated_params
    if not 0 <= pair.bootstrap_port < 65536:
        raise invalid("bootstrap_port", pair.bootstrap_port, "a port, or 0 for the engine's own")
    if pair.bootstrap_room < 0:
        raise invalid("bootstrap_room", pair.bootstrap_room, "0 or more")
    return Transfer(host=pair.bootstrap_host or None, port=pair.bootstrap_port or None, room=pair.bootstrap_room)


def rich_of(sampling: Sampling, native: Native) -> Callable[[], Rich] | None:
    """What each sequence of the request carries beyond its tokens; None when nothing."""
    collects = native.scored_ids is not None or native.hidden_states or native.reasoning
    if sampling.logprobs is None and not collects:
        return None

    def make() -> Rich:
        rich = Rich()
        rich.logprobs = Columns(sampling.logprobs) if sampling.logprobs is not None else None
        rich.prompt_logprobs = Columns(sampling.prompt_logprobs) if sampling.prompt_logprobs is not None else None
        rich.extras = Collected() if collects else None
        return rich

    return make
