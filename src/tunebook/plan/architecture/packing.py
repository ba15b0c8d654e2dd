"""Find out whether an architecture keeps packed documents apart: the leak probe, on a small model with random weights.

The model is of the same class, with the switches of the model's config and a layer of each kind, on a CPU in fp32. It
is asked once with attention by a mask and once by the documents' lengths. Layers that carry a state along the row are
computed as `model.linear_attention` does where their package is missing, so no package is needed to find out.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch

from tunebook.config.choices import Compute
from tunebook.config.model_facts import LENGTHS, MASK
from tunebook.facts.attention import BY_DOCUMENT, WITHOUT_KERNEL
from tunebook.model.linear_attention import isolate_documents
from tunebook.model.load import auto_class
from tunebook.model.positions import position_by_document
from tunebook.model.varlen_attention import register
from tunebook.plan.architecture.layers import quiet, shortened, stated_kinds
from tunebook.train.isolation import leaks, measure_isolation, tolerance

# By the names that architectures have for them; each takes those that it knows.
_SMALL: dict[str, Any] = {
    "vocab_size": 128, "max_position_embeddings": 256, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 1,
    "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16,
    "n_embd": 64, "n_head": 4, "n_positions": 256, "n_inner": 64, "attn_pdrop": 0.0, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "hidden_dropout": 0.0, "attention_dropout": 0.0,
    "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "top_k_experts": 2,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
    "index_topk": 8, "index_n_heads": 4, "index_head_dim": 32, "index_block_size": 8, "index_topk_blocks": 2,
    "mamba_chunk_size": 16, "mamba_d_state": 16, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128,
    "mamba_n_groups": 2, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16,
    "vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 16,
}  # fmt: skip
_LARGEST = 50_000_000  # parameters of a small model


def isolation_of(architecture: Any, config: Any, *, has_experts: bool) -> dict[str, bool]:
    """`LayerFacts.isolates` of a model's class and config; without a way of attention that could not be tried."""
    isolates = {}
    for way, attention in ((MASK, WITHOUT_KERNEL.name), (LENGTHS, BY_DOCUMENT.value)):
        register(BY_DOCUMENT)
        model = small_model(config, attention)
        if type(model) is not architecture:
            continue
        put_back = isolate_documents(model, is_on_cpu=True)
        position_by_document(model)
        try:
            found = _is_isolated(model, has_experts)
        finally:
            put_back()
        if found is not None:
            isolates[way] = found
    return isolates


def small_model(config: Any, attention: str) -> Any:
    """A small model like `config`; None if it cannot be made small."""
    loader = auto_class(config)
    options = {"attn_implementation": attention, "dtype": torch.float32, "trust_remote_code": False}
    try:
        with quiet(), torch.random.fork_rng(devices=[]):
            small = _small(shortened(config, _places(config)))
            with torch.device("meta"):
                num_parameters = loader.from_config(copy.deepcopy(small), **options).num_parameters()
            if num_parameters > _LARGEST:
                return None
            torch.manual_seed(0)
            return loader.from_config(small, **options).eval()
    except Exception:  # of any type: architectures check their sizes in various ways, or not at all
        return None


def _places(config: Any) -> list[int]:
    """Layers that stand for all: one of each kind that the config states, or the first ones."""
    kinds = stated_kinds(config)
    of_each = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    return of_each if len(of_each) > 1 else list(range(min(len(kinds), 4)))


def _small(config: Any) -> Any:
    """A config of small sizes with the switches of another, as are its parts for images and sound."""
    values = config.to_dict()
    parts = {name: getattr(config, name, None) for name in config.sub_configs}
    changed = {name: _small(part) for name, part in parts.items() if part is not None}
    if not parts:
        changed = {name: size for name, size in _SMALL.items() if isinstance(values.get(name), int | float)}
        changed = {name: size for name, size in changed.items() if values[name]}  # 0: without that part
    return type(config)(**values | changed)


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
            found = measure_isolation(_Forward(model), _SMALL["vocab_size"])
    except ValueError as error:
        return False if "packed" in str(error) else None
    except Exception:  # as above
        return None
    if leaks(found, allowed):
        return False
    return True if allowed.sees_leaks(found) else None


class _Forward:
    """The forward pass of a model over one packed row, with the inputs of TRL's collator, as `isolation.Forward`."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def logits(self, documents: list[list[int]]) -> torch.Tensor:
        """The logits of all tokens."""
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
        """Nothing: here a loss would follow from the logits."""
        return 0.0, 0
