"""What evaluation and chat share; loading a run's folder is tried in test_chat.py and test_worker.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tunebook.config.choices import Attention, Compute, Generation, Weights
from tunebook.config.compose import compose
from tunebook.config.schema import ModelConfig, RunConfig
from tunebook.errors import DoesNotFitError
from tunebook.evaluate import trained_model
from tunebook.evaluate.trained_model import (
    keep_converted,
    load_to_answer,
    load_trained,
    tokenizer_of_run,
    uses_gpu,
)


@pytest.fixture
def config() -> RunConfig:
    config = compose("quickstart", []).config
    config.attention.implementation = Attention.flash_attention_2
    config.precision.compute = Compute.fp32
    config.hardware.generation = Generation.cpu
    return config


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


def test_the_tokenizer_beside_the_weights_is_the_runs(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    base = ModelConfig(path="/somewhere/base", trust_remote_code=True)
    assert tokenizer_of_run(base, None) is base
    assert tokenizer_of_run(base, tmp_path) is base  # a checkpoint without one
    tokenizer.save_pretrained(tmp_path)
    assert tokenizer_of_run(base, tmp_path) == ModelConfig(path=str(tmp_path), trust_remote_code=True)


GIB = 2**30


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of 80 GiB that is not there; 1 GiB is free."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GIB, 80 * GIB))


@pytest.mark.usefixtures("card")
def test_a_model_that_does_not_fit_into_what_is_left_is_refused(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_with(error: Exception) -> None:
        def load(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr(trained_model, "load_trained", load)
        load_to_answer(config, None)

    monkeypatch.setattr(trained_model, "uses_gpu", lambda _: True)
    with pytest.raises(DoesNotFitError) as caught:
        fail_with(torch.OutOfMemoryError("CUDA out of memory."))
    assert caught.value.problem_id == "model-does-not-fit"
    with pytest.raises(RuntimeError, match="no kernel image"):
        fail_with(RuntimeError("CUDA error: no kernel image is available"))


@pytest.mark.usefixtures("card")
def test_a_part_that_stays_on_the_host_is_refused(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    model = SimpleNamespace(hf_device_map={"embed": 0, "lm_head": "cpu"})
    monkeypatch.setattr(trained_model, "load_trained", lambda *_, **__: model)
    monkeypatch.setattr(trained_model, "uses_gpu", lambda _: True)
    with pytest.raises(DoesNotFitError):
        load_to_answer(config, None, is_sharded=True)


@pytest.mark.parametrize(("free_bytes", "is_kept"), [(4000, True), (3999, False)])
def test_converted_weights_are_kept_if_they_take_half_of_the_free_memory(
    free_bytes: int, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free_bytes, 80 * GIB))
    wide = torch.nn.Parameter(torch.zeros(1000), requires_grad=False)  # as of a merged adapter's base: 1,000 x 2 bytes
    narrow = torch.nn.Parameter(torch.zeros(10, dtype=torch.bfloat16), requires_grad=False)
    keep_converted(torch.nn.ParameterList([wide, narrow]), torch.bfloat16)
    assert (wide.requires_grad, narrow.requires_grad) == (is_kept, False)


def test_logits_are_the_same_whether_converted_weights_are_kept_or_not(
    monkeypatch: pytest.MonkeyPatch,
    small_qwen2: Callable[..., PreTrainedModel],
    relative_difference: Callable[[torch.Tensor, torch.Tensor], float],
) -> None:
    model = small_qwen2(vocab_size=64, num_key_value_heads=2)
    found = []
    for free_bytes in (10**12, 0):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free_bytes: (free, free))
        keep_converted(model, torch.bfloat16)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            found.append(model(torch.arange(12)[None]).logits)
    assert found[0].dtype is torch.bfloat16
    assert relative_difference(*found) < torch.finfo(torch.bfloat16).eps / 2  # of one number; two passes differ less
