"""Weights get the names of published files: of stacked experts, separate matrices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")

EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "head_dim": 16,
}  # fmt: skip


@pytest.fixture
def base(layouts: Any, tmp_path: Path) -> Path:
    """Two layers of four experts, each with three matrices of its own in the file, and with two for all in memory."""
    folder: Path = layouts.write_base(tmp_path / "base", layouts.TINY | EXPERTS, "float32")
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    assert len([name for name in load_file(folder / "model.safetensors") if ".experts." in name]) == 2 * 4 * 3
    return folder


def test_shards_of_experts_are_exported_as_published(layouts: Any, base: Path, tmp_path: Path, export: Any) -> None:
    run = layouts.write_run(tmp_path / "outputs" / "tiny" / "run", base)
    layouts.write_checkpoint(run, "fsdp")
    folder = export(run).folder
    published, found = (load_file(place / "model.safetensors") for place in (base, folder))
    assert {name: value.shape for name, value in found.items()} == {
        name: value.shape for name, value in published.items()
    }
    loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    expected = layouts.trained(run, "fsdp")
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_adapters_on_both_parameters_of_experts_are_exported_and_merged(
    layouts: Any, base: Path, tmp_path: Path, export: Any
) -> None:
    run = layouts.write_run(tmp_path / "outputs" / "tiny" / "lora", base, peft="lora", target_modules=[], dropout=0.0)
    layouts.write_checkpoint(run, "zero3_adapter")
    expected = layouts.trained(run, "zero3_adapter")
    assert any(".experts.base_layer.lora_A." in name for name in expected)  # the adapter that another one is put on
    adapter = load_file(export(run).folder / "adapter_model.safetensors")
    assert set(adapter) == set(expected) and all(torch.equal(adapter[name], expected[name]) for name in expected)
    merged = load_file(export(run, merge=True, dtype="fp32").folder / "model.safetensors")
    published = load_file(base / "model.safetensors")
    assert set(merged) == set(published)
    changed = {name for name in merged if not torch.equal(merged[name], published[name])}
    assert changed == {name for name in published if ".experts." in name or "_proj" in name or ".gate." in name}
