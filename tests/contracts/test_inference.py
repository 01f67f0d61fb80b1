"""`vllm.Inference` on the simulated engine: what is asked comes out, and nothing else."""

from __future__ import annotations

import threading
import time
from typing import Any

import grpc
import pytest
from tokenizers import Tokenizer

from tests.contracts.asking import control, inference, joined
from tests.contracts.conftest import Served

PROMPT = [504, 3575, 282, 4649, 314]
LIMIT_S = 30
STOP, LENGTH, ABORTED = 2, 1, 3


def stream(served: Served, **fields: Any) -> list[Any]:
    return list(served.inference.GenerateStream(inference(**fields), timeout=LIMIT_S))


def both(served: Served, **fields: Any) -> Any:
    """The answer, which Generate and GenerateStream must agree on."""
    whole = served.inference.Generate(inference(**fields), timeout=LIMIT_S)
    streamed = joined(stream(served, **fields))
    for one in (whole, streamed):
        one.outputs.finish_info.num_cached_prompt_tokens = 0  # the second may find its prompt in the cache
    assert whole == streamed
    return whole


def asked(count: int = 12, prompt: list[int] | None = None, **response: Any) -> dict[str, Any]:
    ids = PROMPT if prompt is None else prompt
    return {"token_ids": {"ids": ids}, "stopping": {"max_new_tokens": count}, "response": response}


def refused(served: Served, code: grpc.StatusCode, **fields: Any) -> str:
    """Both methods refuse; what they say."""
    with pytest.raises(grpc.RpcError) as whole:
        served.inference.Generate(inference(**fields), timeout=LIMIT_S)
    with pytest.raises(grpc.RpcError) as streamed:
        stream(served, **fields)
    assert whole.value.code() is streamed.value.code() is code, (whole.value, streamed.value)
    assert whole.value.details() == streamed.value.details()
    return str(whole.value.details())


def test_token_ids_only_as_vllm_router_asks(served: Served) -> None:
    replies = stream(served, **asked(12, output_text=False, output_token_ids=True, skip_special_tokens=True))
    answer = joined(replies)
    assert answer.prompt_info.num_prompt_tokens == len(PROMPT) and not answer.prompt_info.token_ids
    assert list(answer.outputs.token_ids) == served.tokens(PROMPT, 12)
    assert not answer.outputs.text and not answer.outputs.logprobs
    assert answer.outputs.finish_info.finish_reason == LENGTH
    assert all(reply.outputs.num_tokens for reply in replies[1:])


def test_text_is_the_default_and_is_what_the_tokens_say(served: Served, tokenizer: Tokenizer) -> None:
    answer = both(served, **asked(40))
    ids = served.tokens(PROMPT, 40)
    text = tokenizer.decode(PROMPT + ids)[len(tokenizer.decode(PROMPT)) :]
    assert text.startswith(answer.outputs.text) and len(text) - len(answer.outputs.text) <= 1
    assert not answer.outputs.token_ids and answer.outputs.num_tokens == 40


def test_text_prompts_are_tokenized_and_can_be_shown(served: Served, tokenizer: Tokenizer) -> None:
    text = "The capital of France is"
    answer = both(
        served,
        text=text,
        stopping={"max_new_tokens": 3},
        response={"prompt_token_ids": True, "output_text": False, "output_token_ids": True},
    )
    ids = tokenizer.encode(text).ids
    assert list(answer.prompt_info.token_ids) == ids and answer.prompt_info.num_prompt_tokens == len(ids)
    assert list(answer.outputs.token_ids) == served.tokens(ids, 3)


def test_nothing_but_counts(served: Served) -> None:
    answer = both(served, **asked(5, output_text=False))
    assert not answer.outputs.text and not answer.outputs.token_ids and answer.outputs.num_tokens == 5


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_end_the_text_before_or_behind_them(served: Served, tokenizer: Tokenizer, include: bool) -> None:
    ids = served.tokens(PROMPT, 12)
    pieces = [tokenizer.decode([token]) for token in ids]
    word = pieces[6][-3:]
    whole = "".join(pieces)
    end = whole.index(word)
    kept = next(n for n in range(1, 13) if word in "".join(pieces[:n]))
    fields = asked(12, output_token_ids=True)
    fields["stopping"] |= {"stop_strings": ["no such text", word], "include_stop_strings": include}
    answer = both(served, **fields)
    assert answer.outputs.text == whole[: end + (len(word) if include else 0)]
    assert list(answer.outputs.token_ids) == ids[:kept]
    assert answer.outputs.finish_info.finish_reason == STOP and answer.outputs.finish_info.stop_string == word


