"""Which architectures keep packed documents apart, found by the leak probe on small models."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
import yaml
from transformers import AutoConfig, Qwen3NextConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.deepseek_v32 import modeling_deepseek_v32
from transformers.models.qwen3_next import modeling_qwen3_next

from tunebook.config.book import book_root
from tunebook.config.model_facts import ModelFacts
from tunebook.facts.architectures import VARLEN_ARCHITECTURES
from tunebook.model.linear_attention import packages_for_packing
from tunebook.model.load import architecture_from_facts
from tunebook.plan.architecture.packing import isolation_of, small_model
from tunebook.train.isolation import LENGTHS

pytestmark = pytest.mark.filterwarnings("ignore")  # of architectures, about sizes that no published model has

# With attention by a mask. Some take no positions, from which transformers finds where a document starts, or do not use
# them for the mask. Others carry a state along the row, and no kernel of theirs is told where documents end. MiniMax M3
# compares positions in a document with places in the row.
LEAKING = (
    "AfmoeForCausalLM", "BioGptForCausalLM", "BloomForCausalLM", "CpmAntForCausalLM", "DeepseekV4ForCausalLM",
    "FalconMambaForCausalLM", "GptOssForCausalLM", "InklingForCausalLM", "JambaForCausalLM", "MambaForCausalLM",
    "MiniMaxForCausalLM", "MiniMaxM3VLForCausalLM", "OPTForCausalLM", "OpenAIGPTLMHeadModel",
    "RecurrentGemmaForCausalLM", "RwkvForCausalLM",
)  # fmt: skip
# They carry a state, too, and are told. The packages that they need for it on a GPU.
HYBRID = {
    "BambaForCausalLM": ["fla-core"],
    "FalconH1ForCausalLM": ["fla-core"],
    "GraniteMoeHybridForCausalLM": ["fla-core"],
    "Lfm2ForCausalLM": [],
    "NemotronHForCausalLM": ["fla-core"],
    "OlmoHybridForCausalLM": ["fla-core"],
    "Qwen3NextForCausalLM": ["fla-core"],
    "Qwen3_5ForCausalLM": ["fla-core"],
    "Qwen3_5MoeForCausalLM": ["fla-core"],
}


def nightly(names):
    return [pytest.param(name, marks=pytest.mark.nightly) for name in names]


def config_of(architecture, **sizes):
    if architecture == "MiniMaxM3VLForCausalLM":
        sizes["layer_types"] = ["full_attention", "minimax_m3_sparse"] * 30
    kinds = [kind for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if name == architecture]
    return AutoConfig.for_model(min(kinds, key=len), **sizes)  # of text alone, if there is one


def facts_of(architecture, config=None):
    model = getattr(transformers, architecture)
    return isolation_of(model, config or config_of(architecture), has_experts="Moe" in architecture)


@pytest.mark.parametrize("architecture", ["BloomForCausalLM", *nightly(LEAKING)])
def test_documents_reach_each_other(architecture):
    assert facts_of(architecture)["mask"] is False


@pytest.mark.parametrize("architecture", ["BioGptForCausalLM", "OPTForCausalLM"])
def test_lengths_keep_apart_what_the_mask_does_not(architecture):
    assert facts_of(architecture) == {"mask": False, "lengths": True}


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", *nightly(sorted(VARLEN_ARCHITECTURES))])
def test_documents_do_not_reach_each_other(architecture):
    assert facts_of(architecture) == {"mask": True, "lengths": True}


@pytest.mark.parametrize("architecture", ["BambaForCausalLM", *nightly(HYBRID)])
def test_states_are_kept_apart_by_packages(architecture):
    assert facts_of(architecture) == {"mask": True, "lengths": True}
    assert packages_for_packing(small_model(config_of(architecture), "eager")) == HYBRID[architecture]


# They choose the tokens that each token attends to.
INDEXED = ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")


@pytest.mark.parametrize("architecture", INDEXED)
def test_chosen_tokens_are_of_the_same_document(architecture):
    assert small_model(config_of(architecture), "eager").config.index_topk < min(LENGTHS)
    assert facts_of(architecture)["mask"] is True


def test_an_indexer_that_ranks_the_tokens_of_other_documents_is_found(monkeypatch):
    """They would take the places of a document's own tokens; the mask is applied to what was chosen only."""
    forward = modeling_deepseek_v32.DeepseekV32Indexer.forward

    def without_mask(self, hidden, residual, positions, mask, *args, **kwargs):
        causal = torch.full_like(mask, torch.finfo(mask.dtype).min).triu(1)
        return forward(self, hidden, residual, positions, causal, *args, **kwargs)

    monkeypatch.setattr(modeling_deepseek_v32.DeepseekV32Indexer, "forward", without_mask)
    assert facts_of("DeepseekV32ForCausalLM")["mask"] is False


