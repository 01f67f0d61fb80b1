"""Text prompts to token ids, with the model's own tokenizer and off the event loop."""

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

    async def encode(self, text: str) -> list[int]:
        """Token ids of `text`; raises `Refusal` FAILED_PRECONDITION when the model has no `tokenizer.json`."""
        tokenizer = await self._tokenizer()
        encoding = await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=True)
        return list(encoding.ids)

    async def _tokenizer(self) -> Tokenizer:
        if self._loading is None:
            self._loading = asyncio.ensure_future(asyncio.to_thread(self._load))
        try:
            return await asyncio.shield(self._loading)
        except Refusal:
            self._loading = None
            raise

    def _load(self) -> Tokenizer:
        from tokenizers import Tokenizer

        path = Path(self._folder) / "tokenizer.json"
        if not path.is_file():
            raise Refusal(
                Code.FAILED_PRECONDITION, f"text input needs {path}, which does not exist; send tokenized.input_ids"
            )
        tokenizer: Tokenizer = Tokenizer.from_file(str(path))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer
