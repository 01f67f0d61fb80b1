"""Writes tiny random models as Hugging Face folders, with the standard library only.

The weights are seeded, so every machine gets the same bytes. The tokenizer is byte-level: `<pad>` 0, `<s>` 1, `</s>` 2
and then one token per byte, 259 in all.
"""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

SPECIALS = ("<pad>", "<s>", "</s>")
BYTES = 256
VOCAB = len(SPECIALS) + BYTES

HIDDEN = 128
INTERMEDIATE = 256
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 32  # vLLM's CPU attention takes 32, 64, 80, …: nothing smaller
LAYERS = 2
CONTEXT = 2048

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<s>' + message['role'] + ': ' + message['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant: ' }}{% endif %}"
)


def write_tiny_llama(folder: Path, *, seed: int = 7) -> None:
    """A Llama with untied embeddings (tied random ones repeat one token for ever), about 0.7 MB of bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(
        folder / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 1,
            "dtype": "bfloat16",
            "eos_token_id": 2,
            "head_dim": HEAD_DIM,
            "hidden_act": "silu",
            "hidden_size": HIDDEN,
            "initializer_range": 0.02,
            "intermediate_size": INTERMEDIATE,
            "max_position_embeddings": CONTEXT,
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": HEADS,
            "num_hidden_layers": LAYERS,
            "num_key_value_heads": KV_HEADS,
            "pad_token_id": 0,
            "rms_norm_eps": 1e-06,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
            "tie_word_embeddings": False,
            "use_cache": True,
            "vocab_size": VOCAB,
        },
    )
    _write_json(
        folder / "generation_config.json",
        {"_from_model_config": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    )
    write_byte_tokenizer(folder)
    _write_safetensors(folder / "model.safetensors", _llama_weights(random.Random(seed)))


def write_byte_tokenizer(folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json of the byte-level tokenizer, chat template included."""
    vocab = {token: i for i, token in enumerate((*SPECIALS, *_byte_letters()))}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    _write_json(
        folder / "tokenizer.json",
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {
                    "id": i,
                    "content": token,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "special": True,
                }
                for i, token in enumerate(SPECIALS)
            ],
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": vocab,
                "merges": [],
            },
        },
    )
    _write_json(
        folder / "tokenizer_config.json",
        {
            "bos_token": "<s>",
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "eos_token": "</s>",
            "model_max_length": CONTEXT,
            "pad_token": "<pad>",
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )


def _byte_letters() -> list[str]:
    """The printable letter byte-level BPE writes for each byte: itself where Latin-1 prints it, else from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters, spare = [], 0x100
    for byte in range(BYTES):
        if byte in printable:
            letters.append(chr(byte))
        else:
            letters.append(chr(spare))
            spare += 1
    return letters


def _llama_weights(rng: random.Random) -> dict[str, tuple[tuple[int, ...], bytes]]:
    """Tensor name → (shape, bfloat16 bytes). Matrices are scaled by 1/sqrt(inputs), so activations keep their size."""

    def matrix(rows: int, columns: int, scale: float | None = None) -> tuple[tuple[int, ...], bytes]:
        deviation = columns**-0.5 if scale is None else scale
        return (rows, columns), _bfloat16([rng.gauss(0.0, deviation) for _ in range(rows * columns)])

    ones = (HIDDEN,), _bfloat16([1.0] * HIDDEN)
    weights = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN, 1.0), "model.norm.weight": ones}
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        weights[layer + "input_layernorm.weight"] = ones
        weights[layer + "self_attn.q_proj.weight"] = matrix(HEADS * HEAD_DIM, HIDDEN)
        weights[layer + "self_attn.k_proj.weight"] = matrix(KV_HEADS * HEAD_DIM, HIDDEN)
        weights[layer + "self_attn.v_proj.weight"] = matrix(KV_HEADS * HEAD_DIM, HIDDEN)
        weights[layer + "self_attn.o_proj.weight"] = matrix(HIDDEN, HEADS * HEAD_DIM)
        weights[layer + "post_attention_layernorm.weight"] = ones
        weights[layer + "mlp.gate_proj.weight"] = matrix(INTERMEDIATE, HIDDEN)
        weights[layer + "mlp.up_proj.weight"] = matrix(INTERMEDIATE, HIDDEN)
        weights[layer + "mlp.down_proj.weight"] = matrix(HIDDEN, INTERMEDIATE)
    weights["lm_head.weight"] = matrix(VOCAB, HIDDEN, 0.2)
    return weights


def _bfloat16(values: list[float]) -> bytes:
    """The upper halves of little-endian float32 values."""
    packed = struct.pack(f"<{len(values)}f", *values)
    halves = bytearray(len(values) * 2)
    halves[0::2] = packed[2::4]
    halves[1::2] = packed[3::4]
    return bytes(halves)


def _write_safetensors(path: Path, tensors: dict[str, tuple[tuple[int, ...], bytes]]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (shape, data) in tensors.items():
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, data in tensors.values():
            file.write(data)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
