"""Log-probabilities of a sequence, columnar: flat arrays that grow by rows, sliced when a chunk is rendered."""

from __future__ import annotations

import sys
from array import array

from bridge.wire.codec import Logprobs
from bridge.wire.errors import WireError

LITTLE = sys.byteorder == "little"


class Columns:
    """Rows of (1 + k) token ids and values; column 0 is the token itself, the rest the k most likely.

    The engine's rows are as wide as the widest request's in a step (vLLM 0.32), so the columns past `k` are cut off; -1
    keeps all.

    `values` holds little-endian float32, as protobuf packs floats: a slice of it is a packed field's bytes.
    """

    __slots__ = ("_most", "ids", "values", "width")

    def __init__(self, k: int) -> None:
        self.width = 0
        self._most = k + 1
        self.ids: list[int] = []
        self.values = bytearray()

    def __len__(self) -> int:
        return len(self.ids) // self.width if self.width else 0

    def extend(self, rows: Logprobs, count: int) -> None:
        """Append the first `count` rows; raises `WireError` when they have another width than those before."""
        given = rows.token_ids.shape[1]
        width = min(given, self._most) if self._most else given
        if self.width not in (0, width):
            raise WireError(f"rows of {width} log-probabilities came after rows of {self.width}")
        self.width = width
        ids = rows.token_ids.values()
        if width == given and LITTLE and rows.values.dtype in ("<f4", "float32"):
            self.ids += ids[: count * width]
            self.values += rows.values.data[: count * width * 4]
            return
        floats = rows.values.values()
        kept = array("f")
        for start in range(0, count * given, given):
            self.ids += ids[start : start + width]
            kept.extend(floats[start : start + width])
        if not LITTLE:
            kept.byteswap()
        self.values += kept.tobytes()
