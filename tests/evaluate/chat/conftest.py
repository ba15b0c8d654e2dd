"""A real model that answers what a test wants, and run folders around it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM

from tunebook.config.choices import Attention, Compute, Generation, PackingMode
from tunebook.config.compose import compose
from tunebook.config.frozen import config_to_yaml
from tunebook.data.template import template_hash
from tunebook.evaluate.chat import Sampling
from tunebook.evaluate.chat.model import ChatModel
from tunebook.evaluate.chat.session import Session
from tunebook.model.tokenizer import stop_ids, tokenizer_hash

CONTEXT_TOKENS = 96
Scripted = Callable[..., PreTrainedModel]


def successor_model(successors: dict[int, int], *, context: int = CONTEXT_TOKENS) -> PreTrainedModel:
    """A Qwen2 that writes `successors[t]` after token t, whatever came before: its layer adds nothing."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=832,
        hidden_size=256,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=context,
        tie_word_embeddings=False,
    )
    model: Any = Qwen2ForCausalLM(config)
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        for token, successor in successors.items():
            model.lm_head.weight[successor] += model.model.embed_tokens.weight[token]
    made: PreTrainedModel = model
    return made


@pytest.fixture
def scripted(tokenizer: PreTrainedTokenizerBase) -> Scripted:
    """A model that answers every prompt with one text and then `end`: the tokenizer's EOS unless a test says more."""

    def make(answer: str | Sequence[int], *, end: Sequence[int] | None = None, **options: Any) -> PreTrainedModel:
        encode: Any = tokenizer
        (newline,) = encode("\n")["input_ids"]  # the generation prompt ends with it
        tokens = encode(answer)["input_ids"] if isinstance(answer, str) else list(answer)
        chain = [newline, *tokens, *([tokenizer.eos_token_id] if end is None else end)]
        assert len(set(chain[:-1])) == len(chain) - 1, "a token that comes twice has one successor only"
        return successor_model(dict(pairwise(chain)), **options)

    return make


@pytest.fixture
def chat_model(tokenizer: PreTrainedTokenizerBase, scripted: Scripted) -> Callable[..., ChatModel]:
    """The same, ready to chat."""

    def make(answer: str | Sequence[int], **options: Any) -> ChatModel:
        model = scripted(answer, **options)
        return ChatModel(model, tokenizer, stop_ids=stop_ids(model, tokenizer))

    return make


@pytest.fixture
def session(chat_model: Callable[..., ChatModel]) -> Callable[..., Session]:
    """A conversation with a model that always answers the same."""

    def make(
        answer: str | Sequence[int], *, max_new_tokens: int = 16, system: str | None = None, **options: Any
    ) -> Session:
        sampling = Sampling(max_new_tokens=max_new_tokens, temperature=0.0, seed=0)
        return Session(chat_model(answer, **options), sampling, system)

    return make


@pytest.fixture
def run(tmp_path: Path, tokenizer: PreTrainedTokenizerBase, scripted: Scripted) -> Path:
    """A finished run whose model answers "apple bird"."""
    config = compose("quickstart", ["training.seed=3"]).config
    config.attention.implementation = Attention.sdpa
    config.precision.compute = Compute.fp32
    config.packing.mode = PackingMode.isolated
    config.hardware.generation = Generation.cpu
    folder = tmp_path / "outputs" / "quickstart" / "2026-01-02T03-04-05Z"
    for part in (scripted("apple bird"), tokenizer):
        part.save_pretrained(folder / "model")
    (folder / "run.yaml").write_text(config_to_yaml(config))
    manifest = {
        "format": 1,
        "status": {"state": "finished", "reason": None},
        "chat_template_sha256": template_hash(tokenizer),
        "tokenizer_sha256": tokenizer_hash(tokenizer),
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder
