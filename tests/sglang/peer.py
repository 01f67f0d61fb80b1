"""A front end in miniature for SGLang's lane, with no code of ours behind the handshake: it binds, launches, asks, reads.

Requests are written from the layouts that the rank declares, answers are read as the plain arrays they are.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import zmq

from bridge.wire.handshake import Handshake, HandshakeServer, identity_of
from tests.running import Running
from tests.sglang.engines import ENVIRONMENT, headless

DEATH = b"ENGINE_CORE_DEAD"
START_LIMIT_S = 180.0

COLUMNS = (
    *("rids", "output_ids", "finished_reasons", "finished_messages", "finished_matched"),
    *("prompt_tokens", "completion_tokens", "cached_tokens"),
    *("output_token_logprobs_val", "output_token_logprobs_idx"),
    *("engine_index", "num_running", "num_waiting", "kv_used_tokens", "kv_total_tokens"),
    *("finished_status", "output_top_logprobs_val", "output_top_logprobs_idx", "reasoning_tokens"),
    *("input_token_logprobs_val", "input_token_logprobs_idx", "input_top_logprobs_val", "input_top_logprobs_idx"),
    *("output_token_ids_logprobs_val", "output_token_ids_logprobs_idx", "finished_err_types", "output_hidden_states"),
)
EMBEDDING_COLUMNS = (
    *("rids", "embeddings", "prompt_tokens", "cached_tokens"),
    *("finished_reasons", "finished_messages", "finished_status"),
    *("engine_index", "num_running", "num_waiting", "kv_used_tokens", "kv_total_tokens"),
)
REPLY_COLUMNS = ("call_id", "success", "message", "engine_index")
STRUCTS = {
    "BatchTokenIDSlimOutput": COLUMNS,
    "BatchEmbeddingSlimOutput": EMBEDDING_COLUMNS,
    "ControlReplySlim": REPLY_COLUMNS,
}
PER_BATCH = {"engine_index", "num_running", "num_waiting", "kv_used_tokens", "kv_total_tokens"}

GENERATE: dict[str, Any] = {
    **dict.fromkeys(("return_logprob", "stream"), False),
    "logprob_start_len": -1,
    "top_logprobs_num": 0,
    **dict.fromkeys(("return_sampling_mask", "return_flat_raw_top_logprobs", "return_hidden_states"), False),
    "return_routed_experts": False,
    "routed_experts_start_len": 0,
    "return_indexer_topk": False,
    **dict.fromkeys(("require_reasoning", "no_logs", "return_bytes", "return_entropy"), False),
}
SAMPLING: dict[str, Any] = {
    "max_new_tokens": 8,
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "min_new_tokens": 0,
    "n": 1,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "no_stop_trim": False,
}
"""What stands before the last field that is set, where it may not be nil."""


@dataclass
class Message:
    """One message of the engine: its kind and its columns by name."""

    kind: str
    columns: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.columns.get(name)


@dataclass
class Answer:
    """All that came of one request."""

    tokens: list[int] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    reason: str = ""

    @property
    def last(self) -> dict[str, Any]:
        return self.rows[-1]

    def joined(self, name: str) -> list[Any]:
        """A column that adds rows with every message."""
        return [one for row in self.rows for one in row.get(name) or ()]


class Peer:
    """Use as a context manager: `up` starts the engine and waits for its ranks."""

    def __init__(self, folder: Path, slots: int = 1, ranks: int = 1) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.inputs = [self._bind(zmq.ROUTER, f"ipc://{folder}/in{index}") for index in range(slots)]
        self.outputs = [self._bind(zmq.PULL, f"ipc://{folder}/out{index}") for index in range(slots)]
        self._folder = folder
        self.server = HandshakeServer(self._context, "tcp://127.0.0.1:*")
        self._handshake = Handshake(
            inputs=[f"ipc://{folder}/in{index}" for index in range(slots)],
            outputs=[f"ipc://{folder}/out{index}" for index in range(slots)],
            rank_count=ranks,
        )
        self.engine: Running | None = None
        self.ready: dict[int, dict[str, Any]] = {}

    def _bind(self, kind: int, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        if kind == zmq.ROUTER:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.bind(address)
        return socket

    def up(self, python: Path, model: Path, *flags: str, environment: Mapping[str, str] | None = None) -> Peer:
        command = headless(python, self.server.address, model, *flags)
        self.engine = Running(command, self._folder / "engine.log", {**ENVIRONMENT, **(environment or {})})
        until = time.monotonic() + START_LIMIT_S
        while not self._handshake.done or len(self.ready) < len(self._handshake.ranks):
            self.engine.must_run("starting")
            assert time.monotonic() < until, self.engine.output()[-4000:]
            while (received := self.server.receive()) is not None:
                for identity, payload in self._handshake.receive(*received):
                    self.server.send(identity, payload)
            for slot, socket in enumerate(self.inputs):
                while socket.poll(10):
                    identity, payload = socket.recv_multipart()
                    if slot == 0:
                        self._handshake.receive_ready_map(identity, payload)
                        self.ready[int.from_bytes(identity, "little")] = msgspec.msgpack.decode(payload)
        return self

    # -- asking ------------------------------------------------------------------------------------------------------

    def generate(
        self,
        rid: str,
        ids: Sequence[int],
        sampling: dict[str, Any] | None = None,
        *,
        slot: int = 0,
        rank: int = 0,
        metadata: bytes | None = None,
        **more: Any,
    ) -> None:
        """A generation; `more` are fields of the engine's request struct."""
        params = self.sampling(sampling or {})
        given = {"rid": rid, "input_ids": list(ids), "sampling_params": params, "stream": True, **more}
        fields = ["TokenizedGenerateReqInput", *self._array("TokenizedGenerateReqInput", given, GENERATE)]
        behind = [] if metadata is None else [metadata]
        self.send(b"\x00", msgspec.msgpack.encode(fields), *behind, slot=slot, rank=rank)

    def embed(self, rid: str, ids: Sequence[int], **more: Any) -> None:
        params = self.sampling({})
        given = {"rid": rid, "input_ids": list(ids), "sampling_params": params, **more}
        fields = ["TokenizedEmbeddingReqInput", *self._array("TokenizedEmbeddingReqInput", given, {})]
        self.send(b"\x00", msgspec.msgpack.encode(fields))

    def abort(self, *rids: str, slot: int = 0, rank: int = 0) -> None:
        self.send(b"\x01", msgspec.msgpack.encode(list(rids)), slot=slot, rank=rank)

    def control(self, call_id: int, method: str, *args: Any, slot: int = 0) -> Message:
        """A control call and its answer."""
        self.send(b"\x02", msgspec.msgpack.encode([call_id, method, list(args)]), slot=slot)
        for message in self.messages(slot):
            if message.kind == "ControlReplySlim":
                return message
        raise AssertionError("no reply")

    def send(self, *frames: bytes, slot: int = 0, rank: int = 0) -> None:
        self.inputs[slot].send_multipart([identity_of(rank), *frames])

    def sampling(self, given: dict[str, Any]) -> list[Any]:
        """SamplingParams up to the last field that is given."""
        return self._array("SamplingParams", given, SAMPLING)

    def _array(self, struct: str, given: dict[str, Any], defaults: dict[str, Any]) -> list[Any]:
        layout: list[str] = self.ready[0]["positional_layouts"][struct]
        values = {**defaults, **given}
        unknown = set(given) - set(layout)
        assert not unknown, f"{struct} has no {unknown}"
        last = max(layout.index(name) for name in values if name in layout)
        return [values.get(name) for name in layout[: last + 1]]

    # -- reading -----------------------------------------------------------------------------------------------------

    def messages(self, slot: int = 0, timeout: float = 20.0) -> Iterator[Message]:
        """What comes, until `timeout` seconds without anything; the death frame is a message of kind "death"."""
        socket = self.outputs[slot]
        while socket.poll(int(timeout * 1000)):
            payload = socket.recv()
            if payload == DEATH:
                yield Message("death", {})
                continue
            kind, *values = msgspec.msgpack.decode(payload)
            yield Message(kind, dict(zip(STRUCTS[kind], values, strict=False)))

    def answers(self, *rids: str, slot: int = 0, timeout: float = 20.0) -> dict[str, Answer]:
        """Everything that comes for these requests until each has ended."""
        found = {rid: Answer() for rid in rids}
        for message in self.messages(slot, timeout):
            assert message.kind != "death", "the engine died"
            for row, rid in enumerate(message["rids"] or ()):
                if rid not in found:
                    continue
                answer = found[rid]
                columns = message.columns.items()
                answer.rows.append({name: v if name in PER_BATCH or v is None else v[row] for name, v in columns})
                answer.tokens += answer.last.get("output_ids") or []
                answer.reason = answer.last["finished_reasons"]
            if all(answer.reason for answer in found.values()):
                return found
        raise AssertionError(f"did not end: {[rid for rid, answer in found.items() if not answer.reason]}")

    def ask(self, rid: str, ids: Sequence[int], sampling: dict[str, Any] | None = None, **more: Any) -> Answer:
        self.generate(rid, ids, sampling, **more)
        return self.answers(rid, slot=more.get("slot", 0))[rid]

    # -- the end -----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.engine is not None:
            self.engine.stop()
        self.server.close()
        self._context.destroy(linger=0)
