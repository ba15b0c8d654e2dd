"""Small models of several architectures, as folders with a config.json."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

SIZES = {"hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4, "vocab_size": 100}
GROUPED = {"num_key_value_heads": 2}
QUIET = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}  # defaults may lie outside so small a vocabulary
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {**SIZES, **GROUPED, "num_hidden_layers": 3},
    "qwen2": {**SIZES, **GROUPED, "num_hidden_layers": 3, "tie_word_embeddings": True},
    "qwen3": {**SIZES, **GROUPED, "num_hidden_layers": 3, "head_dim": 32},
    "gpt2": {"n_embd": 64, "n_head": 4, "n_layer": 3, "vocab_size": 100, "n_positions": 512},
    "gemma2": {**SIZES, **GROUPED, "num_hidden_layers": 4, "head_dim": 32},
    "mixtral": {**SIZES, **GROUPED, "num_hidden_layers": 3, "num_local_experts": 4},
    "qwen3_moe": {
        **SIZES,
        **GROUPED,
        "num_hidden_layers": 3,
        "head_dim": 32,
        "moe_intermediate_size": 48,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    "gpt_oss": {**SIZES, **GROUPED, "num_hidden_layers": 3, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma3_text": {**SIZES, **GROUPED, "num_hidden_layers": 4, "head_dim": 32},
}
# As many layers as the text has: a tower must not be taken for it.
ARCHITECTURES["gemma3"] = {
    "text_config": ARCHITECTURES["gemma3_text"] | QUIET,
    "vision_config": {
        "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 4, "image_size": 28,
        "patch_size": 14,
    },
    "image_token_index": 5, "boi_token_index": 6, "eoi_token_index": 7, "mm_tokens_per_image": 4,
}  # fmt: skip


@pytest.fixture
def config_of() -> Callable[[str], Any]:
    """`config_of("gpt2")`: its small config, without dropout."""

    def make(kind: str) -> Any:
        without = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if kind == "gpt2" else {}
        config = AutoConfig.for_model(kind, **ARCHITECTURES[kind], **QUIET, **without)
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]]
        config.dtype = "bfloat16"
        return config

    return make


@pytest.fixture
def folder_of(config_of: Callable[[str], Any], tmp_path: Path) -> Callable[[str], Path]:
    """`folder_of("gpt2")`: a folder with its config.json."""

    def make(kind: str) -> Path:
        config_of(kind).save_pretrained(tmp_path / kind)
        return tmp_path / kind

    return make
