"""What evaluation and chat share; loading a run's folder is tried in chat/test_loading.py and test_worker.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tunebook.config.choices import Attention, Compute, Generation, Weights
from tunebook.config.compose import compose
from tunebook.config.schema import RunConfig
from tunebook.data.template import template_hash
from tunebook.errors import DataError
from tunebook.evaluate.bound_model import check_tokenizer, compute_dtype, load_trained, stop_ids, uses_gpu
from tunebook.model.tokenizer import tokenizer_hash


@pytest.fixture
def config() -> RunConfig:
    config = compose("quickstart", []).config
    config.attention.implementation = Attention.flash_attention_2
    config.precision.compute = Compute.fp32
    config.hardware.generation = Generation.cpu
    return config


def manifest(run: Path, **hashes: object) -> None:
    recorded = {"format": 1, "chat_template_sha256": None, "tokenizer_sha256": None} | hashes
    (run / "manifest.json").write_text(json.dumps(recorded))


def test_hashes_as_in_training_pass(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    check_tokenizer(tmp_path, tokenizer)  # nothing recorded, nothing compared
    manifest(tmp_path)
    check_tokenizer(tmp_path, tokenizer)
    manifest(tmp_path, chat_template_sha256=template_hash(tokenizer), tokenizer_sha256=tokenizer_hash(tokenizer))
    before = tokenizer.pad_token
    check_tokenizer(tmp_path, tokenizer)
    assert tokenizer.pad_token == before


@pytest.mark.parametrize(
    ("hash", "problem_id"),
    [("chat_template_sha256", "template-changed"), ("tokenizer_sha256", "tokenizer-changed")],
)
def test_other_hashes_are_an_error(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, hash: str, problem_id: str
) -> None:
    manifest(tmp_path, **{hash: "0" * 64})
    with pytest.raises(DataError, match=r"is not the one that .* was trained with") as raised:
        check_tokenizer(tmp_path, tokenizer)
    assert raised.value.problem_id == problem_id


@pytest.mark.parametrize(("named", "expected"), [(None, [2]), (0, [0, 2]), ([7, 2], [2, 7])])
def test_generation_stops_at_what_was_trained_and_at_what_the_model_names(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, named: Any, expected: list[int]
) -> None:
    assert model.generation_config is not None
    model.generation_config.eos_token_id = named
    assert tokenizer.eos_token_id == 2
    assert stop_ids(model, tokenizer) == expected


@pytest.mark.parametrize(
    ("compute", "dtype"),
    [
        (Compute.fp32, None),
        (Compute.bf16, torch.bfloat16),
        (Compute.fp8, torch.bfloat16),
        (Compute.fp16, torch.float16),
    ],
)
def test_products_are_computed_as_in_training(config: RunConfig, compute: Compute, dtype: torch.dtype | None) -> None:
    config.precision.compute = compute
    assert compute_dtype(config) is dtype


def test_a_run_made_for_a_cpu_stays_there(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not uses_gpu(config)
    config.hardware.generation = Generation.hopper
    assert uses_gpu(config)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not uses_gpu(config)


def test_without_a_folder_it_is_what_training_starts_from_and_with_one_that_folders(
    config: RunConfig, tmp_path: Path
) -> None:
    start: Any = load_trained(config, None)
    assert start.config._attn_implementation == "sdpa"  # packed rows' kernels have no cache
    trained: Any = load_trained(config, None)
    with torch.no_grad():
        trained.model.norm.weight.fill_(2.0)
    trained.save_pretrained(tmp_path)
    loaded: Any = load_trained(config, tmp_path)
    assert loaded.model.norm.weight.tolist() == [2.0] * 192
    assert torch.equal(loaded.model.embed_tokens.weight, start.model.embed_tokens.weight)
    assert config.model.weights is Weights.random  # the run's own configuration is left as it is
