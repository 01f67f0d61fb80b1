"""What wedges or kills vLLM 0.32 when it reaches the engine: each row sent by a raw gRPC client, through the bridge, to the
real engine, which then serves a good request with the right tokens.

Rows that the contract has no words for (a type byte, a client index, a LoRA id, a value of the wrong type) are covered
where they would come from: the frames that the bridge sends, whatever a client asks for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
import msgpack
import msgspec
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from bridge.wire.model_folder import facts_from_folder
from tests.fuzz.captured import ABORT, ADD, SLOT, UTILITY, Captured
from tests.fuzz.cases import NEAR, VALID, batches
from tests.fuzz.client import Client
from tests.fuzz.encoding import data, float32, integer, packed, tag
from tests.fuzz.fields import Model, float32_after
from tests.running import Worker
from tests.wire.vllm.recorded import VECTORS, named

GENERATE, EMBED = "/vllm.grpc.engine.VllmEngine/Generate", "/vllm.grpc.engine.VllmEngine/Embed"
VOCAB_SIZE, MAX_MODEL_LEN = 49152, 1024
PROMPT = [504, 3575, 282, 4649, 314]
"""Any five tokens."""

TOKENIZED, TEXT, PARAMS, RANK = 2, 3, 4, 9
"""Field numbers of GenerateRequest."""

NUMBERS = {field.name: field.number for field in pb.SamplingParams.DESCRIPTOR.fields}

INVALID, FAILED, EXISTS = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.ALREADY_EXISTS,
)


def prompt(*ids: int) -> bytes:
    return data(TOKENIZED, packed(2, [*ids]))


def params(*fields: bytes) -> bytes:
    """Sampling values behind those that every row has: greedy, three tokens. The last value of a field wins."""
    return data(PARAMS, float32(1, 0.0) + integer(8, 3) + b"".join(fields))


def real(name: str, value: float) -> bytes:
    return params(float32(NUMBERS[name], value))


def whole(name: str, value: int) -> bytes:
    return params(integer(NUMBERS[name], value))


def text(name: str, value: str) -> bytes:
    return params(data(NUMBERS[name], value.encode()))


def bias(token: int, value: float) -> bytes:
    return params(data(NUMBERS["logit_bias"], integer(1, token) + float32(2, value)))


Answer = list[pb.GenerateComplete]


@dataclass(frozen=True)
class Row:
    """A request; the status and a word of its refusal, or what its answer must be like."""

    name: str
    body: bytes
    status: grpc.StatusCode | None = None
    word: str = ""
    answer: Callable[[Answer], bool] = lambda completes: len(completes) == 1
    path: str = GENERATE


FIVE = prompt(*PROMPT)
NEARLY_FULL = prompt(*[504] * (MAX_MODEL_LEN - 4))
JUST_ABOVE_2 = float32_after(2.0, math.inf)
JUST_ABOVE_1 = float32_after(1.0, math.inf)


def refused(field: str, *bodies: tuple[str, bytes]) -> list[Row]:
    return [Row(f"{field} {name}", FIVE + body, INVALID, field) for name, body in bodies]


def floats(field: str, *values: float) -> list[Row]:
    return refused(field, *((f"{value:.9g}", real(field, value)) for value in values))


DECODER_RAISES = [
    *floats("temperature", -1.0, -1e-45, JUST_ABOVE_2, math.nan, math.inf, -math.inf),
    *floats("top_p", -0.5, JUST_ABOVE_1, math.nan, math.inf),
    *floats("min_p", -0.1, JUST_ABOVE_1, math.nan),
    *floats("frequency_penalty", JUST_ABOVE_2, -JUST_ABOVE_2, math.nan),
    *floats("presence_penalty", JUST_ABOVE_2, -JUST_ABOVE_2, math.inf),
    *floats("repetition_penalty", -1.0, math.nan, math.inf),
    *refused("n", ("2, greedy", whole("n", 2)), ("above vLLM's", whole("n", 16385)), ("-1", whole("n", -1))),
    *refused("max_tokens", ("0", whole("max_tokens", 0))),
    *refused("min_tokens", ("above max_tokens", whole("min_tokens", 4)), ("-1", whole("min_tokens", -1))),
    *refused("logprobs", ("-2", whole("logprobs", -2)), ("21", whole("logprobs", 21)), ("all", whole("logprobs", -1))),
    *refused("prompt_logprobs", ("-2", whole("prompt_logprobs", -2)), ("21", whole("prompt_logprobs", 21))),
    *refused("stop", ("with an empty string", text("stop", "end") + text("stop", ""))),
    Row("top_p unset", FIVE + params()),
    Row("top_p, repetition_penalty and n sent as 0", FIVE + params(float32(2, 0.0), float32(7, 0.0), integer(15, 0))),
    Row("top_k -2, which an unsigned field reads as 4294967294", FIVE + whole("top_k", -2)),
    Row("temperature of another wire type", FIVE + params(integer(1, 7))),
    Row("an unknown sampling key", FIVE + params(integer(999, 7), data(1000, b"x"))),
    Row("a stop string, for an engine that is told not to detokenize", FIVE + text("stop", "qqqq")),
    Row("a pooling request", FIVE, FAILED, "does not embed", path=EMBED),
]
"""Ends the engine's input thread in silence: every later request hangs for ever."""

