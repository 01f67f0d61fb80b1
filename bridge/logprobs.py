"""Log-probabilities of a sequence, columnar: flat arrays that grow by rows, sliced when a chunk is rendered."""

from __future__ import annotations

from bridge.wire.codec import Logprobs
from bridge.wire.errors import WireError


class Columns:
    """Rows of (1 + k) token ids and values; column 0 is the token itself, the rest the k most likely.

    The engine's rows are as wide as the widest request's in a step (vLLM 0.32), so the columns past `k` are cut off; -1
    keeps all.

    `values` holds little-endian float32, as protobuf packs floats: a slice of it is a packed field's bytes.
    """

    __slots__ = ("_most", "ids", "rendered", "rendered_rows", "values", "width")

    def __init__(self, k: int) -> None:
        self.width = 0
        self._most = k + 1
        self.ids: list[int] = []
        self.values = bytearray()
        self.rendered = bytearray()
        """What a contract made of the first `rendered_rows` rows and repeats in the terminal."""
        self.rendered_rows = 0

    def __len__(self) -> int:
        return len(self.ids) // self.width if self.width else 0

    def extend(self, rows: Logprobs, count: int) -> None:
        """Append the first `count` rows; raises `WireError` when they have another width than those before."""
        given = width = rows.width
        if width > self._most > 0:
            width = self._most
        if width != self.width:
            if self.width:
                raise WireError(f"rows of {width} log-probabilities came after rows of {self.width}")
            self.width = width
        ids, values = rows.token_ids, rows.values
        if count == 1:
            self.ids += ids[:width]
            self.values += values[: width * 4]
            return
        if width == given:
            self.ids += ids[: count * width]
            self.values += values[: count * width * 4]
            return
        for start in range(0, count * given, given):
            self.ids += ids[start : start + width]
            self.values += values[start * 4 : (start + width) * 4]
