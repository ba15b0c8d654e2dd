"""The speed of TRL's own SFTTrainer on the documents of `gpu_speed.py`, on one GPU. One JSON line per variant.

    python tests/bench/peer_trl.py --output DIR [--only NAME ...] [--steps 30]

`default` is what `trl sft` does where nothing but the model, the data and the length is said; the others are flags that
make it faster. Random weights of Qwen2.5-3B; real tokens are counted as the collator hands them over, without padding;
the median of the optimizer steps after the first 10.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from gpu_queue import machine_versions
from gpu_recipes import facts_of
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

from tunebook.config.schema import ModelFacts, SyntheticConfig
from tunebook.data.synthetic import generate
from tunebook.model.load import architecture_from_facts

WARM_UP_STEPS = 10
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


class Meter(TrainerCallback):
    """Seconds and real tokens of each optimizer step."""

    def __init__(self) -> None:
        self.tokens = 0
        self.speeds: list[float] = []
        self._started = 0.0

    def counting(self, collate: Any) -> Any:
        """The trainer's collator, counted."""

        def collate_and_count(examples: list[Any]) -> Any:
            batch = collate(examples)
            mask = batch.get("attention_mask")
            self.tokens += int(mask.sum()) if mask is not None else batch["input_ids"].numel()
            return batch

        return collate_and_count

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """What was collated for this step has been counted before it begins."""
        if not self._started:
            self._started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A step ends when the GPU has done it."""
        torch.cuda.synchronize()
        now = time.perf_counter()
        self.speeds.append(self.tokens / (now - self._started))
        self.tokens, self._started = 0, now


def documents(count: int, vocab_size: int) -> Dataset:
    """The documents that `dataset=synthetic` makes, all of whose tokens count."""
    batches = generate(SyntheticConfig(), num_documents=count, vocab_size=vocab_size, eos_token_id=151645)
    return Dataset.from_dict({"input_ids": [ids for batch in batches for ids in batch.column("input_ids").to_pylist()]})


def measure(name: str, steps: int, output: Path) -> dict[str, Any]:
    """Train for some steps and tell how fast it was."""
    facts = ModelFacts(**facts_of("qwen25_3b"))
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
    trainer = SFTTrainer(model=model, args=arguments, train_dataset=documents(8000, facts.vocab_size),
                         processing_class=small_tokenizer(), callbacks=[meter])  # fmt: skip
    trainer.data_collator = meter.counting(trainer.data_collator)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    timed = meter.speeds[WARM_UP_STEPS:]
    return {
        "name": f"trl_{name}", "settings": VARIANTS[name], "model": "qwen25_3b", "weights": "random", "steps": steps,
        "first_loss": losses[0], "last_loss": losses[-1], "timed_steps": len(timed),
        "tokens_per_second_per_gpu": round(statistics.median(timed), 1),
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