@pytest.mark.parametrize(
    ("architecture", "by_mask", "sizes"),
    [
        ("GraniteMoeHybridForCausalLM", False, {"layer_types": ["mamba", "attention"] * 2, "num_hidden_layers": 4}),
        ("GraniteMoeHybridForCausalLM", True, {"layer_types": ["mamba"] * 4, "num_hidden_layers": 4}),
        ("NemotronHForCausalLM", True, {"layers_block_type": ["mamba", "mlp", "attention"]}),
        ("FalconH1ForCausalLM", True, {"mamba_d_ssm": 1536, "mamba_n_heads": 24, "mamba_d_head": 64}),
    ],
)
def test_hybrids_of_published_sizes_are_tried(architecture, by_mask, sizes):
    """Granite's attention gives transformers' mask no positions, from which it finds where a document starts."""
    assert facts_of(architecture, config_of(architecture, **sizes)) == {"mask": by_mask, "lengths": True}


@pytest.mark.parametrize(
    ("name", "told_by"), [("torch_chunk_gated_delta_rule", "cu_seqlens"), ("causal_conv1d_fn", "seq_idx")]
)
def test_a_kernel_that_goes_on_past_the_end_of_a_document_is_found(monkeypatch, name, told_by):
    kernel = getattr(modeling_qwen3_next, name)
    monkeypatch.setattr(modeling_qwen3_next, name, lambda *args, **kwargs: kernel(*args, **kwargs | {told_by: None}))
    assert facts_of("Qwen3NextForCausalLM") == {"mask": False, "lengths": False}


def test_the_small_model_has_the_switches_and_kinds_of_layers_of_the_config():
    kinds = ["linear_attention", "linear_attention", "full_attention"] * 4
    config = Qwen3NextConfig(num_hidden_layers=12, layer_types=kinds, hidden_act="gelu")
    before = copy.deepcopy(config.to_dict())
    model = small_model(config, "eager")
    assert model.config.layer_types == ["linear_attention", "full_attention"]
    assert model.config.hidden_act == "gelu"
    assert model.config.hidden_size == 64
    assert config.to_dict() == before


@pytest.mark.parametrize("model", ["gemma4_e2b", *nightly(["gemma3_4b", "gemma4_12b"])])
def test_models_with_other_parts_than_text_are_tried(model):
    """With small ones; with layers that share keys and values, and sizes of their own."""
    facts = ModelFacts(**yaml.safe_load((book_root() / f"hydra_configs/model/{model}.yaml").read_text())["facts"])
    config = architecture_from_facts(facts)
    small = small_model(config, "eager").config.text_config
    assert small.layer_types == ["sliding_attention", "full_attention"] * (2 if model == "gemma4_e2b" else 1)
    assert getattr(small, "num_kv_shared_layers", 0) == (2 if model == "gemma4_e2b" else 0)
    assert facts_of(facts.architecture, config)["mask"] is True


def test_what_cannot_be_tried_is_unknown():
    assert facts_of("LlamaForCausalLM", config_of("MambaForCausalLM")) == {}  # of another class
    assert facts_of("LlamaForCausalLM", config_of("LlamaForCausalLM", hidden_act="none")) == {}
