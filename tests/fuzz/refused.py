"""What a worker refuses by name today, as its README says. A feature that comes to be served leaves this table."""

from __future__ import annotations

import re
from collections.abc import Sequence

from bridge.grpc.status import Code

CONSTRAINTS = "json_schema|json_object|regex|grammar|choice|structural_tag"

REFUSED: Sequence[tuple[str, Code, str]] = (
    ("media", Code.UNIMPLEMENTED, "(mm_inputs|extra_mm_inputs|media_refs) is "),
    (
        "transfer without a connector",
        Code.FAILED_PRECONDITION,
        "kv_transfer_params(_json)? is set, and the engine has no KV",
    ),
    ("embedding with a model that generates", Code.FAILED_PRECONDITION, r"\S+ generates; it does not embed"),
    ("KV events", Code.UNIMPLEMENTED, "SubscribeKvEvents is not served"),
    ("constraint without a companion", Code.FAILED_PRECONDITION, f"({CONSTRAINTS}) needs the companion"),
)
"""Feature, status, and how the refusal begins."""


def refused_feature(status: int | None, text: str) -> str | None:
    """The feature that an answer refuses by name, if it is one of the table and has its status."""
    for feature, code, begins in REFUSED:
        if status == code and re.match(begins, text):
            return feature
    return None
