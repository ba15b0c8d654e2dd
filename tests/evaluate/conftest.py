"""A tiny real model and the quickstart's tokenizer, and an environment that evaluations may change."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from tunebook.config.choices import Attention, Compute, Generation, MasterWeights, PackingMode, Weights
from tunebook.config.compose import compose
from tunebook.config.frozen import config_to_yaml
from tunebook.config.schema import EvaluationConfig, ModelConfig, RunConfig
from tunebook.evaluate.harness import prepare_environment

_CHANGED = (
    "TQDM_DISABLE", "HF_DATASETS_DISABLE_PROGRESS_BARS", "TOKENIZERS_PARALLELISM", "HF_ALLOW_CODE_EVAL",
    "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "NLTK_ALLOW_PROXIED_URLOPEN",
)  # fmt: skip


@pytest.fixture
def quiet_harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a worker, taken back after the test."""
    for name in _CHANGED:
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("NLTK_DATA", str(tmp_path / "nltk_data"))
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


@pytest.fixture
def model(small_qwen2: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    """One layer, random weights, the quickstart's vocabulary."""
    return small_qwen2(
        vocab_size=960,
        num_hidden_layers=1,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=0,
    )


@pytest.fixture
def run_python() -> Callable[[str], str]:
    """Run a program in a fresh interpreter and return what it prints."""

    def run(program: str) -> str:
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
        return done.stdout

    return run


# A model whose every probability is known: what follows a word how often; the rest is shared by all other words.
VOCABULARY = ("<pad>", "</s>", "a", "b", "c", "d")
NEXT = {
    "</s>": {"a": 0.5, "b": 0.25},
    "a": {"b": 0.5, "c": 0.25, "d": 0.125},
    "b": {"c": 0.5, "d": 0.25, "a": 0.125},
    "c": {"d": 0.5, "a": 0.25, "b": 0.125},
    "d": {"</s>": 0.5, "a": 0.25, "b": 0.125},
}


@pytest.fixture
def known_model() -> PreTrainedModel:
    """A real Qwen2 that does nothing but look up the last word: its one layer is zero, its head is the table above."""
    num_words = len(VOCABULARY)
    config = Qwen2Config(
        vocab_size=num_words,
        hidden_size=num_words,
        intermediate_size=num_words,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    model = Qwen2ForCausalLM(config)
    logits = torch.zeros(num_words, num_words)
    for row, word in zip(logits, VOCABULARY, strict=True):
        given = NEXT.get(word, {})
        rest = (1 - sum(given.values())) / (num_words - len(given))
        row.copy_(torch.tensor([given.get(other, rest) for other in VOCABULARY]).log())
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(1 if "norm" in name else 0)
        model.model.embed_tokens.weight.copy_(torch.eye(num_words))
        model.lm_head.weight.copy_(logits.T / num_words**0.5)  # the norm of a row with a single one is the root of this
    return model


@pytest.fixture
def known_tokenizer() -> PreTrainedTokenizerBase:
    """A token per word of the known model; no chat template."""
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(VOCABULARY)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(["<pad>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", pad_token="<pad>")


@pytest.fixture
def task_file(tmp_path: Path) -> Callable[[str], Path]:
    """`task_file("choice")`: a copy of the task in the folder tasks/ beside this, with its data."""
    source, folder = Path(__file__).parent / "tasks", tmp_path / "tasks"

    def copy(name: str) -> Path:
        folder.mkdir(exist_ok=True)
        for data in source.glob("*.jsonl"):
            if not (folder / data.name).exists():
                (folder / data.name).write_text(data.read_text())
        text = (source / f"{name}.yaml").read_text()
        file = folder / f"{name}.yaml"
        file.write_text(text.replace("FOLDER", str(folder)).replace("CACHE", str(tmp_path / "cache")))
        return file

    return copy


@pytest.fixture(scope="session")
def cpu_config() -> RunConfig:
    """The quickstart, resolved for a CPU."""
    config = compose("quickstart", []).config
    config.attention.implementation = Attention.sdpa
    config.precision.compute = Compute.fp32
    config.precision.master_weights = MasterWeights.fp32
    config.packing.mode = PackingMode.isolated
    config.hardware.generation = Generation.cpu
    return config


@pytest.fixture
def known_run(
    tmp_path: Path, known_model: PreTrainedModel, known_tokenizer: PreTrainedTokenizerBase, cpu_config: RunConfig
) -> Callable[..., Path]:
    """`known_run(files, batch_size=2)`: a run folder whose training starts from the known model, with these tasks."""

    def make(files: list[Path], **settings: object) -> Path:
        folder = tmp_path / "known"
        if not folder.exists():
            known_model.save_pretrained(folder)
            known_tokenizer.save_pretrained(folder)
        config = replace(
            cpu_config,
            model=ModelConfig(path=str(folder), weights=Weights.pretrained),
            evaluation=EvaluationConfig(tasks=[str(file) for file in files], **settings),  # type: ignore[arg-type]
        )
        run = tmp_path / "run"
        run.mkdir(exist_ok=True)
        (run / "run.yaml").write_text(config_to_yaml(config))
        return run

    return make
