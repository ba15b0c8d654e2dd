"""A tiny real model and the quickstart's tokenizer, and an environment that evaluations may change."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM

from tunebook.config.schema import ModelConfig
from tunebook.evaluate.harness import prepare_environment
from tunebook.model.tokenizer import load_tokenizer

_CHANGED = (
    "TQDM_DISABLE", "HF_DATASETS_DISABLE_PROGRESS_BARS", "TOKENIZERS_PARALLELISM", "HF_ALLOW_CODE_EVAL",
    "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE",
)  # fmt: skip


@pytest.fixture
def quiet_harness(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a worker, taken back after the test."""
    for name in _CHANGED:
        monkeypatch.setenv(name, "0")
    prepare_environment(is_offline=True)


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """`make_run("tiny", 5, "failed", "no memory")`: a run of that minute, how it ended, and why; it has no model."""

    def make(recipe: str, minute: int, state: str | None = "finished", reason: str | None = None) -> Path:
        folder = tmp_path / "outputs" / recipe / f"2026-01-02T03-{minute:02d}-00Z"
        folder.mkdir(parents=True)
        (folder / "run.yaml").write_text("")
        if state is not None:
            manifest = {"format": 1, "status": {"state": state, "reason": reason}}
            (folder / "manifest.json").write_text(json.dumps(manifest))
        return folder

    return make


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer(ModelConfig(path="book:recipes/quickstart/model"))


@pytest.fixture
def model() -> PreTrainedModel:
    """One layer, random weights, the quickstart's vocabulary."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=960,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        eos_token_id=0,
    )
    return Qwen2ForCausalLM(config)


@pytest.fixture
def run_python() -> Callable[[str], str]:
    """Run a program in a fresh interpreter and return what it prints."""

    def run(program: str) -> str:
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
        return done.stdout

    return run
