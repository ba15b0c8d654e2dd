"""Which architectures keep packed documents apart, found by the leak probe on small models."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import yaml
from transformers import AutoConfig, Qwen3NextConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.deepseek_v32 import modeling_deepseek_v32
from transformers.models.qwen3_next import modeling_qwen3_next

from tunebook.config.book import book_root
from tunebook.config.model_facts import ModelFacts
from tunebook.facts.architectures import VARLEN_ARCHITECTURES
from tunebook.model.load import architecture_from_facts
from tunebook.plan.architecture import packing
from tunebook.plan.architecture.packing import packing_facts, small_model
from tunebook.train import isolation
from tunebook.train.isolation import LENGTHS

pytestmark = pytest.mark.filterwarnings("ignore")  # of architectures, about sizes that no published model has

# Of all causal language models of transformers 5.24, with attention by a mask. Some take no positions, from which
# transformers finds where a document starts, or do not use them for the mask. Others carry a state along the row, and
# no kernel of theirs is told where documents end. MiniMax M3 compares positions in a document with places in the row.
LEAKING = (
    "AfmoeForCausalLM", "BailingHybridForCausalLM", "BioGptForCausalLM", "BloomForCausalLM", "CpmAntForCausalLM",
    "DeepseekV4ForCausalLM", "FalconMambaForCausalLM", "GptOssForCausalLM",
    "InklingForCausalLM", "JambaForCausalLM", "Mamba2ForCausalLM",
    "MambaForCausalLM",     "MiniMaxForCausalLM", "MiniMaxM3VLForCausalLM", "MptForCausalLM", "OPTForCausalLM",
    "OpenAIGPTLMHeadModel", "RecurrentGemmaForCausalLM",     "RwkvForCausalLM", "XGLMForCausalLM",
    "ZambaForCausalLM", "xLSTMForCausalLM",
)  # fmt: skip
# They carry a state, too, and are told. The packages that they need for it on a GPU.
HYBRID = {
    "BambaForCausalLM": ["fla-core"],
    "FalconH1ForCausalLM": ["fla-core"],
    "GraniteMoeHybridForCausalLM": ["fla-core"],
    "Lfm2ForCausalLM": [],
    "Lfm2MoeForCausalLM": [],
    "NemotronHForCausalLM": ["fla-core"],
    "OlmoHybridForCausalLM": ["fla-core"],
    "Qwen3NextForCausalLM": ["fla-core"],
    "Qwen3_5ForCausalLM": ["fla-core"],
    "Qwen3_5MoeForCausalLM": ["fla-core"],
    "Zamba2ForCausalLM": ["fla-core"],
}


# By default their image towers are as large as published ones, so a small model is made of a config.
WITH_TOWERS = {"Gemma3ForConditionalGeneration": "gemma3"}


def facts_of(architecture):
    config = AutoConfig.for_model(WITH_TOWERS[architecture]) if architecture in WITH_TOWERS else None
    return packing_facts(architecture, config, has_experts="Moe" in architecture)


@pytest.mark.parametrize("architecture", LEAKING)
def test_documents_reach_each_other(architecture):
    assert facts_of(architecture)["isolates"]["mask"] is False


@pytest.mark.parametrize("architecture", ["BioGptForCausalLM", "OPTForCausalLM"])
def test_lengths_keep_apart_what_the_mask_does_not(architecture):
    assert facts_of(architecture)["isolates"] == {"mask": False, "lengths": True}


@pytest.mark.parametrize("architecture", sorted(VARLEN_ARCHITECTURES))
def test_documents_do_not_reach_each_other(architecture):
    assert facts_of(architecture) == {"isolates": {"mask": True, "lengths": True}, "packing_packages": []}


@pytest.mark.parametrize("architecture", HYBRID)
def test_states_are_kept_apart_by_packages(architecture):
    by_mask = architecture != "GraniteMoeHybridForCausalLM"  # see test_hybrids_of_published_sizes_are_tried
    expected = {"isolates": {"mask": by_mask, "lengths": True}, "packing_packages": HYBRID[architecture]}
    assert facts_of(architecture) == expected


# They choose the tokens that each token attends to.
INDEXED = ("AXK2ForCausalLM", "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM", "HYV4ForCausalLM")


@pytest.mark.parametrize("architecture", INDEXED)
def test_chosen_tokens_are_of_the_same_document(architecture):
    assert small_model(architecture, None, "eager").config.index_topk < min(LENGTHS)
    assert packing_facts(architecture, None, has_experts=True)["isolates"]["mask"] is True


@pytest.mark.parametrize("architecture", INDEXED)
def test_only_the_choice_among_equal_scores_depends_on_the_rows_length(monkeypatch, architecture):
    """With the earliest of equal ones, which is the same in any row, a document has the logits that it has alone."""

    def earliest(scores, number, dim=-1, **_):
        values, places = torch.sort(scores, dim=dim, descending=True, stable=True)
        return torch.return_types.topk((values.narrow(dim, 0, number), places.narrow(dim, 0, number)))

    def measured():
        forward = packing._Forward(model := small_model(architecture, None, "eager"))
        monkeypatch.setattr(packing, "all_tokens_chosen", lambda _: contextlib.nullcontext(False))
        with torch.no_grad():
            return isolation.measure_isolation(forward, model.config.vocab_size)

    by_torch = measured()
    monkeypatch.setattr(torch.Tensor, "topk", earliest)
    found = measured()
    assert (by_torch.moved, by_torch.alone_median, found.moved, found.alone) == (0.0, 0.0, 0.0, 0.0)
    assert by_torch.alone > 0.01


def test_an_indexer_that_ranks_the_tokens_of_other_documents_is_found(monkeypatch):
    """They would take the places of a document's own tokens; the mask is applied to what was chosen only."""
    forward = modeling_deepseek_v32.DeepseekV32Indexer.forward

    def without_mask(self, hidden, residual, positions, mask, *args, **kwargs):
        causal = torch.full_like(mask, torch.finfo(mask.dtype).min).triu(1)
        return forward(self, hidden, residual, positions, causal, *args, **kwargs)

    monkeypatch.setattr(modeling_deepseek_v32.DeepseekV32Indexer, "forward", without_mask)
    assert packing_facts("DeepseekV32ForCausalLM", None, has_experts=True)["isolates"]["mask"] is False


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
    kind = next(kind for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if name == architecture)
    config = AutoConfig.for_model(kind, **sizes)
    facts = packing_facts(architecture, config)
    assert facts == {"isolates": {"mask": by_mask, "lengths": True}, "packing_packages": ["fla-core"]}


