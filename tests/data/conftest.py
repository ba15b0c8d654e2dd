"""Tokenizers small enough to count by hand: one token for every byte, and the special tokens a test asks for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tunebook.config import schema
from tunebook.config.choices import Weights
from tunebook.model.tokenizer import load_tokenizer

# ChatML, as most models have it: nothing marks the assistant's words.
CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
SPECIAL_TOKENS = ("<|pad|>", "<s>", "<|im_start|>", "<|im_end|>", "</s>")


def chat_row(messages: Sequence[Mapping[str, Any]], origin: str = "a:1") -> dict[str, Any]:
    """A conversation as a row of a corpus; the assistant's turns are trained on unless they say otherwise."""
    turns = [{"train": turn["role"] == "assistant", **turn} for turn in messages]
    return {"messages": json.dumps(turns), "tools": None, "template_kwargs": None, "origin": origin}


def turns_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The turns of a corpus row."""
    turns: list[dict[str, Any]] = json.loads(row["messages"])
    return turns


def write_tokenizer(
    folder: Path,
    *,
    template: str | None = CHATML,
    eos_token: str | None = "<|im_end|>",
    bos_token: str | None = None,
    pad_token: str | None = "<|pad|>",
    adds_bos: bool = False,
    merges: tuple[tuple[str, str], ...] = (),
    pieces: tuple[str, ...] = (),
    generation_eos: int | list[int] | None = None,
    special: tuple[str, ...] = SPECIAL_TOKENS,
) -> Path:
    """A tokenizer's folder. Bytes are tokens 0 to 255, merges and pieces follow, the special tokens come last."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = [*alphabet, *(left + right for left, right in merges), *pieces]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(vocabulary)}, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    if adds_bos:
        bos = ("<s>", tokenizer.token_to_id("<s>"))
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[bos])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"eos_token": eos_token, "bos_token": bos_token, "pad_token": pad_token}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"} | {key: token for key, token in named.items() if token}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    if generation_eos is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation_eos}))
    return folder


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> Callable[..., Path]:
    """Write a tiny tokenizer's folder; takes its name and what `write_tokenizer` takes."""
    return lambda name="model", **options: write_tokenizer(tmp_path / name, **options)


@pytest.fixture(scope="session")
def tiny_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """A tiny tokenizer, loaded once a session; takes what `write_tokenizer` takes. Tests that change it copy it."""
    loaded: dict[str, Any] = {}

    def load(**options: Any) -> Any:
        key = repr(sorted(options.items()))
        if key not in loaded:
            folder = write_tokenizer(tmp_path_factory.mktemp("tokenizer"), **options)
            loaded[key] = load_tokenizer(schema.ModelConfig(path=str(folder)))
        return loaded[key]

    return load


@pytest.fixture
def run_config(
    tmp_path: Path, tokenizer_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., schema.RunConfig]:
    """A run over conversations that a test writes to `train.jsonl`, with a cache of its own."""
    monkeypatch.setenv("TUNEBOOK_CACHE", str(tmp_path / "cache"))

    def make(conversations: list[list[tuple[str, str]]], max_length: int = 64, **dataset: Any) -> schema.RunConfig:
        lines = [
            json.dumps({"messages": [{"role": role, "content": content} for role, content in conversation]})
            for conversation in conversations
        ]
        (tmp_path / "train.jsonl").write_text("\n".join(lines) + "\n")
        folder = tmp_path / "model"
        if not folder.exists():
            tokenizer_folder()
        return schema.RunConfig(
            model=schema.ModelConfig(path=str(folder), weights=Weights.random),
            dataset=schema.DatasetConfig(path=str(tmp_path / "train.jsonl"), **dataset),
            packing=schema.PackingConfig(),
            evaluation=schema.EvaluationConfig(tasks=[]),
            training=schema.TrainingConfig(max_length=max_length),
        )

    return make
