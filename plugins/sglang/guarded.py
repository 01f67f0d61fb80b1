"""What SGLang's tokenizer manager checks before a request reaches the scheduler, and what the scheduler dies of.

The tokenizer manager is bypassed, so its checks are made here, with its own code where it can be called (`normalize`,
`verify`). Scheduler deaths were read in 0.5.23: an id outside the vocabulary, more top log-probabilities than tokens,
a custom logit processor that does not load, a request kind the model does not serve, logits that are no numbers.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bridge.wire.sglang.rules import LEAST_REPETITION, MAX_BIAS

UNCARRIED = (
    ("return_sampling_mask", False),
    ("return_flat_raw_top_logprobs", False),
    ("return_routed_experts", False),
    ("return_indexer_topk", False),
    ("return_entropy", False),
    ("input_embeds", None),
    ("positional_embed_overrides", None),
)
"""Fields of a generation whose results or inputs the lane does not carry, with their value when unset."""


class Refused(Exception):
    """Why a request is not given to the scheduler; the text names the field, the value and the limit."""


@dataclass(frozen=True)
class Limits:
    """What this rank's scheduler can take. `loras` maps each loaded adapter's id and name to its id."""

    vocab_size: int
    is_generation: bool
    is_multimodal: bool
    hidden_states: str
    """"" when the engine returns none, else "last" or "full"."""
    custom_logit_processors: Callable[[str], Any] | None
    """Loads one from its text; None when the engine was started without them."""
    loras: Callable[[], Mapping[str, str]] | None
    """None when the engine was started without LoRA."""
    embedding_dimensions: Sequence[int] | None
    """The sizes embeddings can be cut to; empty for any up to the whole, None for a model that cannot."""
    hidden_size: int


def check_generate(request: Any, limits: Limits, tokenizer: Any) -> None:
    """Make a decoded TokenizedGenerateReqInput fit to be scheduled; raises `Refused`."""
    if not limits.is_generation:
        raise Refused("this engine serves embeddings (--is-embedding), not generation")
    _check_ids("input_ids", request.input_ids, limits.vocab_size)
    params = request.sampling_params
    _settle(params, tokenizer, limits.vocab_size)
    _check_logits(params)
    if params.n != 1:
        raise Refused(f"n is {params.n}; one request is one sample here, so send {params.n} of them")
    if (getattr(params, "beam_width", None) or 1) > 1:
        raise Refused(f"beam_width is {params.beam_width}; beam search is not carried by this lane")
    if getattr(params, "watermark", None) is not None:
        raise Refused("watermark is not carried by this lane")
    for name, unset in UNCARRIED:
        value = getattr(request, name, unset)
        if value != unset and value is not None:
            raise Refused(f"{name} is not carried by this lane")
    if not 0 <= request.top_logprobs_num <= limits.vocab_size:
        raise Refused(f"top_logprobs_num is {request.top_logprobs_num}; 0 to {limits.vocab_size} are possible")
    if request.logprob_start_len < -1:
        raise Refused(f"logprob_start_len is {request.logprob_start_len}; -1 or more is possible")
    if request.token_ids_logprob:
        _check_ids("token_ids_logprob", request.token_ids_logprob, limits.vocab_size)
    _check_hidden_states(request.return_hidden_states, limits.hidden_states)
    if request.custom_logit_processor:
        _check_processor(request.custom_logit_processor, limits)
    _check_shared(request, limits)


def check_embed(request: Any, limits: Limits, tokenizer: Any) -> None:
    """Make a decoded TokenizedEmbeddingReqInput fit to be scheduled; raises `Refused`."""
    if limits.is_generation:
        raise Refused("this engine serves generation; embeddings need --is-embedding at its start")
    _check_ids("input_ids", request.input_ids, limits.vocab_size)
    request.sampling_params.max_new_tokens = 0
    _settle(request.sampling_params, tokenizer, limits.vocab_size)
    dimensions = request.dimensions
    if dimensions is not None:
        sizes = limits.embedding_dimensions
        if sizes is None:
            raise Refused(f"dimensions is {dimensions}; this model's embeddings cannot be cut")
        if not 0 < dimensions <= limits.hidden_size or (sizes and dimensions not in sizes):
            possible = ", ".join(map(str, sizes)) if sizes else f"1 to {limits.hidden_size}"
            raise Refused(f"dimensions is {dimensions}; possible are {possible}")
    _check_shared(request, limits)


def _settle(params: Any, tokenizer: Any, vocab_size: int) -> None:
    """What the tokenizer manager does with sampling values before it sends them."""
    try:
        if params.is_normalized:  # the sender's word for it; then zeros and stops have not been looked at
            params.is_normalized = False
            params.__post_init__()
        params.normalize(tokenizer)
        params.verify(vocab_size)
    except Exception as error:  # a stop_regex may raise anything the regex parser does
        raise Refused(str(error) or type(error).__name__) from None


def _check_logits(params: Any) -> None:
    """Values that SGLang takes and that turn logits into no numbers, of which the scheduler dies."""
    if not params.repetition_penalty >= LEAST_REPETITION:
        raise Refused(f"repetition_penalty is {params.repetition_penalty}; {LEAST_REPETITION} or more is possible")
    bias = params.logit_bias
    if bias:
        params.logit_bias = {token: max(-MAX_BIAS, min(MAX_BIAS, value)) for token, value in bias.items()}


def _check_ids(name: str, ids: Sequence[int] | None, vocab_size: int) -> None:
    if not ids:
        raise Refused(f"{name} is empty")
    lowest, highest = _extremes(ids)
    if lowest < 0 or highest >= vocab_size:
        raise Refused(f"{name} has {lowest if lowest < 0 else highest}; token ids go from 0 to {vocab_size - 1}")


def _extremes(ids: Sequence[int]) -> tuple[int, int]:
    if isinstance(ids, array) and len(ids) > 256:
        import numpy as np

        values = np.frombuffer(ids, dtype=ids.typecode)
        return int(values.min()), int(values.max())
    return min(ids), max(ids)


def _check_hidden_states(asked: Any, served: str) -> None:
    if not asked:
        return
    if not served:
        raise Refused("return_hidden_states needs --enable-return-hidden-states at the engine's start")
    if asked != "last" and served == "last":
        raise Refused("return_hidden_states is more than the engine's --return-hidden-states-mode last")


def _check_processor(text: str, limits: Limits) -> None:
    if limits.custom_logit_processors is None:
        raise Refused("custom_logit_processor needs --enable-custom-logit-processor at the engine's start")
    try:
        limits.custom_logit_processors(text)
    except Exception as error:
        raise Refused(f"custom_logit_processor does not load: {error}") from None


def _check_shared(request: Any, limits: Limits) -> None:
    if request.mm_inputs is not None and not limits.is_multimodal:
        raise Refused("mm_inputs is set, and this model takes text only")
    if request.lora_id is not None:
        known = limits.loras() if limits.loras is not None else {}
        if request.lora_id not in known:
            loaded = ", ".join(sorted(known)) or "none is loaded"
            raise Refused(f"lora_id is {request.lora_id!r}; adapters: {loaded}")
        request.lora_id = known[request.lora_id]