def test_no_part_of_a_stop_string_is_ever_shown(served: Served, tokenizer: Tokenizer) -> None:
    ids = served.tokens(PROMPT, 12)
    two = tokenizer.decode(ids[5:7])
    fields = asked(12)
    fields["stopping"] |= {"stop_strings": [two]}
    shown, before = "", tokenizer.decode(ids[:5])
    for reply in stream(served, **fields)[1:]:
        shown += reply.outputs.text
        assert before.startswith(shown)
    assert shown == before


def test_stop_strings_without_text(served: Served, tokenizer: Tokenizer) -> None:
    ids = served.tokens(PROMPT, 12)
    fields = asked(12, output_text=False, output_token_ids=True)
    fields["stopping"] |= {"stop_strings": [tokenizer.decode([ids[4]])]}
    answer = both(served, **fields)
    assert list(answer.outputs.token_ids) == ids[:5] and not answer.outputs.text


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_is_reported_and_is_text_only_if_that_was_asked(
    served: Served, tokenizer: Tokenizer, include: bool
) -> None:
    ids = served.tokens(PROMPT, 12)
    fields = asked(12, output_token_ids=True)
    fields["stopping"] |= {"stop_token_ids": [ids[4], 7], "include_stop_strings": include}
    answer = both(served, **fields)
    assert list(answer.outputs.token_ids) == ids[:5]
    assert answer.outputs.text == tokenizer.decode(ids[: 5 if include else 4])
    info = answer.outputs.finish_info
    assert (info.finish_reason, info.stop_token_id, info.WhichOneof("stop_reason")) == (STOP, ids[4], "stop_token_id")


def test_eos_is_told_apart_from_stop_tokens(ending: Served, tokenizer: Tokenizer) -> None:
    answer = both(ending, **asked(12, output_token_ids=True))
    assert list(answer.outputs.token_ids) == [*ending.tokens(PROMPT, 4), 2]
    assert answer.outputs.text == tokenizer.decode(ending.tokens(PROMPT, 4))
    assert answer.outputs.finish_info.WhichOneof("stop_reason") == "eos_token_id"
    assert answer.outputs.finish_info.eos_token_id == 2
    fields = asked(12, output_token_ids=True)
    fields["stopping"] |= {"stop_token_ids": [2]}
    assert both(ending, **fields).outputs.finish_info.WhichOneof("stop_reason") == "eos_token_id"


def test_ignored_eos_is_a_token_like_any_other(ending: Served) -> None:
    fields = asked(12, output_token_ids=True, skip_special_tokens=False)
    fields["stopping"] |= {"ignore_eos": True}
    answer = both(ending, **fields)
    assert len(answer.outputs.token_ids) == 12 and answer.outputs.token_ids[4] == 2
    assert "<|im_end|>" in answer.outputs.text
    fields["response"] |= {"skip_special_tokens": True}
    assert "<|im_end|>" not in both(ending, **fields).outputs.text


def test_several_tokens_a_step_come_in_one_message(three_a_step: Served, tokenizer: Tokenizer) -> None:
    ids = three_a_step.tokens(PROMPT, 12)
    replies = stream(three_a_step, **asked(12, output_token_ids=True))
    assert max(reply.outputs.num_tokens for reply in replies) >= 3
    assert list(joined(replies).outputs.token_ids) == ids
    plain = joined(stream(three_a_step, **asked(12, output_token_ids=True, output_text=False)))
    assert list(plain.outputs.token_ids) == ids
    word = tokenizer.decode([ids[6]])
    fields = asked(12, output_token_ids=True)
    fields["stopping"] |= {"stop_strings": [word]}
    answer = joined(stream(three_a_step, **fields))
    assert list(answer.outputs.token_ids) == ids[:7], "tokens behind the stop string are dropped"
    assert answer.outputs.text == tokenizer.decode(ids[:6])


