"""The companion in the real vLLM environment: what it says, what it refuses, and that a model folder says the same."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest

from bridge.wire.companion import Facts
from bridge.wire.model_folder import facts_from_folder

LIMIT_S = 120
FROM_THE_FOLDER = (
    "model_path",
    "tokenizer_path",
    "served_model_name",
    "model_type",
    "architectures",
    "vocab_size",
    "max_model_len",
    "is_generation",
    "supports_vision",
    "eos_token_ids",
    "bos_token_id",
    "pad_token_id",
    "default_sampling",
    "model_dtype",
)


def ask(python: Path, *argv: str | Path) -> subprocess.CompletedProcess[str]:
    command = [str(python), "-m", "bridge.plugins.vllm.companion", "facts", "--", *map(str, argv)]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False, cwd="/")


def facts(python: Path, *argv: str | Path) -> Facts:
    done = ask(python, *argv)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 1, "the answer is the only line"
    return msgspec.json.decode(lines[0], type=Facts)


@pytest.fixture(scope="module")
def changed_model(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with several EOS ids, sampling defaults and a shorter context."""
    folder = tmp_path_factory.mktemp("models") / "changed"
    shutil.copytree(tiny_llama, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 512, "eos_token_id": [2, 50]}))
    generation = {"eos_token_id": [60, 2, 61], "temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_new_tokens": 32}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.fixture(scope="module")
def real(vllm_python: Path, smollm2: Path) -> Facts:
    """What vLLM says of SmolLM2."""
    return facts(vllm_python, smollm2, "--headless")


def test_vllm_and_the_folder_agree_on_a_real_model(real: Facts, smollm2: Path) -> None:
    ours = facts_from_folder(smollm2, engine="vllm", engine_version="0.32.0")
    assert {name: getattr(real, name) for name in FROM_THE_FOLDER} == {
        name: getattr(ours, name) for name in FROM_THE_FOLDER
    }


def test_vllm_and_the_folder_agree_on_eos_and_defaults(vllm_python: Path, changed_model: Path) -> None:
    ours = facts_from_folder(changed_model, engine="vllm", engine_version="0.32.0")
    theirs = facts(vllm_python, changed_model)
    assert {name: getattr(theirs, name) for name in FROM_THE_FOLDER} == {
        name: getattr(ours, name) for name in FROM_THE_FOLDER
    }
    assert theirs.eos_token_ids == [2, 60, 61]
    assert theirs.default_sampling == {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_tokens": 32}


def test_a_composite_model_has_all_its_eos_ids_but_those_that_are_no_tokens(
    vllm_python: Path, tiny_llama: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "composite"
    shutil.copytree(tiny_llama, folder)
    (folder / "generation_config.json").unlink()
    text = {**json.loads((folder / "config.json").read_text()), "model_type": "qwen2", "eos_token_id": [2, 60, 400]}
    encoder = {"model_type": "qwen2_audio_encoder", "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2}
    composite = {
        "architectures": ["Qwen2AudioForConditionalGeneration"],
        "model_type": "qwen2_audio",
        "text_config": text,
        "audio_config": encoder,
        "audio_token_index": 32,
    }
    (folder / "config.json").write_text(json.dumps(composite))
    theirs = facts(vllm_python, folder, "--max-logprobs", "-1")
    ours = facts_from_folder(folder, engine="vllm", engine_version="0.32.0")
    assert theirs.eos_token_ids == ours.eos_token_ids == [2, 60]
    assert theirs.vocab_size == theirs.max_logprobs == 259, "-1 is the whole vocabulary"


def test_launch_arguments_decide(vllm_python: Path, tiny_llama: Path) -> None:
    transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "engine_id": "engine-7"}
    answer = facts(
        vllm_python,
        *(tiny_llama, "--headless", "--served-model-name", "tiny", "also-tiny", "--max-model-len", "256"),
        *("--dtype", "float32", "--max-logprobs", "5", "--api-key", "s3cret", "--generation-config", "vllm"),
        *("--override-generation-config", '{"temperature": 0.5}', "--kv-transfer-config", json.dumps(transfer)),
        *("--reasoning-parser", "deepseek_r1", "--attention-backend", "CPU_ATTN", "--kv-cache-dtype", "bfloat16"),
    )
    assert (answer.served_model_name, answer.max_model_len, answer.model_dtype) == ("tiny", 256, "float32")
    assert (answer.max_logprobs, answer.default_sampling) == (5, {"temperature": 0.5})
    assert (answer.kv_connector, answer.kv_role, answer.kv_engine_id) == ("NixlConnector", "kv_both", "engine-7")
    assert (answer.reasoning_parser, answer.constrained_decoding_start) == ("deepseek_r1", "after_reasoning")
    assert (answer.attention_backend, answer.kv_cache_dtype) == ("CPU_ATTN", "bfloat16")
    assert answer.server_args["max_model_len"] == 256
    assert answer.server_args["served_model_name"] == ["tiny", "also-tiny"]
    assert "s3cret" not in json.dumps(answer.server_args)


def test_layouts_are_those_of_the_installed_classes(real: Facts) -> None:
    layouts = real.layouts
    assert layouts["EngineCoreRequest"][:4] == ["request_id", "prompt_token_ids", "mm_features", "sampling_params"]
    assert len(layouts["EngineCoreRequest"]) == 22
    assert len(layouts["EngineCoreOutput"]) == 18
    assert layouts["UtilityOutput"] == ["call_id", "failure_message", "result"]
    assert len(layouts["SamplingParams"]) == 43


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--no-such-flag"], "vllm serve does not take these arguments: unrecognized arguments: --no-such-flag"),
        (["--max-model-len", "99999"], "User-specified max_model_len (99999) is greater"),
        (["--dtype", "float7"], "vllm serve does not take these arguments: argument --dtype"),
    ],
)
def test_what_vllm_refuses_is_one_line(vllm_python: Path, tiny_llama: Path, argv: list[str], says: str) -> None:
    done = ask(vllm_python, tiny_llama, *argv)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith(f"error: {says}")
    assert "Traceback" not in done.stderr


def test_wrong_usage(vllm_python: Path) -> None:
    done = subprocess.run(
        [str(vllm_python), "-m", "bridge.plugins.vllm.companion", "fact"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: ")
