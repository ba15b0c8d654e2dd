"""Which architectures leak between packed documents, tested on small models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tunebook.facts.architectures import LEAKING_ARCHITECTURES, LEAKING_THROUGH_MASKS, VARLEN_ARCHITECTURES

# By the names that architectures have for them; each takes those that it knows.
SMALL: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 16, "max_position_embeddings": 256, "pad_token_id": 1, "bos_token_id": 0,
    "eos_token_id": 1, "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "n_embd": 64, "n_head": 4,
    "n_layer": 4, "n_positions": 256, "n_inner": 64, "moe_intermediate_size": 32, "n_routed_experts": 4, "n_group": 1,
    "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
    "v_head_dim": 16, "d_model": 64, "n_heads": 4, "n_layers": 4, "attn_pdrop": 0.0, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "hidden_dropout": 0.0, "attention_dropout": 0.0, "mamba_chunk_size": 16, "mamba_d_state": 16,
}  # fmt: skip
_CONVOLVING = ["conv", "full_attention"] * 2
_MAMBA = {"mamba_d_state": 16, "mamba_headdim": 16, "chunk_size": 16, "layers_block_type": ["mamba", "hybrid"] * 2}
MORE: dict[str, dict[str, Any]] = {
    "Lfm2ForCausalLM": {"layer_types": _CONVOLVING},
    "Lfm2MoeForCausalLM": {"layer_types": _CONVOLVING, "num_dense_layers": 1},
    "Mamba2ForCausalLM": {"num_heads": 8, "expand": 2},
    "ZambaForCausalLM": {"num_hidden_layers": 6, "attn_layer_period": 2, "attn_layer_offset": 1, "n_mamba_heads": 2,
                         "use_mamba_kernels": False},
    "Zamba2ForCausalLM": {"n_mamba_heads": 8, **_MAMBA},
    "xLSTMForCausalLM": {"num_heads": 4, "num_blocks": 2},
}  # fmt: skip
WORKED_OUT = {"FalconForCausalLM": "head_dim", "xLSTMForCausalLM": "v_head_dim"}  # by the config, which takes none
HALF = 20  # tokens of each document
# Of those with a config for text alone, that one: the others bring a vision tower of its full size.
KINDS = {name: kind for kind, name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items(), key=lambda pair: len(pair[0]))}


def moved(architecture):
    """The largest change of the second document's logits when the first one changes."""
    sizes = SMALL | MORE.get(architecture, {})
    sizes.pop(WORKED_OUT.get(architecture), None)
    config = AutoConfig.for_model(KINDS[architecture], **sizes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    row = torch.randint(2, 120, (1, 2 * HALF))
    other = torch.cat([torch.full((1, HALF), 5), row[:, HALF:]], dim=1)
    positions = torch.arange(HALF).repeat(2)[None]
    with torch.no_grad():
        first, second = (
            model(input_ids=ids, position_ids=positions, use_cache=False).logits[:, HALF:] for ids in (row, other)
        )
    return float((first - second).abs().max())


@pytest.mark.filterwarnings("ignore")  # of architectures, about sizes that no published model has
@pytest.mark.parametrize("architecture", sorted(LEAKING_ARCHITECTURES | LEAKING_THROUGH_MASKS))
def test_documents_reach_each_other(architecture):
    assert moved(architecture) > 1e-4


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("architecture", sorted(VARLEN_ARCHITECTURES))
def test_documents_do_not_reach_each_other(architecture):
    assert moved(architecture) < 1e-5
