"""The speed of TRL's own SFTTrainer and DPOTrainer on one GPU. One JSON line per variant.

    python benchmarks/peer_trl.py --output FILE [--only NAME ...] [--steps 30]

Documents are those that Tunebook's speed is measured on, weights are random. `default` is what `trl sft` does where
nothing but the model, the data and the length is said; the others are flags that make it faster. Real tokens are
counted as the collator hands them over, without padding; the speed is the median of the steps after the first 10.
Variants `dpo_` train on generated pairs, as Tunebook's `dataset.synthetic.pairs=true`. Each variant is a process of its
own; `attention` says which kernel kept the documents apart.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_queue import require_gpus
from lines import Line, add_line
from peer_documents import EQUAL, SHORT, TINY, Corpus, folders_of, last_words, median_speed, peer_parser, run_peer

from tunebook.config.schema import SyntheticConfig

_TRAINER = [sys.executable, str(Path(__file__).with_name("peer_trainer.py"))]
_PACKED = {"packing": True, "activation_checkpointing": False, "use_liger_kernel": True,
           "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}  # fmt: skip
_ONE_ROW = _PACKED | {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
_FOUR_ROWS = _ONE_ROW | {"gradient_accumulation_steps": 4, "attn_implementation": "fastest"}
PAIRS: dict[str, Any] = {"length": 1024, "lengths": EQUAL, "documents": 800, "pairs": True}
PAIRS_A_STEP = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Arguments of TRL for a model and its documents."""

    settings: dict[str, Any] = field(default_factory=dict)
    model: str = "qwen25_3b"
    length: int = 4096
    documents: int = 8000
    lengths: SyntheticConfig = field(default_factory=SyntheticConfig)
    weights: str = "float32"
    rank: int | None = None  # of adapters on all linear layers
    pairs: bool = False  # DPO
    unsloth: dict[str, Any] | None = None  # what `FastLanguageModel.from_pretrained` is given


_ADAPTERS: dict[str, Any] = {"length": 8192, "weights": "bfloat16", "rank": 16, "settings": _FOUR_ROWS}
_COMPILED = {"settings": _FOUR_ROWS | {"torch_compile": True}}
_RECOMPUTED = {"settings": _FOUR_ROWS | {"activation_checkpointing": True}}
VARIANTS: dict[str, Variant] = {
    "default": Variant(),
    "packed_flash_attention_4": Variant(settings=_PACKED | {"attn_implementation": "flash_attention_4"}),
    "qwen3_4b_full_16k": Variant(
        model="qwen3_4b", length=16384, weights="bfloat16",
        settings=_FOUR_ROWS | {"gradient_accumulation_steps": 2, "activation_checkpointing": True},
    ),
    "llama32_1b_short": Variant(
        model="llama32_1b", length=16384, lengths=SHORT, documents=12000,
        settings=_ONE_ROW | {"attn_implementation": "fastest"},
    ),
    **{
        f"{model}_lora{name}": Variant(model=model, **(_ADAPTERS | more))
        for model in ("llama31_8b", "qwen3_4b", "qwen25_7b")
        for name, more in (("", {"lengths": EQUAL}), ("_recomputed", {"lengths": EQUAL} | _RECOMPUTED),
                           ("_compiled", {"lengths": EQUAL} | _COMPILED),
                           ("_short", {"lengths": SHORT, "documents": 12000}))
    },
    "dpo_3b_full": Variant(
        **PAIRS, settings=PAIRS_A_STEP | {"activation_checkpointing": True, "precompute_ref_log_probs": True}
    ),
    "dpo_8b_lora": Variant(
        **PAIRS, model="llama31_8b", weights="bfloat16", rank=16,
        settings=PAIRS_A_STEP | {"activation_checkpointing": True},
    ),
    "tiny_dpo": Variant(
        model=TINY, length=512, documents=100, rank=4, pairs=True,
        settings={"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1},
    ),
    "tiny_lora": Variant(
        model=TINY, length=512, documents=200, rank=4,
        settings={"packing": True, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1},
    ),
}  # fmt: skip


def write_weights(model: str, folder: Path, log: Path, path: list[str], timeout_s: float = 180) -> None:
    """Random weights for those that read them from a folder, in bf16, with a tokenizer. Does nothing if they exist."""
    if (folder / "tokenizer.json").exists():
        return
    corpus = Corpus(model, count=1)
    with tempfile.TemporaryDirectory() as place:
        corpus.write_model(Path(place))
        if run_peer([*_TRAINER, place, "--write-weights", str(folder)], log, timeout_s, path) == 0:
            corpus.write_tokenizer(folder)


def measure(peer: str, name: str, variant: Variant, asked: argparse.Namespace, weights: Path | None = None) -> Line:
    """Train in a process of its own. `weights` is a folder that a peer loads the model from."""
    corpus = Corpus(variant.model, variant.documents, variant.lengths)
    log = asked.output.parent / f"{peer}-{name}.txt"
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        corpus.write_model(folder, pairs=variant.pairs)
        task = {key: getattr(variant, key) for key in ("settings", "length", "weights", "rank", "pairs", "unsloth")}
        task |= {"steps": asked.steps, "weights_folder": str(weights), "started": time.time()}
        (folder / "task.json").write_text(json.dumps(task))
        exit_code = run_peer([*_TRAINER, place], log, asked.timeout_s, folders_of(asked.python_path))
        done = folder / "result.json"
        result: Line = json.loads(done.read_text()) if done.exists() else {"error": last_words(log)}
    line = {"name": name, "peer": peer, "model": variant.model, "weights": "random", "weights_dtype": variant.weights,
            "rank": variant.rank, "settings": variant.settings, "exit_code": exit_code}  # fmt: skip
    line |= {"unsloth": variant.unsloth} if variant.unsloth else {}
    line |= median_speed(result.pop("speeds", []), asked.warm_up_steps)
    if speed := line.get("tokens_per_second_per_gpu"):
        line["mfu"] = corpus.mfu(speed, result["trained_parameters"])
    return line | result


def main(words: list[str] | None = None) -> int:
    """Measure one variant after the other; 1 if one failed."""
    asked = peer_parser(__doc__, VARIANTS).parse_args(words)
    names = asked.only or list(VARIANTS)
    if not all(name.startswith("tiny_") for name in names):  # which a CPU can train
        require_gpus(1)
    lines = []
    for name in names:
        lines.append(measure("trl", name, VARIANTS[name], asked))
        add_line(lines[-1], asked.output)
    return int(any("error" in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
