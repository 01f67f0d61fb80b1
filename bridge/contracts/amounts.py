"""How much of a thing a request may bring, looked at before Python makes an object of each piece.

Protobuf counts in no time, a list of 60 million token ids takes a gigabyte and holds the event loop for 13 s, and such a
request is 58 kB of gzip. What the engine's own rules limit is limited here too where the rule would look at each piece.
"""

from __future__ import annotations

from collections.abc import Sized

from bridge.refusal import invalid

REQUEST_ID_CHARACTERS = 1024
STOP_STRINGS = 1024
STOP_IDS = 16384
BIASES = 65536
CHOICES = 16384
ABORTS = 65536
CONSTRAINT_CHARACTERS = 1 << 20
TRANSFER_CHARACTERS = 1 << 16
CHARACTERS_PER_TOKEN = 128
"""The longest tokens of real vocabularies are runs of 128 blanks: a longer text cannot fit the context."""


def at_most(field: str, value: Sized, limit: int, unit: str) -> None:
    """Raises `Refusal` INVALID_ARGUMENT when `value` has more than `limit` pieces."""
    if len(value) > limit:
        raise invalid(f"the number of {unit} in {field}", len(value), f"at most {limit}")
