"""A model folder alone tells what the guard and the contracts need to know."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from bridge.wire.companion import Facts
from bridge.wire.model_folder import ModelFolderError, context_length, facts_from_folder


def read(folder: Path, **given: Any) -> Facts:
    return facts_from_folder(folder, engine="vllm", engine_version="0.32.0", **given)


@pytest.fixture
def folder(tiny_llama: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model's small files that a test may change."""
    copy = tmp_path / "model"
    copy.mkdir()
    for file in tiny_llama.glob("*.json"):
        shutil.copy(file, copy)
    return copy


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_a_real_model(smollm2: Path) -> None:
    facts = read(smollm2, served_model_name="smol")
    assert (facts.vocab_size, facts.max_model_len, facts.model_dtype) == (49152, 8192, "bfloat16")
    assert (facts.eos_token_ids, facts.bos_token_id, facts.pad_token_id) == ([2], 1, 2)
    assert (facts.model_type, facts.architectures) == ("llama", ["LlamaForCausalLM"])
    assert (facts.served_model_name, facts.engine, facts.engine_version) == ("smol", "vllm", "0.32.0")
    assert facts.is_generation and not facts.supports_vision
    assert Path(facts.tokenizer_path) == smollm2


def test_the_name_defaults_to_the_folder_as_given(folder: Path) -> None:
    assert read(folder).served_model_name == str(folder)


def test_the_tokenizers_eos_comes_first_and_the_generation_configuration_adds(folder: Path) -> None:
    change(folder / "generation_config.json", eos_token_id=[40, 2, 41, 40])
    assert read(folder).eos_token_ids == [2, 40, 41]


def test_without_a_generation_configuration_eos_comes_from_the_model_configuration(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    change(folder / "config.json", eos_token_id=[7, 8])
    assert read(folder).eos_token_ids == [2, 7, 8]


@pytest.mark.parametrize(
    "eos", ["<pad>", {"content": "<pad>", "special": True}], ids=["a string", "a token description"]
)
def test_eos_is_looked_up_by_its_text(folder: Path, eos: object) -> None:
    change(folder / "tokenizer_config.json", eos_token=eos)
    assert read(folder).eos_token_ids == [0, 2]


def test_a_tokenizer_that_names_no_eos_leaves_the_generation_configurations(folder: Path) -> None:
    change(folder / "tokenizer_config.json", eos_token=None)
    assert read(folder).eos_token_ids == [2]


def test_composite_models_are_read_from_their_text_part(folder: Path) -> None:
    text = json.loads((folder / "config.json").read_text())
    composite = {
        "model_type": "qwen2_5_vl",
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "text_config": {**text, "vocab_size": 300, "max_position_embeddings": 4096, "eos_token_id": 9},
        "vision_config": {"depth": 2},
        "bos_token_id": 5,
    }
    (folder / "config.json").write_text(json.dumps(composite))
    (folder / "generation_config.json").unlink()
    facts = read(folder)
    assert (facts.vocab_size, facts.max_model_len, facts.eos_token_ids) == (300, 4096, [2, 9])
    assert facts.supports_vision and facts.is_generation
    assert facts.model_type == "qwen2_5_vl"


def test_sampling_defaults_use_the_engines_names(folder: Path) -> None:
    change(folder / "generation_config.json", temperature=0.6, top_k=20, max_new_tokens=64, do_sample=True, top_p=None)
    assert read(folder).default_sampling == {"temperature": 0.6, "top_k": 20, "max_tokens": 64}


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"n_positions": 1024}, 1024),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 2.0}}, 8192),
        ({"max_position_embeddings": 4096, "rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, 4096),
        (
            {
                "max_position_embeddings": 131072,
                "original_max_position_embeddings": 4096,
                "rope_scaling": {"rope_type": "longrope"},
            },
            4096,
        ),
        ({}, 0),
    ],
)
def test_context_length_follows_rope_scaling(config: dict[str, Any], length: int) -> None:
    assert context_length(config) == length


def test_a_given_context_length_wins(folder: Path) -> None:
    assert read(folder, max_model_len=128).max_model_len == 128


def test_a_tokenizer_may_live_elsewhere(folder: Path, smollm2: Path) -> None:
    change(folder / "generation_config.json", eos_token_id=None)
    facts = read(folder, tokenizer=smollm2)
    assert (facts.tokenizer_path, facts.eos_token_ids) == (str(smollm2), [2])


def test_what_is_wrong_is_one_clear_line(folder: Path, tmp_path: Path) -> None:
    def message(path: Path) -> str:
        with pytest.raises(ModelFolderError) as caught:
            read(path)
        text = str(caught.value)
        assert "\n" not in text
        return text

    assert message(tmp_path / "nowhere") == f"model folder {tmp_path}/nowhere does not exist"
    assert message(folder / "config.json").endswith("is not a folder")
    assert message(tmp_path) == f"model folder {tmp_path} has no config.json"
    (folder / "generation_config.json").write_text("{")
    assert message(folder).startswith(f"{folder}/generation_config.json cannot be read: ")
    (folder / "generation_config.json").write_text("[]")
    assert message(folder) == f"{folder}/generation_config.json holds a list, not an object"
    change(folder / "config.json", vocab_size=None)
    (folder / "generation_config.json").unlink()
    assert "vocab_size is None" in message(folder)
