"""What measurements of peers share: documents, random models, a process with a time limit, and the line of a result.

Every peer gets the documents that `dataset=synthetic` makes. A peer that reads text gets the id of each token as a
word, and a tokenizer whose vocabulary is these words, so that documents keep their lengths.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from gpu_models import facts_of
from lines import Line, write_lines

from tunebook.config.model_facts import ModelFacts
from tunebook.config.schema import SyntheticConfig
from tunebook.data.synthetic import generate
from tunebook.model.flops import attended_length_tokens, flops_per_token, model_flops_utilization

PEAK_TFLOPS = 989  # an H100's and an H200's in bf16, dense
TOKENS_PER_STEP, DOCUMENTS_PER_GPU = 32_768, 4000
WARM_UP_STEPS = 10  # of those that are not timed
EOS, PADDING = "<eos>", "<pad>"
TINY = "tiny"  # a model small enough for a CPU, to try a peer without a GPU
_EOS_IDS = {"qwen25_3b": 151645, "qwen25_7b": 151645, "qwen3_4b": 151645, "llama3_8b": 128001, "llama31_8b": 128001,
            "llama32_1b": 128001, TINY: 2000}  # fmt: skip
EQUAL = SyntheticConfig(min_tokens=512, max_tokens=512)
SHORT = SyntheticConfig(log_mean_tokens=5.34, log_sigma_tokens=0.6, max_tokens=2048)  # 250 tokens on average
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

    @cached_property
    def documents(self) -> list[list[int]]:
        """Token ids of each document; all of them count, and EOS is the last."""
        batches = generate(
            self.lengths, num_documents=self.count, vocab_size=self.facts.vocab_size,
            eos_token_id=_EOS_IDS[self.model],
        )  # fmt: skip
        return [ids for batch in batches for ids in batch.column("input_ids").to_pylist()]

    @cached_property
    def pairs(self) -> list[dict[str, list[int]]]:
        """Generated pairs in the columns that TRL's DPOTrainer has after tokenizing."""
        batches = generate(
            replace(self.lengths, pairs=True), num_documents=self.count, vocab_size=self.facts.vocab_size,
            eos_token_id=_EOS_IDS[self.model],
        )  # fmt: skip
        found = []
        for row in (row for batch in batches for row in batch.to_pylist()):
            prompt = row["labels"].count(-100)
            sides = {"chosen_ids": row["input_ids"][prompt:], "rejected_ids": row["rejected_ids"][prompt:]}
            found.append({"prompt_ids": row["input_ids"][:prompt], **sides})
        return found

    def mfu(self, tokens_per_second_per_gpu: float, num_trained_parameters: int | None = None) -> float:
        """The share of an H100's or H200's arithmetic in bf16 that real tokens use: attention within documents only."""
        attended = attended_length_tokens(len(ids) for ids in self.documents)
        flops = flops_per_token(self.facts, attended, num_trained_parameters)
        return round(model_flops_utilization(tokens_per_second_per_gpu, flops, PEAK_TFLOPS), 4)

    def write_model(self, folder: Path, *, pairs: bool = False) -> None:
        """The model's config.json, its tokenizer, and the documents, `{"input_ids": ...}` a line, or the pairs."""
        from tunebook.model.load import architecture_from_facts

        self.write_tokenizer(folder)
        architecture_from_facts(self.facts).save_pretrained(folder)
        documents = self.pairs if pairs else ({"input_ids": ids} for ids in self.documents)
        write_lines(folder / "documents.jsonl", documents)

    def write_texts(self, folder: Path) -> None:
        """One line a document, `{"text": ...}`, alone in its folder; the reader appends EOS."""
        folder.mkdir(parents=True, exist_ok=True)
        write_lines(folder / "documents.jsonl", ({"text": " ".join(map(str, ids[:-1]))} for ids in self.documents))

    def write_tokenizer(self, folder: Path) -> None:
        """Write a tokenizer.json whose words are token ids, and the settings that transformers needs."""
        from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

        special = {_EOS_IDS[self.model]: EOS, self.facts.vocab_size - 1: PADDING}  # the latter is in no document
        words = {special.get(number, str(number)): number for number in range(self.facts.vocab_size)}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token=PADDING))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.add_special_tokens([AddedToken(word, special=True) for word in special.values()])
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(folder / "tokenizer.json"))
        settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS,
                                    "pad_token": PADDING, "model_max_length": 1 << 20}  # fmt: skip
        (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def peer_parser(description: str | None, names: Iterable[str]) -> argparse.ArgumentParser:
    """The arguments that scripts of peers share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSON lines; logs go next to it")
    parser.add_argument("--only", nargs="*", choices=list(names), metavar="NAME", help="some of: %(choices)s")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warm-up-steps", type=int, default=WARM_UP_STEPS, help="of those that are not timed")
    parser.add_argument("--timeout-s", type=float, default=300, help="of one variant")
    parser.add_argument("--python-path", metavar="PATH", help="PYTHONPATH of the peer, this one's if not given")
    return parser


def folders_of(python_path: str | None = None) -> list[str]:
    """The folders of `--python-path`, or of PYTHONPATH."""
    path = os.environ.get("PYTHONPATH", "") if python_path is None else python_path
    return [folder for folder in path.split(os.pathsep) if folder]


def run_peer(command: list[str], log: Path, timeout_s: float, folders: list[str], **more: str) -> int | None:
    """The exit code, or None after a timeout. Ends all its processes: ranks outlive a killed launcher.

    `folders` are those that it imports from, `more` are variables of its environment.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join([*folders, str(Path(__file__).parent)])
    environment = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"} | more
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return None


def median_speed(speeds: list[float], warm_up_steps: int = WARM_UP_STEPS) -> Line:
    """The median of the steps after the warm-up; without one, only their number."""
    timed = speeds[warm_up_steps:]
    found: Line = {"steps": len(speeds), "timed_steps": len(timed)}
    return found | ({"tokens_per_second_per_gpu": round(statistics.median(timed), 1)} if timed else {})


def last_words(log: Path) -> str:
    """The end of a log, for a variant that failed."""
    return log.read_text(errors="replace").strip()[-1500:]
