"""Folders of models for runs that read their weights: the quickstart's architecture and tokenizer in other sizes.

Random bf16 weights, as published models have: a base is quantised while it is read, and one that is kept in fp32 holds
the same numbers as one in bf16.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tunebook.config.book import book_root

_FIVE_LAYERS = {"num_hidden_layers": 5, "max_position_embeddings": 32768}
WIDTHS: dict[str, dict[str, Any]] = {
    "qwen25_05b": {
        "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2,
        "num_hidden_layers": 4,
    },
    "qwen25_7b": {
        "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4,
    } | _FIVE_LAYERS,
    "llama3_8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    } | _FIVE_LAYERS,
}  # fmt: skip


def write_model(width: str, folder: Path, *, has_weights: bool = True) -> Path:
    """Write one of WIDTHS below `folder` and return its place; drawn on a GPU where there is one."""
    model = folder / width
    shutil.rmtree(model, ignore_errors=True)
    shutil.copytree(book_root() / "recipes" / "quickstart" / "model", model)
    content = json.loads((model / "config.json").read_text()) | {"dtype": "bfloat16", "initializer_range": 0.02}
    content |= WIDTHS[width]
    for name in ("layer_types", "head_dim"):
        content.pop(name, None)
    (model / "config.json").write_text(json.dumps(content))
    if has_weights:
        _write_weights(model)
    return model


def _write_weights(model: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        drawn = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), dtype=torch.bfloat16)
    drawn.to("cpu").save_pretrained(model)
