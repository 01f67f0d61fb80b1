"""GetLoads of `sglang.grpc.scheduler`: one rank's figures, the sections that were asked for, and their sums."""

from __future__ import annotations

from collections.abc import Sequence

from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb

from bridge.engine import RankView
from bridge.refusal import invalid
from bridge.requests import RequestTable

SECTIONS = ("core", "memory", "spec", "lora", "disagg", "queues", "all")
"""Core is always there. The lane tells nothing of speculative decoding and adapters, so their sections stay unset."""


def sections_of(include: Sequence[str]) -> frozenset[str]:
    """The sections to fill, all of them when none is named; raises `Refusal` for one that does not exist."""
    for section in include:
        if section not in SECTIONS:
            raise invalid("include", section, "one of " + ", ".join(SECTIONS))
    return frozenset(SECTIONS) if not include or "all" in include else frozenset(include)


def load_of(
    rank: RankView, table: RequestTable, tokens_per_second: float, sections: frozenset[str], mode: str
) -> pb.SchedulerLoad:
    """A rank's load. `mode` is the engine's --disaggregation-mode; figures the lane does not tell are left out."""
    load, ready = rank.load, rank.ready
    capacity = int(ready.get("kv_cache_size_tokens") or 0)
    seats = int(ready.get("max_num_seqs") or 0)
    found = pb.SchedulerLoad(
        dp_rank=rank.index,
        num_running_reqs=load.running,
        num_waiting_reqs=load.waiting,
        num_total_reqs=load.running + load.waiting,
        num_used_tokens=round(load.kv_cache_usage * capacity),
        max_total_num_tokens=capacity,
        token_usage=load.kv_cache_usage,
        gen_throughput=tokens_per_second,
        cache_hit_rate=table.cache_hit_rate(rank.identity),
        utilization=load.running / seats if seats else 0.0,
        max_running_requests=seats,
        num_waiting_uncached_tokens=table.waiting_prompt_tokens.get(rank.identity, 0),
    )
    if "memory" in sections:
        found.memory.token_capacity = capacity
    if "disagg" in sections:
        found.disaggregation.mode = mode
    if "queues" in sections:
        found.queues.waiting = load.waiting
    return found


def aggregate_of(loads: Sequence[pb.SchedulerLoad]) -> pb.AggregateMetrics:
    """Sums of requests, means of the rest."""
    count = len(loads) or 1
    return pb.AggregateMetrics(
        total_running_reqs=sum(load.num_running_reqs for load in loads),
        total_waiting_reqs=sum(load.num_waiting_reqs for load in loads),
        total_reqs=sum(load.num_total_reqs for load in loads),
        avg_token_usage=sum(load.token_usage for load in loads) / count,
        avg_throughput=sum(load.gen_throughput for load in loads) / count,
        avg_utilization=sum(load.utilization for load in loads) / count,
    )
