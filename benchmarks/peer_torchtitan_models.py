"""Sizes that torchtitan 0.2 does not list, told to it by `--experimental.custom_import`; its models are as they are.

Qwen2.5-3B is torchtitan's Qwen3 without norms of queries and keys: the same matrices, less Qwen2.5's three bias
vectors a layer (92,160 numbers of 3.09 billion).
"""

from __future__ import annotations

from typing import Any

from torchtitan.models.qwen3 import Qwen3ModelArgs, qwen3_args  # type: ignore[import-not-found]

_QWEN25_3B: dict[str, Any] = {
    "vocab_size": 151936, "dim": 2048, "head_dim": 128, "n_layers": 36, "n_heads": 16, "n_kv_heads": 2,
    "hidden_dim": 11008, "qk_norm": False, "rope_theta": 1000000, "enable_weight_tying": True,
}  # fmt: skip
_BY_DOCUMENT: dict[str, Any] = {"attn_type": "varlen", "attn_mask_type": "block_causal"}

qwen3_args["2.5-3B"] = Qwen3ModelArgs(**_QWEN25_3B)
qwen3_args["2.5-3B_varlen"] = Qwen3ModelArgs(**_QWEN25_3B, **_BY_DOCUMENT)
