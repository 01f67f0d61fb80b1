"""A run against a worker: batches of cases, and after each a good request, whose tokens were recorded at the start."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from tests.fuzz import answers, poison
from tests.fuzz.cases import VALID, Case, batches
from tests.fuzz.client import Answer, Client
from tests.fuzz.fields import Model
from tests.fuzz.make import GENERATE
from tests.fuzz.report import Report, Surprise

BATCH = 50
AT_ONCE = 16
GOOD_S = 30.0
"""A good request that takes longer was not answered: the engine is wedged."""

GOOD_TOKENS = 8
MAX_OUTPUT = 6
"""Output tokens of a valid request, so that a run takes minutes on a CPU."""


class Wedged(Exception):
    """The worker no longer answers good requests well."""


class Live:
    """One run against the worker at `host`:`port`, whose engine lacks the fields (`Message.field`) of `without`."""

    def __init__(self, host: str, port: int, without: Iterable[str] = ()) -> None:
        self._without = frozenset(without)
        self._client = Client(host, port)
        self.report = Report()
        self._good_tokens: list[int] = []

    async def run(self, seed: int, count: int, kinds: Sequence[str], only: int | None = None) -> Report:
        """Send `count` cases; stops early, with a surprise, when the worker fails a good request.

        With `only`, sends nothing but the batch that holds this case.
        """
        started = time.monotonic()
        try:
            model = await self.model()
            self._good_tokens = await self._good()
            for batch in batches(seed, count, BATCH, kinds, model):
                if only is None or only in range(batch[0].number, batch[-1].number + 1):
                    await self._batch(batch)
            await self._idle()
        except (Wedged, OSError) as error:
            self.report.surprises.append(Surprise(str(error)))
        self.report.notes.append(f"{sum(self.report.counts.values())} requests in {time.monotonic() - started:.0f} s")
        self._client.close()
        return self.report

    async def model(self) -> Model:
        """What the worker says of its model; raises `Wedged` when it says nothing."""
        info, server = pb.GetModelInfoResponse(), pb.GetServerInfoResponse()
        for method, reply in (("GetModelInfo", info), ("GetServerInfo", server)):
            answer = await self._ask(method, b"")
            if not answer.messages:
                raise Wedged(f"{method}: {answer.how} {answer.status} {answer.text}")
            reply.ParseFromString(answer.messages[0])
        return Model(
            vocab_size=info.vocab_size,
            max_model_len=info.max_context_length,
            ranks=server.data_parallel_size,
            max_output=MAX_OUTPUT,
            max_prompt=min(64, info.max_context_length // 2),
            without=self._without,
        )

    async def _batch(self, batch: list[Case]) -> None:
        turns = asyncio.Semaphore(AT_ONCE)

        async def one(case: Case) -> None:
            async with turns:
                answer = await self._client.call(case)
            self.report.add(case, answers.outcome(case, answer), answers.surprise(case, answer))

        await asyncio.gather(*map(one, batch))
        tokens = await self._good()
        if tokens != self._good_tokens:
            raise Wedged(f"after {_span(batch)} the good request got {tokens}, before {self._good_tokens}")

    async def _good(self) -> list[int]:
        """The tokens of the good request; raises `Wedged` when it gets none."""
        params = pb.SamplingParams(temperature=0.0, max_tokens=GOOD_TOKENS, ignore_eos=True)
        request = pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[5, 6, 7, 8]), sampling_params=params)
        answer = await self._ask(GENERATE, request.SerializeToString())
        if answer.status != 0 or not answer.messages:
            raise Wedged(f"the good request ended with {answer.how} {answer.status} {answer.text}")
        return list(pb.GenerateResponse.FromString(answer.messages[-1]).complete.output_ids)

    async def _idle(self) -> None:
        """No request is left in the front end or the engine."""
        server, loads = pb.GetServerInfoResponse(), pb.GetLoadsResponse()
        until = time.monotonic() + 10
        while True:
            for method, reply in (("GetServerInfo", server), ("GetLoads", loads)):
                reply.ParseFromString((await self._ask(method, b"")).messages[0])
            left = server.active_requests + sum(one.num_running_reqs + one.num_waiting_reqs for one in loads.loads)
            if not left:
                return
            if time.monotonic() > until:
                raise Wedged(f"{server.active_requests} requests are left in the front end, loads {loads.loads}")
            await asyncio.sleep(0.05)

    async def _ask(self, method: str, message: bytes) -> Answer:
        case = Case(number=-1, kind=VALID, name="good", method=method, body=poison.framed(message), message=message)
        return await self._client.call(case, GOOD_S)


def _span(batch: Sequence[Case]) -> str:
    return f"the {batch[0].kind} cases {batch[0].number} to {batch[-1].number}"
