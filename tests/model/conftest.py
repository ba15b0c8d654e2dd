"""Fixtures for packed rows: a small model twice, and a row of documents from the collator."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ..config.conftest import sound  # noqa: F401

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "tie_word_embeddings": False,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
TYPES = {architecture: kind for kind, architecture in reversed(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items())}
TOWER = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32,
    "patch_size": 16,
}  # fmt: skip


def small_config(architecture, **sizes):
    """The config of an architecture with these sizes of its text part, and a small image tower if it has one."""
    kind = TYPES[architecture]
    if "text_config" not in CONFIG_MAPPING[kind].sub_configs:
        return AutoConfig.for_model(kind, **sizes)
    of_all = {name: sizes[name] for name in ("tie_word_embeddings", "pad_token_id") if name in sizes}
    return AutoConfig.for_model(kind, text_config=sizes, vision_config=TOWER, **of_all)


def daily(names, *chosen):
    """Parameters of which only the chosen ones run every day, and the others at night."""
    return [pytest.param(name, marks=[] if name in chosen else pytest.mark.nightly) for name in names]


@pytest.fixture(scope="session")
def model_pair():
    """The same small model of an architecture twice: with sdpa, and with another attention."""

    def make(architecture, attention, **sizes):
        config = small_config(architecture, **(SMALL | sizes))
        torch.manual_seed(0)
        theirs = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="sdpa").eval()
        ours = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=attention.value).eval()
        ours.load_state_dict(theirs.state_dict())
        assert type(ours).__name__ == architecture
        return theirs, ours

    return make


@pytest.fixture(scope="session")
def packed_row():
    """A row of documents of these lengths: the inputs of every model, and those with the boundaries."""

    def make(lengths):
        ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        inputs = {
            "input_ids": torch.randint(3, SMALL["vocab_size"], (1, sum(lengths)), generator=torch.manual_seed(1)),
            "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        }
        longest = max(lengths)
        places = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
        return inputs, places

    return make