KILLS = [
    Row("a prompt as long as the model", prompt(*[5] * MAX_MODEL_LEN) + params(), INVALID, "input_ids"),
    Row("a prompt longer than the model", prompt(*[5] * (MAX_MODEL_LEN + 1)) + params(), INVALID, "input_ids"),
    Row("a prompt of 100,000 tokens", prompt(*[5] * 100_000) + params(), INVALID, "input_ids"),
    Row("a text longer than the model", data(TEXT, b"word " * 20_000) + params(), INVALID, ""),
    Row("no input", params(), INVALID, "input"),
    Row("an empty prompt", data(TOKENIZED, b"") + params(), INVALID, "input_ids"),
    Row("an empty text", data(TEXT, b"") + params(), INVALID, "input"),
    Row("a text and then an empty prompt", data(TEXT, b"x") + data(TOKENIZED, b"") + params(), INVALID, "input_ids"),
    *(
        Row(f"the token id {token}", prompt(5, token, 6) + params(), INVALID, "input_ids[1]")
        for token in (VOCAB_SIZE, VOCAB_SIZE + 1, 2**31 - 1, 2**32 - 1, -1, -(2**31))
    ),
    Row(
        "a bad id in a second tokenized, which protobuf merges",
        FIVE + prompt(VOCAB_SIZE) + params(),
        INVALID,
        "input_ids",
    ),
    Row("a token id of 64 bits, of which protobuf reads the low 32", prompt(5, 2**32 + 6) + params()),
    *refused("logit_bias", *((f"of {token}", bias(token, 1.0)) for token in (VOCAB_SIZE, 2**31 - 1, -1))),
    *refused("logit_bias", *((f"{value}", bias(5, value)) for value in (math.nan, math.inf))),
    *refused(
        "stop_token_ids",
        *((f"{token}", params(packed(11, [5, token]))) for token in (VOCAB_SIZE, 2**32 - 1, -1)),
    ),
    Row("a bias, with min_tokens", FIVE + params(data(26, integer(1, 5) + float32(2, 100.0)), integer(9, 2))),
]
"""Ends the engine for everybody."""

HARMLESS = [
    Row(
        "max_tokens unset",
        NEARLY_FULL + data(PARAMS, float32(1, 0.0) + integer(14, 1)),
        answer=lambda completes: [len(one.output_ids) for one in completes] == [4],
    ),
    Row(
        "max_tokens beyond the context",
        NEARLY_FULL + params(integer(8, 2**32 - 1), integer(14, 1)),
        answer=lambda completes: [len(one.output_ids) for one in completes] == [4],
    ),
    Row("no sampling_params", prompt(*[504] * (MAX_MODEL_LEN - 1))),
    Row(
        "n 2",
        FIVE + params(float32(1, 1.0), integer(15, 2)),
        answer=lambda completes: sorted(one.index for one in completes) == [0, 1],
    ),
    Row("data_parallel_rank 0", FIVE + params() + integer(RANK, 0)),
    Row("data_parallel_rank 7", FIVE + params() + integer(RANK, 7), INVALID, "data_parallel_rank"),
    Row("data_parallel_rank -1", FIVE + params() + integer(RANK, -1), INVALID, "data_parallel_rank"),
]
"""Ignored by the engine or an error of the one request: what the contract says must happen nevertheless."""

CONSTRAINTS = [
    *refused("json_object", ("false", whole("json_object", 0))),
    *refused("choice", ("of nothing", text("choice", ""))),
    *refused("json_schema", ("empty", text("json_schema", "")), ("no JSON", text("json_schema", "{"))),
    *refused("regex", ("with NUL", text("regex", "a\0")), ("unclosed", text("regex", "("))),
    *refused("grammar", ("empty", text("grammar", " "))),
    *refused("structural_tag", ("empty", text("structural_tag", ""))),
    Row("two constraints, of which the last counts", FIVE + text("json_schema", "{") + text("regex", "[0-9]")),
    Row("a constraint", FIVE + text("regex", "[0-9]")),
]
"""None or two of them wedge, one without a backend is an error of the request. A worker that enforces none may say so."""


class Raw:
    """A gRPC client that knows no message class on its way out."""

    def __init__(self, worker: Worker) -> None:
        self._channel = worker.channel
        self.good = self.tokens()

    def send(self, body: bytes, path: str = GENERATE) -> list[bytes]:
        call = self._channel.unary_stream(path, request_serializer=None, response_deserializer=None)
        return list(call(body, timeout=60))

    def completes(self, body: bytes) -> Answer:
        replies = [pb.GenerateResponse.FromString(reply) for reply in self.send(body)]
        return [reply.complete for reply in replies if reply.HasField("complete")]

    def tokens(self) -> list[int]:
        """What the engine answers to a good request."""
        return list(self.completes(FIVE + params(integer(8, 4)))[0].output_ids)


