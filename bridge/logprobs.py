"""Log-probabilities of a sequence, columnar: flat arrays that grow by rows, sliced when a chunk is rendered."""

from __future__ import annotations

import sys
from array import array

from bridge.wire.codec import Logprobs
from bridge.wire.errors import WireError

LITTLE = sys.byteorder == "little"


class Columns:
    """Rows of (1 + k) token ids and values; column 0 is the token itself, the rest the k most likely.

    `values` holds little-endian float32, as protobuf packs floats: a slice of it is a packed field's bytes.
    """

    __slots__ = ("ids", "values", "width")

    def __init__(self) -> None:
        self.width = 0
        self.ids: list[int] = []
        self.values = bytearray()

    def __len__(self) -> int:
        return len(self.ids) // self.width if self.width else 0

    def extend(self, rows: Logprobs, count: int) -> None:
        """Append the first `count` rows; raises `WireError` when they have another width than those before."""
        width = rows.token_ids.shape[1]
        if self.width not in (0, width):
            raise WireError(f"rows of {width} log-probabilities came after rows of {self.width}")
        self.width = width
        cells = count * width
        ids = rows.token_ids.values()
        self.ids += ids if cells == len(ids) else ids[:cells]
        if LITTLE and rows.values.dtype in ("<f4", "float32"):
            self.values += rows.values.data[: cells * 4]
        else:
            floats = array("f", rows.values.values()[:cells])
            if not LITTLE:
                floats.byteswap()
            self.values += floats.tobytes()
