"""Chunks of one token as byte templates.

A framed chunk is a lead that is the same in every chunk of a stream, the token's id and, in contracts that count, a link
and the number of tokens so far. Ids and counts are padded varints (`varint.padded`), so that all chunks of a stream have
the same size.
"""

from __future__ import annotations

from typing import NamedTuple

from bridge.varint import PADDED_BYTES


class Template(NamedTuple):
    """One stream's chunks. `lead` begins with gRPC's prefix; `link` is None where no count follows the id."""

    lead: bytes
    link: bytes | None

    @property
    def size(self) -> int:
        """Bytes of one chunk."""
        counted = 0 if self.link is None else len(self.link) + PADDED_BYTES
        return len(self.lead) + PADDED_BYTES + counted
