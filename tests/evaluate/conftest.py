"""A tiny real model and the quickstart's tokenizer, and an environment that evaluations may change."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

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

from tunebook.config.choices import Attention, Compute, Contamination, Generation, MasterWeights, PackingMode, Weights
from tunebook.config.frozen import config_to_yaml, plain_config
from tunebook.config.schema import (
    AttentionConfig,
    DatasetConfig,
    EvaluationConfig,
    HardwareConfig,
    ModelConfig,
    PackingConfig,
    PrecisionConfig,
    RunConfig,
)
from tunebook.evaluate.harness import prepare_environment
from tunebook.record.model_origin import ORIGIN_FILE

_CHANGED = (
    "TQDM_DISABLE", "HF_DATASETS_DISABLE_PROGRESS_BARS", "TOKENIZERS_PARALLELISM", "HF_ALLOW_CODE_EVAL",
    "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "NLTK_ALLOW_PROXIED_URLOPEN",
)  # fmt: skip


@pytest.fixture
def quiet_harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a worker, restored after the test."""
    for name in _CHANGED:
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("NLTK_DATA", str(tmp_path / "nltk_data"))
    prepare_environment(is_offline=True)


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    return tmp_path / "outputs"


@pytest.fixture
def make_run(outputs: Path) -> Callable[..., Path]:
    """`make_run("tiny", 5, "failed")`: a run of that minute and how it ended; it has no model."""

    def make(recipe: str, minute: int, state: str = "finished") -> Path:
        folder = outputs / recipe / f"2026-01-02T03-{minute:02d}-00Z"
        folder.mkdir(parents=True)
        (folder / "run.yaml").write_text("")
        (folder / "manifest.json").write_text(json.dumps({"format": 1, "status": {"state": state, "reason": None}}))
        return folder

    return make


def model_folder(folder: Path, weights: str = "model.safetensors") -> Path:
    """Make a folder that looks like a model."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / weights).write_text("")
    return folder


def write_origin(model: Path) -> None:
    """Say of an exported model from which run it comes."""
    origin = {
        "format": 1, "run": "tiny/x", "recipe": "tiny", "config_sha256": "c", "tokenizer_sha256": "t",
        "chat_template_sha256": "t", "system_prompt": "Be short.", "system_prompt_sha256": "s",
    }  # fmt: skip
    (model / ORIGIN_FILE).write_text(json.dumps(origin))


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
    return make_known_model()


def make_known_model() -> PreTrainedModel:
    """A real Qwen2 that looks up the last word: its layer is zero, its head is the table above."""
    num_words = len(VOCABULARY)
    config = Qwen2Config(
        vocab_size=num_words, hidden_size=num_words, intermediate_size=num_words, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
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


@pytest.fixture(scope="session")
def known_tokenizer() -> PreTrainedTokenizerBase:
    """A token per word of the known model; no chat template."""
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(VOCABULARY)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(["<pad>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", pad_token="<pad>")


@pytest.fixture(scope="session")
def known_folder(tmp_path_factory: pytest.TempPathFactory, known_tokenizer: PreTrainedTokenizerBase) -> Path:
    """The known model on disk; not to be changed."""
    folder = tmp_path_factory.mktemp("known")
    make_known_model().save_pretrained(folder)
    known_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def task_file(tmp_path: Path) -> Callable[[str], Path]:
    """`task_file("choice")`: a copy of the task in the folder tasks/ next to this file, with its data."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    for file in (Path(__file__).parent / "tasks").iterdir():
        text = file.read_text().replace("FOLDER", str(folder)).replace("CACHE", str(folder / "cache"))
        (folder / file.name).write_text(text)
    return lambda name: folder / f"{name}.yaml"


@pytest.fixture
def known_run(tmp_path: Path, known_folder: Path) -> Callable[..., Path]:
    """`known_run(files, batch_size=2)`: a run folder whose training starts from the known model, with these tasks."""

    def write(tasks: list[Path], **settings: Any) -> Path:
        (tmp_path / "run").mkdir()
        evaluation = EvaluationConfig(
            tasks=[str(file) for file in tasks], contamination=Contamination.disabled, **settings
        )
        model = ModelConfig(path=str(known_folder), weights=Weights.pretrained)
        (tmp_path / "run" / "run.yaml").write_text(config_to_yaml(cpu_run(model=model, evaluation=evaluation)))
        return tmp_path / "run"

    return write


QUICKSTART = "book:recipes/quickstart/tasks/quickstart.yaml"


def cpu_run(**sections: object) -> RunConfig:
    """The quickstart's model and data in fp32 on a CPU; `sections` replace parts of the configuration."""
    usual = {
        "recipe": "quickstart",
        "model": ModelConfig(path="book:recipes/quickstart/model", weights=Weights.random),
        "dataset": DatasetConfig(path="book:recipes/quickstart/data/train.jsonl"),
        "attention": AttentionConfig(implementation=Attention.sdpa),
        "precision": PrecisionConfig(compute=Compute.fp32, master_weights=MasterWeights.fp32),
        "packing": PackingConfig(mode=PackingMode.isolated),
        "hardware": HardwareConfig(generation=Generation.cpu, gpus_per_node=1),
        "evaluation": EvaluationConfig(tasks=[QUICKSTART]),
    }
    return plain_config(**usual | sections)


@pytest.fixture(scope="session")
def cpu_config() -> RunConfig:
    """The quickstart's model and data in fp32 on a CPU; not to be changed."""
    return cpu_run()
