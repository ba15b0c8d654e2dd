"""The documents of speed measurements (`gpu_runs.py`) as each peer reads them, and the FLOPs of their tokens.

Every peer gets the same documents. A peer that reads text only gets the id of each token as a word, and a tokenizer
whose vocabulary is these words, so that documents keep their lengths.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from gpu_models import facts_of

from tunebook.config.model_facts import ModelFacts
from tunebook.config.schema import SyntheticConfig
from tunebook.data.synthetic import generate
from tunebook.model.flops import attended_length_tokens, flops_per_token, model_flops_utilization

PEAK_TFLOPS = 989  # an H100's and an H200's in bf16, dense
DOCUMENTS_PER_GPU = 4000
EOS, PADDING = "<eos>", "<pad>"
TINY = "tiny"  # a model small enough for a CPU, to try a peer without a GPU
_EOS_IDS = {"qwen25_3b": 151645, "qwen3_4b": 151645, "llama3_8b": 128001, "llama31_8b": 128001, "llama32_1b": 128001,
            TINY: 2000}  # fmt: skip
_TINY_FACTS = {
    "architecture": "Qwen2ForCausalLM", "num_parameters": 1_180_224, "num_layers": 2, "hidden_size": 256,
    "intermediate_size": 512, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 2048,
    "max_position_embeddings": 4096, "tie_word_embeddings": True, "dtype": "bfloat16",
}  # fmt: skip


@dataclass(frozen=True)
class Corpus:
    """The generated documents in the tokens of one model."""

    model: str
    count: int
    lengths: SyntheticConfig = field(default_factory=SyntheticConfig)

    @cached_property
    def facts(self) -> ModelFacts:
        """The model's planned sizes."""
        return ModelFacts(**(_TINY_FACTS if self.model == TINY else facts_of(self.model)))

    @property
    def eos_id(self) -> int:
        """The last token of each document."""
        return _EOS_IDS[self.model]

    @property
    def padding_id(self) -> int:
        """The last id of the vocabulary, which is in no document."""
        return self.facts.vocab_size - 1

    @cached_property
    def documents(self) -> list[list[int]]:
        """Those of `dataset=synthetic`, all of whose tokens count."""
        batches = generate(
            self.lengths, num_documents=self.count, vocab_size=self.facts.vocab_size, eos_token_id=self.eos_id
        )
        return [ids for batch in batches for ids in batch.column("input_ids").to_pylist()]

    def mfu(self, tokens_per_second_per_gpu: float, num_trained_parameters: int | None = None) -> float:
        """The share of an H100's or H200's arithmetic in bf16 that real tokens use: attention within documents only."""
        attended = attended_length_tokens(len(ids) for ids in self.documents)
        flops = flops_per_token(self.facts, attended, num_trained_parameters)
        return round(model_flops_utilization(tokens_per_second_per_gpu, flops, PEAK_TFLOPS), 4)

    def write_texts(self, folder: Path) -> Path:
        """One line a document, `{"text": ...}`, alone in its folder; the reader appends EOS."""
        return self._write(folder, [{"text": _words(ids[:-1])} for ids in self.documents])

    def write_pairs(self, folder: Path) -> Path:
        """One line a document: its first token is the prompt, the rest the answer, EOS and all."""
        ends = [{"instruction": _words(ids[:1]), "input": "", "output": _words(ids[1:-1])} for ids in self.documents]
        lines = [pair | {"output": f"{pair['output']} {EOS}"} for pair in ends]
        return self._write(folder, lines)

    def _write(self, folder: Path, lines: list[dict[str, str]]) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "documents.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        return file

    def write_tokenizer(self, folder: Path) -> None:
        """Write a tokenizer.json whose words are token ids, and the settings that transformers needs."""
        from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

        special = {self.eos_id: EOS, self.padding_id: PADDING}
        words = {special.get(number, str(number)): number for number in range(self.facts.vocab_size)}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token=PADDING))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.add_special_tokens([AddedToken(word, special=True) for word in special.values()])
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(folder / "tokenizer.json"))
        settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS,
                                    "pad_token": PADDING, "model_max_length": 1 << 20}  # fmt: skip
        (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def _words(ids: list[int]) -> str:
    return " ".join(map(str, ids))
