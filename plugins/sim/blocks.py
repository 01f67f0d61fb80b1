"""KV capacity and the prefix cache: counted blocks, content-addressed once full, evicted least recently used first.

Only full blocks have an identity (a chained digest of their tokens); a block still being filled is a number. One block
is never used, as vLLM keeps one back.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b


def chain(parent: bytes, tokens: Sequence[int], block_size: int) -> list[bytes]:
    """Digests of the full blocks in `tokens`, each covering its own tokens and everything before it."""
    width = 4 * block_size
    raw = array("I", tokens).tobytes()
    digests = []
    for end in range(width, len(raw) + 1, width):
        parent = blake2b(raw[end - width : end], digest_size=16, key=parent).digest()
        digests.append(parent)
    return digests


class BlockPool:
    """`count` blocks of `block_size` tokens. Every method is all or nothing."""

    def __init__(self, count: int, block_size: int) -> None:
        self.block_size = block_size
        self.capacity = count - 1
        self._held: dict[bytes, int] = {}
        self._idle: OrderedDict[bytes, None] = OrderedDict()
        self._nameless = 0

    @property
    def used(self) -> int:
        """Blocks that requests hold; cached blocks nobody holds are free."""
        return len(self._held) + self._nameless

    @property
    def usage(self) -> float:
        """Fraction of the capacity in use, 0 to 1."""
        return self.used / self.capacity

    def hits(self, digests: Sequence[bytes]) -> int:
        """How many blocks at the start of `digests` are cached."""
        count = 0
        for digest in digests:
            if digest not in self._held and digest not in self._idle:
                break
            count += 1
        return count

    def take(self, cached: Sequence[bytes], fresh: int) -> bool:
        """Hold the `cached` blocks and `fresh` nameless ones; False, and nothing held, when they do not fit."""
        woken = sum(1 for digest in cached if digest in self._idle)
        if self.used + woken + fresh > self.capacity:
            return False
        for digest in cached:
            self._idle.pop(digest, None)
            self._held[digest] = self._held.get(digest, 0) + 1
        self._nameless += fresh
        self._evict()
        return True

    def name(self, digest: bytes) -> bool:
        """Turn a held nameless block into the cached block `digest`; False when another block already is that one."""
        if digest in self._held or digest in self._idle:
            return False
        self._nameless -= 1
        self._held[digest] = 1
        return True

    def release(self, named: Sequence[bytes], nameless: int) -> None:
        """Let go of blocks; named ones stay cached, the last of a chain being the first to be evicted."""
        self._nameless -= nameless
        for digest in reversed(named):
            holders = self._held[digest] - 1
            if holders:
                self._held[digest] = holders
            else:
                del self._held[digest]
                self._idle[digest] = None

    def reset(self) -> bool:
        """Forget every cached block; False, and nothing forgotten, while a request holds any."""
        if self.used:
            return False
        self._idle.clear()
        return True

    def _evict(self) -> None:
        while self.used + len(self._idle) > self.capacity:
            self._idle.popitem(last=False)
