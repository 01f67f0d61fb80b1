"""Flags of restarts, liveness, warm-up and upgrades: what they take, and the peer's names for them."""

from __future__ import annotations

import pytest

from bridge.flags import SERVE, resolve
from bridge.supervisor.errors import UsageError


def value(key: str, *arguments: str, **environment: str) -> object:
    return resolve(SERVE, arguments, environment, "vllm")[key]


@pytest.mark.parametrize(
    ("key", "name", "text", "expected"),
    [
        ("silence_secs", "SMG_VLLM_SERVICER_SILENCE_TIMEOUT_SECS", "45", 45.0),
        ("prefill_tokens_per_sec", "SMG_VLLM_SERVICER_PREFILL_TOKENS_PER_SEC", "0", 0.0),
        ("warmup", "SMG_VLLM_SERVICER_WARMUP", "off", "off"),
        ("restart", "BRIDGE_RESTART", "always", "always"),
        ("upgrade_drain_secs", "BRIDGE_UPGRADE_DRAIN_SECS", "30", 30.0),
    ],
)
def test_the_environment_names_them_too(key: str, name: str, text: str, expected: object) -> None:
    assert value(key, **{name: text}) == expected


@pytest.mark.parametrize(
    ("flag", "text", "words"),
    [
        ("--warmup", "full", "is not supported: a warm-up is off or fast"),
        ("--warmup", "60", "is not supported: a warm-up is off or fast"),
        ("--warmup", "fast:60", "is not supported: a warm-up is off or fast"),
        ("--warmup", "maybe", "must be off or fast"),
        ("--restart", "sometimes", "must be never, on-failure or always"),
        ("--restart-limit", "0", "must be 1 or more"),
        ("--silence-secs", "0", "must be more than 0 seconds"),
        ("--prefill-tokens-per-sec", "-1", "must be 0 or more tokens a second"),
    ],
)
def test_what_they_cannot_be_is_told_by_name(flag: str, text: str, words: str) -> None:
    with pytest.raises(UsageError) as refused:
        value(flag[2:].replace("-", "_"), flag, text)
    assert flag in refused.value.reason and repr(text) in refused.value.reason and words in refused.value.reason
