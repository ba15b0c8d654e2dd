"""The blocks of a model, by the class that transformers names."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tunebook.model.blocks import transformer_blocks


def test_blocks_are_found_by_name_and_nothing_else_is(project_root):
    architecture = AutoConfig.from_pretrained(project_root / "recipes" / "quickstart" / "model")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(architecture)
    blocks = transformer_blocks(model)
    assert list(blocks) == ["model.layers.0", "model.layers.1"]
    assert list(blocks.values()) == list(model.model.layers)


def test_a_model_that_names_no_blocks_has_none():
    assert transformer_blocks(torch.nn.Linear(2, 2)) == {}
