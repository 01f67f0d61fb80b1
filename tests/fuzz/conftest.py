"""The model that fuzzed workers serve."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

DEFAULTS = {
    "eos_token_id": [2, 7, 300],
    "do_sample": True,
    "temperature": 0.6,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.02,
    "repetition_penalty": 1.05,
    "max_new_tokens": 300,
}
"""A generation configuration in which every unset value means something, and one EOS id is outside the vocabulary of 259."""


@pytest.fixture(scope="session")
def tiny_with_defaults(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny_llama` with sampling defaults and three EOS ids."""
    folder = tmp_path_factory.mktemp("tiny-with-defaults")
    for file in tiny_llama.iterdir():
        shutil.copy(file, folder)
    (folder / "generation_config.json").write_text(json.dumps(DEFAULTS))
    return folder


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A private folder with a short path: ipc addresses have 107 bytes."""
    with TemporaryDirectory(prefix="fuzz-") as folder:
        yield Path(folder)
