"""The speed of TRL's own SFTTrainer, and of Unsloth under it, on one GPU. One JSON line per variant.

    python benchmarks/peer_trl.py --output DIR [--only NAME ...] [--steps 30]
    PYTHONPATH=SITE python benchmarks/peer_trl.py --output DIR --only unsloth_8b_lora

Documents are those that Tunebook's speed is measured on, weights are random. `default` is what `trl sft` does where
nothing but the model, the data and the length is said; the others are flags that make it faster. Variants `unsloth_`
load the same model by `FastLanguageModel`, which needs unsloth with its older trl, datasets and transformers in SITE.
Real tokens are counted as the collator hands them over, without padding; the speed is the median of the optimizer steps
after the first 10. Each variant is a process of its own, and its line goes to OUTPUT/peer_trl.jsonl; `attention` says
which kernel kept the documents apart.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpu_queue import require_gpus
from lines import PACKAGES, Line, add_line, surroundings
from peer_documents import TINY, WARM_UP_STEPS, Corpus, median_speed

from tunebook.config.schema import SyntheticConfig

_PACKED = {"packing": True, "activation_checkpointing": False, "use_liger_kernel": True,
           "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}  # fmt: skip
_ONE_ROW = _PACKED | {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
_UNSLOTH = {"packing": True, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
SHORT = SyntheticConfig(log_mean_tokens=5.34, log_sigma_tokens=0.6, max_tokens=2048)  # 250 tokens on average


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
    by_unsloth: dict[str, Any] | None = None  # what `FastLanguageModel.from_pretrained` is given


_LLAMA = {"model": "llama31_8b", "length": 8192, "weights": "bfloat16", "rank": 16}
_UNSLOTH_8B = _LLAMA | {"settings": _UNSLOTH}
VARIANTS: dict[str, Variant] = {
    "default": Variant(),
    "packed_flash_attention_4": Variant(settings=_PACKED | {"attn_implementation": "flash_attention_4"}),
    "qwen3_4b_full_16k": Variant(
        model="qwen3_4b", length=16384, weights="bfloat16", picks_attention=True,
        settings=_ONE_ROW | {"gradient_accumulation_steps": 2, "activation_checkpointing": True},
    ),
    "llama32_1b_short": Variant(
        model="llama32_1b", length=16384, lengths=SHORT, documents=12000, picks_attention=True, settings=_ONE_ROW,
    ),
    "llama31_8b_lora": Variant(**_LLAMA, picks_attention=True, settings=_ONE_ROW),
    "unsloth_8b_lora": Variant(**_UNSLOTH_8B, by_unsloth={"use_gradient_checkpointing": False}),
    "unsloth_8b_lora_recomputed": Variant(**_UNSLOTH_8B, by_unsloth={"use_gradient_checkpointing": "unsloth"}),
    "unsloth_8b_qlora": Variant(
        **_UNSLOTH_8B, by_unsloth={"use_gradient_checkpointing": "unsloth", "load_in_4bit": True}
    ),
    "tiny_lora": Variant(model=TINY, length=512, documents=200, rank=4, settings=_UNSLOTH),
}  # fmt: skip


def metered(trainer: Any) -> list[float]:
    """Real tokens per second of each optimizer step that the trainer will do; the list fills as it trains."""
    import torch
    from transformers import TrainerCallback

    speeds: list[float] = []
    collate, tokens, started = trainer.data_collator, 0, 0.0

    def collate_and_count(examples: list[Any]) -> Any:
        nonlocal tokens
        batch = collate(examples)
        mask = batch.get("attention_mask")
        tokens += int(mask.sum()) if mask is not None else batch["input_ids"].numel()
        return batch

    class Clock(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            nonlocal started
            started = started or time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            nonlocal tokens, started
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # a step ends when the GPU has done it
            now = time.perf_counter()
            speeds.append(tokens / (now - started))
            tokens, started = 0, now

    trainer.data_collator = collate_and_count
    trainer.add_callback(Clock())
    return speeds


def fastest_attention() -> str:
    """The fastest of the kernels that keep packed documents apart: flash-attn 4 or 2, else torch's flex attention."""
    if find_spec("flash_attn") is not None:
        return "flash_attention_4" if find_spec("flash_attn.cute") is not None else "flash_attention_2"
    return "flex_attention"


