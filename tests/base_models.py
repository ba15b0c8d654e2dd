"""A base model's folder for tests: a small Llama's config.json, with changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tunebook.config.choices import Weights
from tunebook.config.schema import ModelConfig

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float16", "num_hidden_layers": 2,
    "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 32,
    "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip


def write_model(folder: Path, text: str | None = None, **changes: Any) -> ModelConfig:
    """A model in a folder whose config.json says this, or holds `text`."""
    stated = {key: value for key, value in (LLAMA | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(stated) if text is None else text)
    return ModelConfig(path=str(folder), weights=Weights.random)
