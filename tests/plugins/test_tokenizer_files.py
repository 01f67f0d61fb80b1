"""The tokenizer archive that gateways download."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import zipfile
from pathlib import Path

import pytest

from bridge.wire.model_folder import ModelFolderError
from bridge.wire.tokenizer_files import tokenizer_archive


@pytest.fixture
def folder(tiny_llama: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "model"
    shutil.copytree(tiny_llama, copy)
    return copy


def names(data: bytes) -> list[str]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return archive.namelist()


def test_the_archive_holds_the_tokenizers_files_as_they_are(smollm2: Path) -> None:
    data, digest = tokenizer_archive(smollm2)
    assert digest == hashlib.sha256(data).hexdigest()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.namelist() == [
            "chat_template.jinja",
            "config.json",
            "generation_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
        ]
        for name in archive.namelist():
            assert archive.read(name) == (smollm2 / name).read_bytes()


def test_the_same_files_make_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    before = tokenizer_archive(folder)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for file in sorted(folder.iterdir(), reverse=True):
        shutil.copy(file, elsewhere)
        os.utime(elsewhere / file.name, (1, 1))
    assert tokenizer_archive(elsewhere) == before


def test_weights_and_strangers_stay_out(folder: Path) -> None:
    (folder / "notes.txt").write_text("x")
    (folder / "spiece.model").write_bytes(b"x")
    (folder / "o200k.tiktoken").write_bytes(b"x")
    found = names(tokenizer_archive(folder)[0])
    assert {"spiece.model", "o200k.tiktoken"} < set(found)
    assert not {"notes.txt", "model.safetensors"} & set(found)


def test_links_out_of_the_folder_and_folders_are_left_out(folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    (folder / "merges.txt").symlink_to(secret)
    (folder / "vocab.json").mkdir()
    found = names(tokenizer_archive(folder)[0])
    assert "merges.txt" not in found and "vocab.json" not in found


def test_the_hub_cache_is_read_through_its_links(folder: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--a--b"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    shutil.copy(folder / "tokenizer.json", repository / "blobs" / "0f")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/0f")
    assert names(tokenizer_archive(snapshot)[0]) == ["tokenizer.json"]


def test_a_folder_without_a_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelFolderError, match="holds no tokenizer"):
        tokenizer_archive(folder)
    with pytest.raises(ModelFolderError, match="does not exist"):
        tokenizer_archive(tmp_path / "nowhere")
