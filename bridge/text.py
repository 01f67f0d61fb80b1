"""The model's own tokenizer: read and run off the event loop, and only when a request needs it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.grpc.status import Code
from bridge.refusal import Refusal

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class TextEncoder:
    """Encodes with `tokenizer.json` of a folder, special tokens included, as vLLM's completions do.

    The file is read at the first text prompt, in a thread; gateways that send token ids never pay for it.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._loading: asyncio.Future[Tokenizer] | None = None
        self.loaded: Tokenizer | None = None
        """The tokenizer, once something needed it."""

    async def encode(self, text: str) -> list[int]:
        """Token ids of `text`; raises `Refusal` FAILED_PRECONDITION when the model has no `tokenizer.json`."""
        tokenizer = await self.tokenizer()
        encoding = await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=True)
        return list(encoding.ids)

    async def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, read at most once; raises `Refusal` FAILED_PRECONDITION when there is none."""
        if self._loading is None:
            self._loading = asyncio.ensure_future(asyncio.to_thread(self._load))
        try:
            self.loaded = await asyncio.shield(self._loading)
            return self.loaded
        except Refusal:
            self._loading = None
            raise

    def _load(self) -> Tokenizer:
        from tokenizers import Tokenizer

        path = Path(self._folder) / "tokenizer.json"
        if not path.is_file():
            raise Refusal(
                Code.FAILED_PRECONDITION,
                f"text input and stop strings need {path}, which does not exist; send token ids",
            )
        tokenizer: Tokenizer = Tokenizer.from_file(str(path))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer
