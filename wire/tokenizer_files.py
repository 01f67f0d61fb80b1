"""The tokenizer's files as one zip, as gateways ask for it.

The archive of a folder is the same bytes every time: names sorted, one fixed time stamp, one compression level.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from pathlib import Path

from bridge.wire.model_folder import ModelFolderError

NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "tiktoken.model",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
PATTERNS = ("*.tiktoken", "*.jinja", "*.model")
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json")
"""One of these, or a `.tiktoken` or `.model` file, must be there: without it nothing can tokenize."""

LIMIT = 256 << 20
"""Bytes of all files together: far above any tokenizer, far below weights under a misleading name."""

EPOCH = (1980, 1, 1, 0, 0, 0)


def tokenizer_files(folder: Path) -> list[Path]:
    """The files that make up the tokenizer, sorted by name.

    Only regular files that lie in the folder count. A link counts by its target; the Hugging Face cache's links, from
    `snapshots/<revision>` to the repository's `blobs`, are the one kind that may leave the folder.
    """
    names = {name for name in NAMES if (folder / name).exists()}
    names |= {path.name for pattern in PATTERNS for path in folder.glob(pattern)}
    return [folder / name for name in sorted(names) if _allowed(folder, folder / name)]


def tokenizer_archive(path: str | Path) -> tuple[bytes, str]:
    """(zip, its SHA-256 in hex) of the tokenizer's files in the folder `path`. Raises `ModelFolderError`."""
    folder = Path(path)
    if not folder.is_dir():
        raise ModelFolderError(f"tokenizer folder {folder} does not exist")
    files = tokenizer_files(folder)
    if not any(file.name in VOCABULARIES or file.suffix in (".tiktoken", ".model") for file in files):
        raise ModelFolderError(f"{folder} holds no tokenizer: none of {', '.join(VOCABULARIES)}, *.tiktoken, *.model")
    size = sum(file.stat().st_size for file in files)
    if size > LIMIT:
        raise ModelFolderError(f"the tokenizer files in {folder} hold {size} bytes; the limit is {LIMIT}")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for file in files:
            entry = zipfile.ZipInfo(file.name, EPOCH)
            entry.external_attr = 0o644 << 16
            entry.create_system = 3
            archive.writestr(entry, file.read_bytes(), zipfile.ZIP_DEFLATED, 6)
    data = buffer.getvalue()
    return data, hashlib.sha256(data).hexdigest()


def _allowed(folder: Path, file: Path) -> bool:
    target, root = file.resolve(), folder.resolve()
    if not target.is_file():
        return False
    if target.is_relative_to(root):
        return True
    return root.parent.name == "snapshots" and target.parent == root.parent.parent / "blobs"