def measure(name: str, steps: int, output: Path, warm_up_steps: int) -> Line:
    """Train for some steps in this process."""
    variant = VARIANTS[name]
    if variant.by_unsloth is not None:
        import unsloth  # type: ignore[import-not-found]  # noqa: F401  # before what it changes
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    folder = output / name
    corpus = Corpus(variant.model, variant.documents, variant.lengths)
    corpus.write_tokenizer(folder)  # the trainer asks for one although every document comes as tokens
    torch.manual_seed(0)
    settings = dict(variant.settings)
    attention = settings.pop("attn_implementation", None) or (fastest_attention() if variant.picks_attention else None)
    if variant.by_unsloth is None:
        model = _model(variant, corpus, attention)
    else:
        model = _by_unsloth(variant, variant.by_unsloth, corpus, folder)
    arguments = SFTConfig(
        output_dir=str(folder), max_steps=steps, max_length=variant.length, learning_rate=3e-5, report_to=[],
        save_strategy="no", logging_steps=1, disable_tqdm=True, bf16=torch.cuda.is_available(), **settings,
    )  # fmt: skip
    trainer = SFTTrainer(
        model=model, args=arguments, train_dataset=Dataset.from_dict({"input_ids": corpus.documents}),
        processing_class=AutoTokenizer.from_pretrained(folder),
        peft_config=_adapters(variant.rank) if variant.by_unsloth is None else None,
    )  # fmt: skip
    speeds = metered(trainer)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    trained = sum(one.numel() for one in trainer.model.parameters() if one.requires_grad)
    reached = median_speed(speeds, warm_up_steps)
    speed = reached.get("tokens_per_second_per_gpu")
    on_gpu = torch.cuda.is_available()
    return {
        "name": name, "peer": "trl" if variant.by_unsloth is None else "unsloth", "settings": settings,
        "by_unsloth": variant.by_unsloth, "attention": attention, "model": variant.model, "weights": "random",
        "weights_dtype": variant.weights, "rank": variant.rank, "first_loss": losses[0], "last_loss": losses[-1],
        **reached, "mfu": corpus.mfu(speed, trained) if speed else None,
        "memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3) if on_gpu else None,
        "hardware": torch.cuda.get_device_name() if on_gpu else "cpu",
        **surroundings((*PACKAGES, "unsloth", "datasets")),
    }  # fmt: skip


def _model(variant: Variant, corpus: Corpus, attention: str | None) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    from tunebook.model.load import architecture_from_facts

    loader: Any = AutoModelForCausalLM
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return loader.from_config(
            architecture_from_facts(corpus.facts), attn_implementation=attention, dtype=getattr(torch, variant.weights)
        )


def _by_unsloth(variant: Variant, options: dict[str, Any], corpus: Corpus, folder: Path) -> Any:
    """Random weights with adapters, as Unsloth loads them from a folder."""
    import torch
    from unsloth import FastLanguageModel

    _model(variant, corpus, None).save_pretrained(folder)
    torch.cuda.empty_cache()
    loaded = {"load_in_4bit": False, "dtype": torch.bfloat16, "max_seq_length": variant.length} | options
    model, _ = FastLanguageModel.from_pretrained(str(folder), **loaded)
    torch.cuda.reset_peak_memory_stats()
    return FastLanguageModel.get_peft_model(
        model, r=variant.rank, lora_alpha=2 * (variant.rank or 0), lora_dropout=0.0,
        use_gradient_checkpointing=options["use_gradient_checkpointing"],
    )  # fmt: skip


def _adapters(rank: int | None) -> Any:
    """LoRA on all linear layers but the head, with alpha twice the rank; None for a full fine-tune."""
    from peft import LoraConfig

    settings = {"task_type": "CAUSAL_LM", "lora_dropout": 0.0, "target_modules": "all-linear"}
    return LoraConfig(r=rank, lora_alpha=2 * rank, **settings) if rank else None


def main(words: list[str] | None = None) -> int:
    """Measure one variant after the other; 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", nargs="*", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warm-up-steps", type=int, default=WARM_UP_STEPS, help="of those that are not timed")
    asked = parser.parse_args(words)
    if asked.only != ["tiny_lora"]:  # which a CPU can train
        require_gpus(1)
    asked.output.mkdir(parents=True, exist_ok=True)
    if len(asked.only) == 1:
        line = measure(asked.only[0], asked.steps, asked.output, asked.warm_up_steps)
        add_line(line, asked.output / "peer_trl.jsonl")
        return 0
    options = ["--output", str(asked.output), "--steps", str(asked.steps), "--warm-up-steps", str(asked.warm_up_steps)]
    codes = [subprocess.run([sys.executable, __file__, "--only", name, *options]).returncode for name in asked.only]
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