@pytest.fixture(scope="module")
def raw(served: Worker) -> Raw:
    return Raw(served)


@pytest.mark.parametrize("row", [*DECODER_RAISES, *KILLS, *HARMLESS], ids=lambda row: row.name)
def test_a_row_is_refused_or_handled_and_the_engine_serves_the_next_request(raw: Raw, row: Row) -> None:
    if row.status is None:
        completes = raw.completes(row.body)
        assert row.answer(completes), completes
        assert all(one.finish_reason in ("stop", "length") for one in completes)
    else:
        with pytest.raises(grpc.RpcError) as error:
            raw.send(row.body, row.path)
        assert error.value.code() is row.status, error.value.details()
        assert row.word in error.value.details()
    assert raw.tokens() == raw.good


@pytest.mark.parametrize("row", CONSTRAINTS, ids=lambda row: row.name)
def test_a_constraint_is_refused_or_enforced_and_the_engine_serves_the_next_request(raw: Raw, row: Row) -> None:
    try:
        completes = raw.completes(row.body)
    except grpc.RpcError as error:
        assert error.code() in (row.status or FAILED, FAILED), error.details()
        assert row.word in error.details()
    else:
        assert row.status is None, "an unusable constraint was accepted"
        assert len(completes) == 1
    assert raw.tokens() == raw.good


def test_a_live_duplicate_id_is_refused_and_the_first_request_goes_on(served: Worker, raw: Raw) -> None:
    """Two requests with one id kill the engine; ids on the wire are the bridge's own, and clients' must differ."""
    body = data(1, b"twin") + FIVE + params(integer(8, 200), integer(14, 1))
    first = served.stub.Generate(pb.GenerateRequest.FromString(body + integer(5, 1)), timeout=60)
    next(first)
    with pytest.raises(grpc.RpcError) as error:
        raw.send(body)
    assert error.value.code() is EXISTS and "twin" in error.value.details()
    *_, last = first
    assert len(last.complete.output_ids) == 200
    assert len(raw.completes(data(1, b"twin") + FIVE + params())) == 1, "an id may be used again"
    assert raw.tokens() == raw.good


def test_an_abort_of_ids_that_nobody_has_does_nothing(served: Worker, raw: Raw) -> None:
    served.stub.Abort(pb.AbortRequest(request_ids=["", "nobody", "0.1.1", "1.1.1", "x" * 1000]), timeout=5)
    assert raw.tokens() == raw.good


def test_a_request_cut_off_in_its_middle_is_refused(raw: Raw) -> None:
    for body in (FIVE[:-1], FIVE + tag(PARAMS, 2) + b"\xff", FIVE + tag(1000, 6)):
        with pytest.raises(grpc.RpcError) as error:
            raw.send(body)
        assert error.value.code() is grpc.StatusCode.INTERNAL
    assert raw.tokens() == raw.good


async def test_what_the_contract_cannot_say_is_never_sent(smollm2: Path) -> None:
    """No frame has a type byte, client index, request id, LoRA id, pooling task, sampling key or null that wedges or kills.

    Whatever valid and near-valid requests hold, the message is one of three types, names this front end's slot and a
    new id, and its sampling parameters are a map of keys that vLLM declares, with `max_tokens` in it.
    """
    facts = facts_from_folder(smollm2, engine="vllm", engine_version="0.32.0", served_model_name="m")
    facts = msgspec.structs.replace(facts, max_model_len=MAX_MODEL_LEN)
    declared = VECTORS["0.32.0"]
    with TemporaryDirectory(prefix="kill-") as folder:
        async with Captured(Path(folder), facts) as captured:
            client = Client("127.0.0.1", captured.port)
            model = Model(vocab_size=facts.vocab_size, max_model_len=facts.max_model_len)
            for batch in batches(9, 600, 100, (VALID, NEAR), model):
                for case in batch:
                    await client.call(case)
            client.close()
            messages = list(captured.peer.messages)
    assert {frames[0] for frames in messages} <= {ADD, ABORT, UTILITY}
    adds = [msgpack.unpackb(frames[1], strict_map_key=False) for frames in messages if frames[0] == ADD]
    assert len(adds) > 200
    requests = [named(declared["declared"]["EngineCoreRequest"], add) for add in adds]
    assert len({request["request_id"] for request in requests}) == len(requests)
    for request in requests:
        sampling = request["sampling_params"]
        assert request["client_index"] == SLOT
        assert (request["pooling_params"], request["lora_request"], request["data_parallel_rank"]) == (None, None, None)
        assert all(0 <= token < VOCAB_SIZE for token in request["prompt_token_ids"])
        assert 0 < len(request["prompt_token_ids"]) < MAX_MODEL_LEN
        assert sampling.keys() <= set(declared["maps"]["SamplingParams"])
        assert not {"n", "stop", "bad_words"} & sampling.keys()
        assert 1 <= sampling["max_tokens"] <= MAX_MODEL_LEN - len(request["prompt_token_ids"])
        assert sampling["detokenize"] is False
        assert "structured_outputs" not in sampling or sampling["structured_outputs"]["_backend"]
