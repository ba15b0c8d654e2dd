"""The speed of TRL's own SFTTrainer on the documents of `gpu_runs.py`, on one GPU. One JSON line per variant.

    python tests/bench/peer_trl.py --output DIR [--only NAME ...] [--steps 30]

`default` is what `trl sft` does where nothing but the model, the data and the length is said; the others are flags that
make it faster. Random weights of Qwen2.5-3B; real tokens are counted as the collator hands them over, without padding;
the median of the optimizer steps after the first 10.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from gpu_queue import machine_versions, require_gpus
from peer_documents import Corpus
from peer_meter import Meter
from peer_runs import WARM_UP_STEPS, medians
from trl import SFTConfig, SFTTrainer

from tunebook.model.load import architecture_from_facts

LENGTH = 4096
_PACKED = {"packing": True, "activation_checkpointing": False, "use_liger_kernel": True,
           "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "packed_sdpa": _PACKED | {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8},
    "packed_flash_attention_4": _PACKED | {"attn_implementation": "flash_attention_4"},
    "packed_flash_attention_4_rows_4": _PACKED
    | {"attn_implementation": "flash_attention_4", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
}


def measure(name: str, steps: int, output: Path) -> dict[str, Any]:
    """Train for some steps and tell how fast it was."""
    corpus = Corpus("qwen25_3b", 8000)
    facts = corpus.facts
    settings = dict(VARIANTS[name])
    attention = settings.pop("attn_implementation", None)
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(architecture_from_facts(facts), attn_implementation=attention)
    arguments = SFTConfig(
        output_dir=str(output / name), max_steps=steps, max_length=LENGTH, learning_rate=3e-5, report_to=[],
        save_strategy="no", logging_steps=1, disable_tqdm=True, **settings,
    )  # fmt: skip
    meter = Meter()
    trainer = SFTTrainer(model=model, args=arguments, train_dataset=Dataset.from_dict({"input_ids": corpus.documents}),
                         processing_class=small_tokenizer(), callbacks=[meter])  # fmt: skip
    trainer.data_collator = meter.counting(trainer.data_collator)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    reached = medians(meter.speeds)
    return {
        "name": f"trl_{name}", "settings": VARIANTS[name], "model": "qwen25_3b", "weights": "random", "steps": steps,
        "first_loss": losses[0], "last_loss": losses[-1], **reached,
        "mfu": corpus.mfu(reached["tokens_per_second_per_gpu"]),
        "seconds_per_step": round(statistics.median(meter.seconds[WARM_UP_STEPS:]), 4),
        "memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3), "hardware": torch.cuda.get_device_name(),
        "machine": machine_versions(),
    }  # fmt: skip


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
    arguments = parser.parse_args()
    require_gpus(1)
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name in arguments.only:
        line = measure(name, arguments.steps, arguments.output)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        with (arguments.output / "peer_trl.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