@pytest.mark.parametrize(
    ("name", "told_by"), [("torch_chunk_gated_delta_rule", "cu_seqlens"), ("causal_conv1d_fn", "seq_idx")]
)
def test_a_kernel_that_goes_on_past_the_end_of_a_document_is_found(monkeypatch, name, told_by):
    kernel = getattr(modeling_qwen3_next, name)
    monkeypatch.setattr(modeling_qwen3_next, name, lambda *args, **kwargs: kernel(*args, **kwargs | {told_by: None}))
    assert facts_of("Qwen3NextForCausalLM")["isolates"] == {"mask": False, "lengths": False}


def test_the_small_model_has_the_switches_and_kinds_of_layers_of_the_config():
    kinds = ["linear_attention", "linear_attention", "full_attention"] * 4
    config = Qwen3NextConfig(num_hidden_layers=12, layer_types=kinds, hidden_act="gelu")
    before = copy.deepcopy(config.to_dict())
    model = small_model("Qwen3NextForCausalLM", config, "eager")
    assert model.config.layer_types == ["linear_attention", "full_attention"]
    assert model.config.hidden_act == "gelu"
    assert model.config.hidden_size == 64
    assert config.to_dict() == before


@pytest.mark.parametrize("model", ["gemma3_4b", "gemma4_e2b", "gemma4_12b"])
def test_models_with_other_parts_than_text_are_tried(model):
    """Without those parts, or with small ones; with layers that share keys and values, and sizes of their own."""
    facts = ModelFacts(**yaml.safe_load((book_root() / f"hydra_configs/model/{model}.yaml").read_text())["facts"])
    config = architecture_from_facts(facts)
    small = small_model(facts.architecture, config, "eager").config.text_config
    assert small.layer_types == ["sliding_attention", "full_attention"] * (2 if model == "gemma4_e2b" else 1)
    assert getattr(small, "num_kv_shared_layers", 0) == (2 if model == "gemma4_e2b" else 0)
    assert packing_facts(facts.architecture, config)["isolates"] == {"mask": True, "lengths": True}


def test_what_cannot_be_tried_is_unknown():
    assert packing_facts("OfItsOwnForCausalLM", None) == {"isolates": {}, "packing_packages": []}
    mistaken = AutoConfig.for_model("llama", hidden_act="none")  # the architecture's defaults serve instead
    assert packing_facts("LlamaForCausalLM", mistaken)["isolates"]["mask"] is True
