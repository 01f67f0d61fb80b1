"""The simulated engine's tokens: a pure function of (prompt ids, position, seed), so that tests know every answer.

The rule, in full. `plain` is the vocabulary in ascending order without its special ids, m its size.
1. digest = BLAKE2b, 16 bytes, of every prompt id as 4 little-endian bytes, then, when the request has a seed, the seed
   as 8 little-endian bytes (modulo 2^64). a = bytes 0 to 7 and b = bytes 8 to 15 of it, little-endian.
2. start = a mod m. stride = 1 + b mod (m - 1), then moved on in 1..m-1 to the next value that has no divisor in common with m.
3. The token at position p (0 is the first generated) is plain[(start + p · stride) mod m].
4. With `eos_after` N, position N holds the EOS id instead; every other position keeps its token.
5. While fewer than `min_tokens` tokens are out, ids in `masked` are not emitted: an EOS waits for position `min_tokens`,
   any other id gives way to the next id in `plain` that is not masked.
Neighbours in a sequence always differ and no id repeats within m positions, so a lost, doubled or swapped token shows.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from functools import cached_property
from hashlib import blake2b
from math import gcd
from sys import byteorder

import msgspec

WORD = 1 << 64


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The ids an engine knows: all of [0, `size`). `special` ids are never emitted, `eos_token_id` only on purpose."""

    size: int = 32000
    special: frozenset[int] = frozenset({0, 1, 2})
    eos_token_id: int = 2

    @cached_property
    def plain(self) -> list[int]:
        """The ids the rule draws from, ascending."""
        excluded = self.special | {self.eos_token_id}
        ids = [token for token in range(self.size) if token not in excluded]
        if len(ids) < 2:
            raise ValueError(
                f"a vocabulary of {self.size} ids with {len(excluded)} special ones leaves nothing to emit"
            )
        return ids


DEFAULT_VOCABULARY = Vocabulary()


class TokenStream:
    """The tokens of one request, in order, from position 0."""

    __slots__ = ("_eos", "_eos_at", "_index", "_masked", "_min_tokens", "_plain", "_position", "_stride")

    def __init__(
        self,
        prompt: Sequence[int],
        seed: int | None,
        vocab: Vocabulary,
        eos_after: int | None = None,
        min_tokens: int = 0,
        masked: Collection[int] = frozenset(),
    ) -> None:
        plain = vocab.plain
        size = len(plain)
        digest = blake2b(_little_endian(prompt), digest_size=16)
        if seed is not None:
            digest.update((seed % WORD).to_bytes(8, "little"))
        raw = digest.digest()
        stride = 1 + int.from_bytes(raw[8:], "little") % (size - 1)
        while gcd(stride, size) != 1:
            stride = stride % (size - 1) + 1
        self._plain = plain
        self._index = int.from_bytes(raw[:8], "little") % size
        self._stride = stride
        self._position = 0
        self._min_tokens = min_tokens if masked else 0
        self._masked = masked
        self._eos = vocab.eos_token_id
        self._eos_at = -1
        if eos_after is not None:
            self._eos_at = max(eos_after, min_tokens) if self._eos in masked else eos_after

    def take(self, count: int) -> list[int]:
        """The next `count` tokens."""
        plain, stride, index = self._plain, self._stride, self._index
        size = len(plain)
        tokens: list[int] = []
        append = tokens.append
        for _ in range(count):
            append(plain[index])
            index += stride
            if index >= size:
                index -= size
        first = self._position
        if first < self._min_tokens:
            for offset in range(min(count, self._min_tokens - first)):
                tokens[offset] = self._unmasked(self._index + offset * stride)
        if first <= self._eos_at < first + count:
            tokens[self._eos_at - first] = self._eos
        self._index = index
        self._position = first + count
        return tokens

    def _unmasked(self, index: int) -> int:
        plain = self._plain
        for step in range(len(plain)):
            token = plain[(index + step) % len(plain)]
            if token not in self._masked:
                return token
        raise ValueError("min_tokens masks the whole vocabulary")


def expected_tokens(
    prompt: Sequence[int],
    n: int,
    seed: int | None = None,
    vocab: Vocabulary = DEFAULT_VOCABULARY,
    *,
    eos_after: int | None = None,
    min_tokens: int = 0,
    masked: Collection[int] = frozenset(),
) -> list[int]:
    """The first `n` tokens the simulated engine generates for `prompt`, stops not applied.

    `eos_after` is the engine's `--eos-after`; `min_tokens` and `masked` (the wire's `_all_stop_token_ids`) matter
    together only. Raises ValueError when the vocabulary leaves no token to emit.
    """
    return TokenStream(prompt, seed, vocab, eos_after, min_tokens, masked).take(n)


def _little_endian(prompt: Sequence[int]) -> bytes:
    words = array("I", prompt)
    if byteorder == "big":
        words.byteswap()
    return words.tobytes()