def test_sequences_are_told_apart_by_index(served: Served) -> None:
    fields = asked(6, output_text=False, output_token_ids=True)
    replies = stream(served, **fields | {"temperature": 1.0, "sampling": {"num_sequences": 3, "seed": 5}})
    assert replies[0].HasField("prompt_info") and not any(reply.HasField("prompt_info") for reply in replies[1:])
    for index in range(3):
        parts = [reply.outputs for reply in replies[1:] if reply.outputs.index == index]
        ids = [token for part in parts for token in part.token_ids]
        assert ids == served.tokens(PROMPT, 6, seed=5 + index)
        assert parts[-1].finish_info.num_output_tokens == 6


def test_generate_has_room_for_one_sequence(served: Served) -> None:
    with pytest.raises(grpc.RpcError) as error:
        served.inference.Generate(inference(**asked(2), sampling={"num_sequences": 2}), timeout=LIMIT_S)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "sampling.num_sequences is 2" in str(error.value.details())


def test_cached_prompt_tokens_are_counted_with_presence(served: Served) -> None:
    prompt = list(range(1000, 1301))
    cold = served.inference.Generate(inference(**asked(2, prompt)), timeout=LIMIT_S).outputs.finish_info
    assert cold.HasField("num_cached_prompt_tokens") and cold.num_cached_prompt_tokens == 0
    warm = served.inference.Generate(inference(**asked(2, prompt)), timeout=LIMIT_S).outputs.finish_info
    assert warm.num_cached_prompt_tokens == 288
    salted = served.inference.Generate(inference(**asked(2, prompt), kv={"cache_salt": "mine"}), timeout=LIMIT_S)
    assert salted.outputs.finish_info.num_cached_prompt_tokens == 0
    passed = served.inference.Generate(inference(**asked(2, prompt), kv={"bypass_prefix_cache": True}), timeout=LIMIT_S)
    assert passed.outputs.finish_info.num_cached_prompt_tokens == 0


def test_truncation_keeps_the_end(served: Served) -> None:
    fields = asked(3, output_text=False, output_token_ids=True, prompt_token_ids=True)
    answer = both(served, **fields, truncate_prompt_tokens=2)
    assert list(answer.prompt_info.token_ids) == PROMPT[-2:]
    assert list(answer.outputs.token_ids) == served.tokens(PROMPT[-2:], 3)


def test_priority_session_and_the_name_of_the_model_are_accepted(served: Served) -> None:
    for model in ("", "smol"):
        answer = both(served, **asked(2), priority=-3, session_id="s", model=model, request_id="")
        assert answer.outputs.finish_info.num_output_tokens == 2


