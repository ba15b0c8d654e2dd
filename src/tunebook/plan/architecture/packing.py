"""Find out whether an architecture keeps packed documents apart: the leak probe, on a small model with random weights.

The model is of the same class, with the switches of the model's config and a layer of each kind, on a CPU in fp32. It
is asked once with attention by a mask and once by the documents' lengths. Layers that carry a state along the row are
computed as `model.linear_attention` does where their package is missing, so no package is needed to find out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tunebook.config.choices import Compute
from tunebook.config.model_facts import LENGTHS, MASK
from tunebook.facts.attention import BY_DOCUMENT, WITHOUT_KERNEL
from tunebook.model.linear_attention import isolate_documents, packages_for_packing
from tunebook.model.varlen_attention import register
from tunebook.plan.architecture.layers import quiet, shortened, stated_kinds
from tunebook.train.isolation import all_tokens_chosen, leaks, measure_isolation, tolerance

# By the names that architectures have for them; each takes those that it knows.
SMALL: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 16, "max_position_embeddings": 256, "pad_token_id": 1, "bos_token_id": 0,
    "eos_token_id": 1, "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "n_embd": 64, "n_head": 4,
    "n_layer": 4, "n_positions": 256, "n_inner": 64, "moe_intermediate_size": 32, "n_routed_experts": 4, "n_group": 1,
    "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
    "v_head_dim": 16, "d_model": 64, "n_heads": 4, "n_layers": 4, "attn_pdrop": 0.0, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "hidden_dropout": 0.0, "attention_dropout": 0.0, "mamba_chunk_size": 16, "mamba_d_state": 16,
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128, "mamba_n_groups": 2, "mamba_num_heads": 8,
    "mamba_head_dim": 16, "ssm_state_size": 16, "top_k_experts": 2, "vocab_size_per_layer_input": 128,
    "hidden_size_per_layer_input": 16, "index_topk": 8, "index_n_heads": 4, "index_head_dim": 32,
    "index_block_size": 8, "index_topk_blocks": 2,
}  # fmt: skip
_CONVOLVING = ["conv", "full_attention"] * 2
_MAMBA = {"mamba_d_state": 16, "mamba_headdim": 16, "chunk_size": 16, "layers_block_type": ["mamba", "hybrid"] * 2}
_MORE: dict[str, dict[str, Any]] = {
    "BambaForCausalLM": {"attn_layer_indices": [1, 3]},
    "GraniteMoeHybridForCausalLM": {"layer_types": ["mamba", "attention"] * 2},
    "Lfm2ForCausalLM": {"layer_types": _CONVOLVING},
    "Lfm2MoeForCausalLM": {"layer_types": _CONVOLVING, "num_dense_layers": 1},
    "Mamba2ForCausalLM": {"num_heads": 8, "expand": 2},
    "MiniMaxM3VLForCausalLM": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
    "ZambaForCausalLM": {"num_hidden_layers": 6, "attn_layer_period": 2, "attn_layer_offset": 1, "n_mamba_heads": 2},
    "Zamba2ForCausalLM": {"n_mamba_heads": 8, **_MAMBA},
    "xLSTMForCausalLM": {"num_heads": 4, "num_blocks": 2},
}  # fmt: skip
_COMPUTED = {"FalconForCausalLM": "head_dim", "xLSTMForCausalLM": "v_head_dim"}  # by the config, which takes none
# Of those with a config for text alone, that one: the others bring a vision tower of its full size by default.
_KINDS = {name: kind for kind, name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items(), key=lambda pair: len(pair[0]))}
_LARGEST = 20_000_000  # parameters of a small model


def packing_facts(architecture: str, config: Any, *, has_experts: bool = False) -> dict[str, Any]:
    """What `LayerFacts` says about packed rows; without a way of attention that could not be tried.

    `config`: the model's config, or None for that of the architecture's defaults.
    """
    if architecture not in _KINDS:  # code of the model's own
        return {"isolates": {}, "packing_packages": []}
    isolates, packages = {}, set[str]()
    for way, attention in ((MASK, WITHOUT_KERNEL.name), (LENGTHS, BY_DOCUMENT.value)):
        register(BY_DOCUMENT)
        model = small_model(architecture, config, attention)
        if model is None:
            continue
        packages |= set(packages_for_packing(model))
        put_back = isolate_documents(model, is_on_cpu=True)
        try:
            found = _is_isolated(model, has_experts)
        finally:
            put_back()
        if found is not None:
            isolates[way] = found
    return {"isolates": isolates, "packing_packages": sorted(packages)}


def small_model(architecture: str, config: Any, attention: str) -> Any:
    """A small model of an architecture, like `config` if that can be made small, else by default; None if it cannot."""
    loader: Any = AutoModelForCausalLM
    sizes = SMALL | _MORE.get(architecture, {})
    sizes.pop(_COMPUTED.get(architecture, ""), None)
    default: Callable[[], Any] = partial(AutoConfig.for_model, _KINDS[architecture], **sizes)
    for make in (partial(_like, config, has_towers=False), partial(_like, config, has_towers=True), default):
        try:
            with quiet(), torch.random.fork_rng(devices=[]):
                made = make()
                options = {"attn_implementation": attention, "dtype": torch.float32}
                with torch.device("meta"):
                    planned = loader.from_config(copy.deepcopy(made), **options)
                if type(planned).__name__ != architecture or planned.num_parameters() > _LARGEST:
                    continue
                torch.manual_seed(0)
                return loader.from_config(made, **options).eval()
        except Exception:  # of any type: architectures check their sizes in various ways, or not at all
            continue
    return None


def _like(config: Any, *, has_towers: bool) -> Any:
    """A small config with the switches of another, and with one layer of each kind if that lists its layers' kinds.

    `has_towers`: parts for images and sound are made small; otherwise they are left out, where that is possible.
    """
    text = config.get_text_config(decoder=True)
    if text is not config:
        parts = {name: getattr(config, name, None) for name in config.sub_configs}
        small = {
            name: _like(part, has_towers=False) if part is text or (has_towers and part is not None) else None
            for name, part in parts.items()
        }
        return type(config)(**config.to_dict() | small)
    if kinds := stated_kinds(config):
        config = shortened(config, [kinds.index(kind) for kind in dict.fromkeys(kinds)])
    values = config.to_dict()
    small = {name: size for name, size in SMALL.items() if isinstance(values.get(name), int | float) and values[name]}
    if kinds:
        small.pop("num_hidden_layers")
    return type(config)(**values | small)


def _is_isolated(model: Any, has_experts: bool) -> bool | None:
    """Whether the second document's logits stay as they are; None if a leak could not be seen, or nothing computed.

    A state or a sum that another document reaches moves by a rounding at least, so nothing may move. Where experts are
    chosen, another document changes the shapes of their products.
    """
    allowed = tolerance(Compute.fp32, uses_tf32=False, has_experts=has_experts)
    if not has_experts:
        allowed = replace(allowed, moved=0.0)
    try:
        with quiet(), torch.no_grad():
            found = measure_isolation(_Forward(model), SMALL["vocab_size"])
    except ValueError as error:
        return False if "packed" in str(error) else None
    except Exception:  # as above
        return None
    if leaks(found, allowed):
        return False
    return True if allowed.sees_leaks(found) else None


class _Forward:
    """The forward pass of a model over one packed row, with the inputs of TRL's collator."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def logits(self, documents: list[list[int]]) -> torch.Tensor:
        """As `isolation.Forward`."""
        lengths = torch.tensor([len(document) for document in documents], dtype=torch.int32)
        ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0, dtype=torch.int32)])
        numbers = torch.arange(len(documents), dtype=torch.int32).repeat_interleave(lengths)[None]
        row = torch.tensor([token for document in documents for token in document])[None]
        positions = torch.cat([torch.arange(len(document)) for document in documents])[None]
        longest = int(lengths.max())
        logits: torch.Tensor = self._model(
            input_ids=row, position_ids=positions, use_cache=False, cu_seq_lens_q=ends, cu_seq_lens_k=ends,
            max_length_q=longest, max_length_k=longest, seq_idx=numbers,
        ).logits  # fmt: skip
        return logits[0].float()

    def loss(self, documents: list[list[int]]) -> tuple[float, int]:
        """As `isolation.Forward`."""
        parts = torch.split(self.logits(documents), [len(document) for document in documents])
        losses = [
            torch.nn.functional.cross_entropy(part[:-1], torch.tensor(document[1:]), reduction="sum")
            for part, document in zip(parts, documents, strict=True)
        ]
        return float(sum(losses)), sum(len(document) - 1 for document in documents)

    def all_tokens_chosen(self) -> AbstractContextManager[bool]:
        """As `isolation.Forward`."""
        return all_tokens_chosen(self._model)
