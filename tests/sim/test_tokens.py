"""The token rule: a pure function that anybody can compute again."""

from __future__ import annotations

from hashlib import blake2b
from math import gcd

from hypothesis import given
from hypothesis import strategies as st

from bridge.plugins.sim.tokens import TokenStream, Vocabulary, expected_tokens

PROMPTS = st.lists(st.integers(0, 199), min_size=1, max_size=40)
SMALL = Vocabulary(size=200, special=frozenset({0, 1, 5}), eos_token_id=2)


def rule(prompt: list[int], n: int, seed: int | None, vocab: Vocabulary) -> list[int]:
    """The documented rule, written out a second time."""
    plain = [token for token in range(vocab.size) if token not in vocab.special and token != vocab.eos_token_id]
    data = b"".join(token.to_bytes(4, "little") for token in prompt)
    if seed is not None:
        data += (seed % 2**64).to_bytes(8, "little")
    digest = blake2b(data, digest_size=16).digest()
    m = len(plain)
    start = int.from_bytes(digest[:8], "little") % m
    stride = 1 + int.from_bytes(digest[8:], "little") % (m - 1)
    while gcd(stride, m) != 1:
        stride = stride % (m - 1) + 1
    return [plain[(start + position * stride) % m] for position in range(n)]


@given(PROMPTS, st.none() | st.integers(-(2**63), 2**64 - 1))
def test_tokens_follow_the_documented_rule(prompt: list[int], seed: int | None) -> None:
    assert expected_tokens(prompt, 50, seed, SMALL) == rule(prompt, 50, seed, SMALL)


@given(PROMPTS, st.lists(st.integers(1, 7), max_size=12))
def test_tokens_do_not_depend_on_how_many_are_taken_at_a_time(prompt: list[int], portions: list[int]) -> None:
    stream = TokenStream(prompt, 3, SMALL, eos_after=9, min_tokens=4, masked={7, 2, 50})
    taken = [token for portion in portions for token in stream.take(portion)]
    assert taken == expected_tokens(prompt, len(taken), 3, SMALL, eos_after=9, min_tokens=4, masked={7, 2, 50})


@given(PROMPTS)
def test_special_ids_never_appear_and_neighbours_differ(prompt: list[int]) -> None:
    tokens = expected_tokens(prompt, 150, None, SMALL)
    assert not set(tokens) & {0, 1, 2, 5}
    assert len(set(tokens)) == 150


def test_prompt_and_seed_change_the_tokens() -> None:
    answers = {tuple(expected_tokens(prompt, 8, seed)) for prompt in ([1], [1, 2], [2, 1]) for seed in (None, 0, 1)}
    assert len(answers) == 9


def test_eos_comes_where_it_is_asked_for() -> None:
    plain = expected_tokens([7, 8], 12)
    assert expected_tokens([7, 8], 12, eos_after=5) == [*plain[:5], 2, *plain[6:]]


def test_min_tokens_holds_eos_back_and_replaces_masked_ids() -> None:
    plain = expected_tokens([7, 8], 12)
    masked = {2, plain[1], plain[9]}
    tokens = expected_tokens([7, 8], 12, eos_after=3, min_tokens=6, masked=masked)
    assert tokens[6] == 2
    assert tokens[1] == plain[1] + 1
    assert tokens[9] == plain[9], "from min_tokens on nothing is masked"
    assert tokens[3] == plain[3]
    assert expected_tokens([7, 8], 12, eos_after=3, min_tokens=6) == expected_tokens([7, 8], 12, eos_after=3)