def test_a_limit_above_the_context_is_clamped(served: Served) -> None:
    prompt = list(range(3000, 4000))
    assert both(served, **asked(100000, prompt, output_text=False)).outputs.num_tokens == 24


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({}, "INVALID_ARGUMENT", ["prompt is unset"]),
        ({"token_ids": {"ids": []}}, "INVALID_ARGUMENT", ["empty"]),
        ({"text": ""}, "INVALID_ARGUMENT", ["empty"]),
        ({"token_ids": {"ids": [5, 1000000]}}, "INVALID_ARGUMENT", ["1000000", "49152"]),
        ({"token_ids": {"ids": [5] * 1024}}, "INVALID_ARGUMENT", ["1024", "1023"]),
        ({"model": "nope", **asked()}, "NOT_FOUND", ["'nope'", "'smol'"]),
        ({**asked(), "temperature": 3.0}, "INVALID_ARGUMENT", ["temperature", "3.0", "2"]),
        ({**asked(), "temperature": float("nan")}, "INVALID_ARGUMENT", ["temperature", "nan"]),
        ({**asked(), "sampling": {"top_p": 1.5}}, "INVALID_ARGUMENT", ["top_p", "1.5"]),
        ({**asked(), "sampling": {"min_p": -0.5}}, "INVALID_ARGUMENT", ["min_p", "-0.5"]),
        ({**asked(), "decoding": {"repetition_penalty": -1.0}}, "INVALID_ARGUMENT", ["repetition_penalty"]),
        ({**asked(), "decoding": {"presence_penalty": 2.5}}, "INVALID_ARGUMENT", ["presence_penalty", "2.5"]),
        ({**asked(), "decoding": {"logit_bias": {1000000: 1.0}}}, "INVALID_ARGUMENT", ["logit_bias", "1000000"]),
        ({**asked(), "decoding": {"allowed_token_ids": [1000000]}}, "INVALID_ARGUMENT", ["allowed_token_ids"]),
        ({**asked(), "stopping": {"stop_token_ids": [1000000]}}, "INVALID_ARGUMENT", ["stop_token_ids", "1000000"]),
        ({**asked(), "stopping": {"stop_strings": [""]}}, "INVALID_ARGUMENT", ["stop"]),
        (
            {**asked(), "stopping": {"max_new_tokens": 2, "min_new_tokens": 5}},
            "INVALID_ARGUMENT",
            ["min_tokens is 5", "2"],
        ),
        ({**asked(), "truncate_prompt_tokens": 100000}, "INVALID_ARGUMENT", ["truncate_prompt_tokens", "100000"]),
        ({**asked(), "lora_name": "x"}, "FAILED_PRECONDITION", ["lora_name", "'x'"]),
        ({**asked(), "media": [{"url": "http://127.0.0.1/x.png"}]}, "UNIMPLEMENTED", ["media"]),
        ({**asked(), "kv": {"kv_transfer_params": {"a": 1}}}, "FAILED_PRECONDITION", ["kv_transfer_params"]),
        ({**asked(), "kv": {"ec_transfer_params": {"a": 1}}}, "UNIMPLEMENTED", ["ec_transfer_params"]),
        ({**asked(), "decoding": {"regex": "a"}}, "FAILED_PRECONDITION", ["regex", "companion"]),
        (
            asked(2, output_logprobs=True, output_candidates={"token_ids": {"ids": [5]}}),
            "UNIMPLEMENTED",
            ["response.output_candidates.token_ids"],
        ),
        (asked(2, output_logprobs=True, output_candidates={"top_n": 500}), "INVALID_ARGUMENT", ["logprobs", "500"]),
    ],
)
def test_what_cannot_be_is_refused_by_name(served: Served, fields: dict[str, Any], code: str, words: list[str]) -> None:
    text = refused(served, grpc.StatusCode[code], **fields)
    assert all(word in text for word in words), text


def test_a_live_duplicate_id_is_refused_and_an_abort_frees_it(served: Served) -> None:
    call = served.inference.GenerateStream(
        inference(**asked(1000, output_text=False, output_token_ids=True), request_id="twice"), timeout=LIMIT_S
    )
    next(call)
    with pytest.raises(grpc.RpcError) as error:
        served.inference.Generate(inference(**asked(2), request_id="twice"), timeout=LIMIT_S)
    assert error.value.code() is grpc.StatusCode.ALREADY_EXISTS
    served.control.Abort(control("Abort", request_ids=["twice", "unknown"]), timeout=5)
    *_, last = call
    info = last.outputs.finish_info
    assert info.finish_reason == ABORTED and not info.HasField("num_cached_prompt_tokens")
    served.inference.Generate(inference(**asked(2), request_id="twice"), timeout=LIMIT_S)


def test_a_client_that_resets_frees_the_engine(served: Served) -> None:
    served.wait_idle(10)
    call = served.inference.GenerateStream(inference(**asked(1000)), timeout=LIMIT_S)
    next(call)
    assert call.cancel()
    assert call.code() is grpc.StatusCode.CANCELLED
    served.wait_idle(2)


def test_streams_beside_each_other_keep_their_tokens(served: Served) -> None:
    """Plain, textual and stopped streams in the same steps, and SMG's contract beside them."""
    answers: dict[int, Any] = {}

    def ask(index: int) -> None:
        prompt = [index + 10, 20, 30]
        response = {"output_text": index % 2 == 1, "output_token_ids": True}
        answers[index] = joined(stream(served, **asked(60, prompt, **response)))

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(24)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + LIMIT_S
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    assert len(answers) == 24
    for index, answer in answers.items():
        assert list(answer.outputs.token_ids) == served.tokens([index + 10, 20, 30], 60)
