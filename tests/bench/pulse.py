"""A page of memory between the bench, the engine and the load client.

The bench writes how long a step takes, the engine when each step left, the client reads that for every token it got.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

FIRST_TOKEN = 16384
"""Three bytes as a varint, as most ids of a vocabulary of 128,000 are."""
STEPS = 32768
STRIDE = 61
VOCABULARY = FIRST_TOKEN + STEPS

_HEADER = 16
_word = struct.Struct("<Q")


def offset_of(first_prompt_id: int) -> int:
    """By how much a request's tokens run ahead of the steps, so that the streams of a step do not share their token."""
    return first_prompt_id * STRIDE % STEPS


def token_of(step: int, offset: int) -> int:
    """The token that a request with that offset gets in a step."""
    return FIRST_TOKEN + (step + offset) % STEPS


def step_of(token: int, offset: int) -> int:
    """The number of the step, modulo STEPS, that a token is from."""
    return (token - FIRST_TOKEN - offset) % STEPS


class Pulse:
    """`step_us` 0: the engine steps as fast as it can. Times are of the monotonic clock, in nanoseconds."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        size = _HEADER + 8 * STEPS
        if create:
            path.write_bytes(bytes(size))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), size)

    @property
    def step_us(self) -> int:
        return int(_word.unpack_from(self._memory, 0)[0])

    @step_us.setter
    def step_us(self, value: int) -> None:
        _word.pack_into(self._memory, 0, value)

    def mark(self, step: int, at_ns: int) -> None:
        """Step number `step` leaves now."""
        _word.pack_into(self._memory, _HEADER + 8 * (step % STEPS), at_ns)

    def marks(self) -> list[int]:
        """When each of the last STEPS steps left, by its number modulo STEPS; 0 for one that was never taken."""
        return list(struct.unpack_from(f"<{STEPS}Q", self._memory, _HEADER))
