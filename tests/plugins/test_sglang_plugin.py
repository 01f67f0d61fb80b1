"""The parts of SGLang's plugin that need no SGLang: inert unless asked, checks of what a request holds, slim messages."""

from __future__ import annotations

import subprocess
import sys
from array import array
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from bridge.plugins.sglang import slim
from bridge.plugins.sglang.entry import HANDSHAKE_ENV, PLUGIN_NAME
from bridge.plugins.sglang.guarded import Limits, Refused, check_embed, check_generate
from bridge.plugins.sglang.lane import Lane, Route, scheduler_id
from bridge.plugins.sglang.slim import Tail


def test_the_entry_point_is_installed_and_does_nothing_unless_asked() -> None:
    (point,) = (one for one in entry_points(group="sglang.srt.plugins") if one.name == PLUGIN_NAME)
    code = (
        "import sys\n"
        "from importlib.metadata import entry_points\n"
        f"[p] = [p for p in entry_points(group='sglang.srt.plugins') if p.name == {point.name!r}]\n"
        "p.load()()\n"
        "print([name for name in sys.modules if name.startswith(('sglang', 'zmq', 'msgspec', 'bridge.wire'))])\n"
    )
    environment = {"PATH": "/usr/bin", HANDSHAKE_ENV: ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(("shorter", "longer"), [("1.5.1", "1.5.12"), ("", "1"), ("a", "a:b"), ("1:", "1:2")])
def test_no_request_has_an_id_that_begins_anothers(shorter: str, longer: str) -> None:
    assert not scheduler_id(longer).startswith(scheduler_id(shorter))
    assert not scheduler_id(shorter).startswith("HEALTH_CHECK")


@dataclass
class Params:
    """What the checks touch of SGLang's SamplingParams."""

    n: int = 1
    is_normalized: bool = False
    max_new_tokens: int | None = 8
    repetition_penalty: float = 1.0
    logit_bias: dict[str, float] | None = None
    problem: str = ""

    def normalize(self, tokenizer: Any) -> None:
        self.is_normalized = True

    def verify(self, vocab_size: int) -> None:
        if self.problem:
            raise ValueError(self.problem)


@dataclass
class Request:
    """What the checks touch of SGLang's request structs."""

    input_ids: Any = field(default_factory=lambda: array("q", [1, 2, 3]))
    sampling_params: Params = field(default_factory=Params)
    top_logprobs_num: int = 0
    logprob_start_len: int = -1
    token_ids_logprob: list[int] | None = None
    return_hidden_states: Any = False
    custom_logit_processor: str | None = None
    mm_inputs: Any = None
    lora_id: str | None = None
    dimensions: int | None = None


def limits(**more: Any) -> Limits:
    values: dict[str, Any] = {
        "vocab_size": 100,
        "is_generation": True,
        "is_multimodal": False,
        "hidden_states": "",
        "custom_logit_processors": None,
        "loras": None,
        "embedding_dimensions": None,
        "hidden_size": 64,
    }
    return Limits(**{**values, **more})


def test_a_plain_request_passes_normalized() -> None:
    request = Request()
    check_generate(request, limits(), None)
    assert request.sampling_params.is_normalized


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (Request(input_ids=array("q")), "input_ids is empty"),
        (Request(input_ids=None), "input_ids is empty"),
        (Request(input_ids=array("q", [1] * 500 + [100])), "input_ids has 100; token ids go from 0 to 99"),
        (Request(input_ids=array("q", [-4] + [1] * 500)), "input_ids has -4"),
        (Request(sampling_params=Params(n=3)), "n is 3"),
        (Request(sampling_params=Params(problem="top_p must be")), "top_p must be"),
        (Request(sampling_params=Params(repetition_penalty=1e-9)), "repetition_penalty is 1e-09"),
        (Request(top_logprobs_num=101), "top_logprobs_num is 101"),
        (Request(logprob_start_len=-2), "logprob_start_len is -2"),
        (Request(token_ids_logprob=[100]), "token_ids_logprob has 100"),
        (Request(return_hidden_states=True), "--enable-return-hidden-states"),
        (Request(custom_logit_processor="{}"), "--enable-custom-logit-processor"),
        (Request(mm_inputs=object()), "text only"),
        (Request(lora_id="x"), "adapters: none is loaded"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_scheduler_would_die_of_or_drop_is_refused_by_name(request_: Request, text: str) -> None:
    with pytest.raises(Refused, match=text.replace("(", "\\(")):
        check_generate(request_, limits(), None)


def test_a_bias_that_would_overflow_the_logits_is_cut_to_one_that_means_the_same() -> None:
    request = Request(sampling_params=Params(logit_bias={"5": 1e30, "6": -1e30, "7": 2.0}))
    check_generate(request, limits(), None)
    assert request.sampling_params.logit_bias == {"5": 1e4, "6": -1e4, "7": 2.0}


def test_an_adapter_is_known_by_its_name_and_by_its_id() -> None:
    known = limits(loras=lambda: {"sql": "0af3", "0af3": "0af3"})
    for given in ("sql", "0af3"):
        request = Request(lora_id=given)
        check_generate(request, known, None)
        assert request.lora_id == "0af3"
    with pytest.raises(Refused, match="adapters: 0af3, sql"):
        check_generate(Request(lora_id="other"), known, None)


def test_hidden_states_up_to_what_the_engine_returns() -> None:
    check_generate(Request(return_hidden_states="last"), limits(hidden_states="last"), None)
    check_generate(Request(return_hidden_states=True), limits(hidden_states="full"), None)
    with pytest.raises(Refused, match="mode last"):
        check_generate(Request(return_hidden_states=True), limits(hidden_states="last"), None)


def test_a_processor_that_does_not_load_is_refused() -> None:
    def load(text: str) -> None:
        raise ValueError("no callable")

    with pytest.raises(Refused, match="does not load: no callable"):
        check_generate(Request(custom_logit_processor="{}"), limits(custom_logit_processors=load), None)


def test_embeddings_have_the_sizes_the_model_knows() -> None:
    embedder = limits(is_generation=False, embedding_dimensions=(16, 32))
    request = Request(dimensions=32)
    check_embed(request, embedder, None)
    assert request.sampling_params.max_new_tokens == 0
    with pytest.raises(Refused, match="possible are 16, 32"):
        check_embed(Request(dimensions=20), embedder, None)
    with pytest.raises(Refused, match="--is-embedding"):
        check_embed(Request(), limits(), None)


def output(rids: list[str], finished: list[Any], **more: Any) -> SimpleNamespace:
    """A BatchTokenIDOutput as the scheduler fills it when nobody asks for more."""
    count = len(rids)
    values: dict[str, Any] = {
        "rids": rids,
        "output_ids": [array("q", [7])] * count,
        "finished_reasons": finished,
        **{name: [1] * count for name in ("prompt_tokens", "completion_tokens", "cached_tokens")},
        "reasoning_tokens": [0] * count,
        **dict.fromkeys(("output_token_logprobs_val", "output_token_logprobs_idx")),
        **dict.fromkeys(("output_top_logprobs_val", "output_top_logprobs_idx")),
        **dict.fromkeys(("input_token_logprobs_val", "input_token_logprobs_idx")),
        **dict.fromkeys(("input_top_logprobs_val", "input_top_logprobs_idx")),
        **dict.fromkeys(("output_token_ids_logprobs_val", "output_token_ids_logprobs_idx", "output_hidden_states")),
    }
    values.update(more)
    return SimpleNamespace(**values)


def test_a_multi_token_stop_names_no_single_one() -> None:
    batch = output(["a", "b"], [{"type": "stop", "matched": [1, 2]}, {"type": "stop", "matched": "end"}])
    message = msgspec.msgpack.decode(slim.token_batch(batch, ["a", "b"], None, Tail(), None))
    assert message[3] == ["stop", "stop"] and message[5] == [None, "end"]
    assert len(message) == slim.FIRST_OPTIONAL


def test_an_abort_carries_its_status_and_kind() -> None:
    finish = {"type": "abort", "message": "no", "status_code": 500, "err_type": "GrammarRejectedToken"}
    message = msgspec.msgpack.decode(slim.token_batch(output(["a"], [finish]), ["a"], None, Tail(3), None))
    assert (message[3], message[4], message[11], message[16], message[26]) == (
        ["abort"],
        ["no"],
        3,
        [500],
        ["GrammarRejectedToken"],
    )
    ours = msgspec.msgpack.decode(slim.terminal("a", "no", 500, "GrammarRejectedToken", Tail(3)))
    assert (ours[3], ours[4], ours[11], ours[16], ours[26]) == (
        ["abort"],
        ["no"],
        3,
        [500],
        ["GrammarRejectedToken"],
    )


class Pipe:
    """Stands where an output socket does, and keeps what is sent."""

    def __init__(self) -> None:
        self.messages: list[list[Any]] = []

    def send(self, message: bytes, flags: int) -> None:
        self.messages.append(msgspec.msgpack.decode(message))


class BatchTokenIDOutput(SimpleNamespace):
    """The lane tells the scheduler's structs by their names."""


def lane_with(*rids: str) -> tuple[Lane, list[Pipe]]:
    """A lane of two slots with these requests running, the first on slot 0, the others on slot 1."""
    lane, pipes = Lane(), [Pipe(), Pipe()]
    lane._outputs = pipes  # type: ignore[assignment]
    lane._load = lambda: SimpleNamespace(
        num_running_reqs=2, num_waiting_reqs=0, num_used_tokens=9, max_total_num_tokens=99
    )
    lane._routes = {scheduler_id(rid): Route(rid, min(index, 1), None) for index, rid in enumerate(rids)}
    return lane, pipes


def test_a_batch_is_split_by_slot_and_strangers_are_left_out() -> None:
    lane, pipes = lane_with("a", "b", "c")
    names = [scheduler_id(rid) for rid in ("b", "x", "a", "c")]
    lane.send_output(BatchTokenIDOutput(**vars(output(names, [None, None, {"type": "length"}, None]))))
    assert [message[1] for message in pipes[0].messages] == [["a"]]
    assert [message[1] for message in pipes[1].messages] == [["b", "c"]]
    assert set(lane._routes) == {scheduler_id("b"), scheduler_id("c")}
    assert pipes[0].messages[0][12:16] == [2, 0, 9, 99]


def test_an_output_that_cannot_be_told_ends_its_requests_on_both_sides(caplog: pytest.LogCaptureFixture) -> None:
    lane, pipes = lane_with("a")
    name = scheduler_id("a")
    lane.send_output(BatchTokenIDOutput(**vars(output([name], [None], output_ids=[object()]))))
    (message,) = pipes[0].messages
    assert (message[1], message[3], message[16]) == (["a"], ["abort"], [500])
    assert list(lane._doomed) == [name] and not lane._routes
    assert "cannot be told" in caplog.text
