"""The speed of TRL's own SFTTrainer on the documents of `gpu_runs.py`, on one GPU. One JSON line per variant.

    python tests/bench/peer_trl.py --output DIR [--only NAME ...] [--steps 30]

`default` is what `trl sft` does where nothing but the model, the data and the length is said; the others are flags that
make it faster. Random weights; real tokens are counted as the collator hands them over, without padding; the median of
the optimizer steps after the first 10 (`--warm-up-steps`). Variants with a model's name take TRL's fastest attention
that is installed, as `attention` in their line says; the other side of each is a case of cases/h100_models.jsonl.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from gpu_queue import machine_versions, require_gpus, wait_for_turn
from peer_documents import TINY, Corpus
from peer_meter import Meter
from peer_runs import WARM_UP_STEPS, medians
from trl import SFTConfig, SFTTrainer

from tunebook.config.schema import SyntheticConfig
from tunebook.model.load import architecture_from_facts

_PACKED = {"packing": True, "activation_checkpointing": False, "use_liger_kernel": True,
           "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}  # fmt: skip
_ONE_ROW = _PACKED | {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
_FLASH_4 = "flash_attention_4"
# Conversations of 250 tokens on average.
SHORT = SyntheticConfig(log_mean_tokens=5.34, log_sigma_tokens=0.6, max_tokens=2048)


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
    picks_attention: bool = False  # the fastest that is installed


VARIANTS: dict[str, Variant] = {
    "default": Variant(),
    "packed_sdpa": Variant(
        settings=_PACKED | {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}
    ),
    "packed_flash_attention_4": Variant(settings=_PACKED | {"attn_implementation": _FLASH_4}),
    "packed_flash_attention_4_rows_4": Variant(
        settings=_PACKED
        | {"attn_implementation": _FLASH_4, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    ),
    "qwen3_4b_full_16k": Variant(
        model="qwen3_4b", length=16384, weights="bfloat16", picks_attention=True,
        settings=_ONE_ROW | {"gradient_accumulation_steps": 2, "activation_checkpointing": True},
    ),
    "llama32_1b_short": Variant(
        model="llama32_1b", length=16384, lengths=SHORT, documents=12000, picks_attention=True,
        settings=_ONE_ROW,
    ),
    "llama31_8b_lora": Variant(
        model="llama31_8b", length=8192, weights="bfloat16", rank=16, picks_attention=True, settings=_ONE_ROW,
    ),
    "tiny_lora": Variant(
        model=TINY, length=512, documents=200, rank=4,
        settings={"packing": True, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1},
    ),
}  # fmt: skip


def fastest_attention() -> str:
    """The fastest of the kernels that keep packed documents apart, in the order of their speed.

    flash-attn 4 and 2 are packages; flex attention is torch's. It computes only what its mask shows, while sdpa would
    compute the square of each row.
    """
    if find_spec("flash_attn") is not None:
        return _FLASH_4 if find_spec("flash_attn.cute") is not None else "flash_attention_2"
    return "flex_attention"


def measure(name: str, steps: int, output: Path, warm_up_steps: int = WARM_UP_STEPS) -> dict[str, Any]:
    """Train for some steps and tell how fast it was."""
    variant = VARIANTS[name]
    corpus = Corpus(variant.model, variant.documents, variant.lengths)
    settings = dict(variant.settings)
    attention = settings.pop("attn_implementation", None) or (fastest_attention() if variant.picks_attention else None)
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    wait_for_turn()
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            architecture_from_facts(corpus.facts), attn_implementation=attention, dtype=getattr(torch, variant.weights)
        )
    arguments = SFTConfig(
        output_dir=str(output / name), max_steps=steps, max_length=variant.length, learning_rate=3e-5, report_to=[],
        save_strategy="no", logging_steps=1, disable_tqdm=True, bf16=device == "cuda", **settings,
    )  # fmt: skip
    meter = Meter()
    trainer = SFTTrainer(model=model, args=arguments, train_dataset=Dataset.from_dict({"input_ids": corpus.documents}),
                         processing_class=small_tokenizer(), callbacks=[meter],
                         peft_config=adapters(variant.rank))  # fmt: skip
    trainer.data_collator = meter.counting(trainer.data_collator)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    reached = medians(meter.speeds, warm_up_steps)
    trained = sum(one.numel() for one in trainer.model.parameters() if one.requires_grad)
    return {
        "name": f"trl_{name}", "settings": settings, "attention": attention, "model": variant.model,
        "weights": "random", "weights_dtype": variant.weights, "rank": variant.rank, "steps": steps,
        "first_loss": losses[0], "last_loss": losses[-1], **reached,
        "mfu": corpus.mfu(reached["tokens_per_second_per_gpu"], trained) if reached["timed_steps"] else None,
        "seconds_per_step": round(statistics.median(meter.seconds[warm_up_steps:] or meter.seconds), 4),
        "memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3) if device == "cuda" else None,
        "hardware": torch.cuda.get_device_name() if device == "cuda" else "cpu", "machine": machine_versions(),
    }  # fmt: skip


def adapters(rank: int | None) -> Any:
    """LoRA on all linear layers but the head, with alpha twice the rank; None for a full fine-tune."""
    if rank is None:
        return None
    from peft import LoraConfig

    return LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules="all-linear")


def small_tokenizer() -> Any:
    """The trainer asks for one although every document comes as tokens."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def main() -> None:
    """Parse the arguments and measure one variant after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", nargs="*", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warm-up-steps", type=int, default=WARM_UP_STEPS, help="of those that are not timed")
    arguments = parser.parse_args()
    if arguments.only != ["tiny_lora"]:  # which a CPU can train
        require_gpus(1)
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name in arguments.only:
        line = measure(name, arguments.steps, arguments.output, arguments.warm_up_steps) | {"verdict": "ok"}
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        with (arguments.output / "peer_trl.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
