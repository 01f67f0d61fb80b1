"""Launch arguments are reported without the secrets in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridge.wire.redaction import REDACTED, is_secret, redacted, redacted_command


@pytest.mark.parametrize(
    "name",
    ["api_key", "api-key", "hf_token", "HF_TOKEN", "db.password", "client_secret", "aws_secret_access_key", "token"],
)
def test_secret_names(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer",
        "max_tokens",
        "max_num_batched_tokens",
        "dbo_decode_token_threshold",
        "key",
        "ssl_keyfile",
        "eos_token_id",
    ],
)
def test_names_that_only_look_like_secrets(name: str) -> None:
    assert not is_secret(name)


def test_values_are_replaced_wherever_they_stand() -> None:
    given = {
        "api_key": ["a", "b"],
        "hf_token": None,
        "max_model_len": 1024,
        "kv_transfer_config": {"kv_role": "kv_both", "extra": {"auth_token": "t"}},
        "environment": ["HF_TOKEN=hf_x", "OMP_NUM_THREADS=1"],
        "otlp_endpoint": "https://user:pass@host:4317/v1",
        "header": "Authorization: Bearer abc.def",
        "path": Path("models"),
    }
    assert redacted(given) == {
        "api_key": REDACTED,
        "hf_token": None,
        "max_model_len": 1024,
        "kv_transfer_config": {"kv_role": "kv_both", "extra": {"auth_token": REDACTED}},
        "environment": [f"HF_TOKEN={REDACTED}", "OMP_NUM_THREADS=1"],
        "otlp_endpoint": f"https://{REDACTED}@host:4317/v1",
        "header": f"Authorization: Bearer {REDACTED}",
        "path": "models",
    }


def test_command_lines_are_shown_without_secrets() -> None:
    given = ["vllm", "serve", "m", "--api-key", "k1", "k2", "--hf-token=t", "--port", "1"]
    assert redacted_command(given) == [
        *("vllm", "serve", "m", "--api-key", REDACTED, REDACTED, f"--hf-token={REDACTED}", "--port", "1")
    ]
    assert redacted_command(["--x", '{"password": "p", "n": 1}']) == ["--x", f'{{"password": "{REDACTED}", "n": 1}}']
    assert redacted_command(['--x={"password": "p"}']) == [f'--x={{"password": "{REDACTED}"}}']
    assert redacted_command(["--max-num-batched-tokens", "8192", "{not json"]) == [
        *("--max-num-batched-tokens", "8192", "{not json")
    ]
