"""Train random weights by TRL's SFTTrainer or DPOTrainer, alone or under Unsloth, in the environment of that peer.

    python benchmarks/peer_trainer.py FOLDER

`peer_trl.py` and `peer_unsloth.py` start this. FOLDER has the model's config.json, its tokenizer, the documents, and
task.json; result.json goes there. Nothing of Tunebook is imported: the peer has its own versions of packages.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lines import PACKAGES, Line, read_lines, surroundings
from turns import end_of_step, wait_for_gpus


def train(folder: Path) -> Line:
    """Train for the steps of task.json; losses, speed of each step, memory and versions."""
    task: Line = json.loads((folder / "task.json").read_text())
    if task["unsloth"] is not None:
        import unsloth  # noqa: F401  # before what it changes
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    class PreparedPairs(DPOTrainer):  # type: ignore[misc]
        def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            return dataset

    torch.manual_seed(0)
    settings = dict(task["settings"])
    attention = settings.pop("attn_implementation", None)
    if attention == "fastest":
        attention = fastest_attention()
    documents = Dataset.from_list(read_lines(folder / "documents.jsonl"))
    peft_config = None
    if task["unsloth"] is None:
        model, peft_config = random_model(folder, attention, task["weights"]), _adapters(task["rank"])
    else:
        model = _by_unsloth(task)
    on_gpu = torch.cuda.is_available()
    arguments = (DPOConfig if task["pairs"] else SFTConfig)(
        output_dir=str(folder / "run"), max_steps=task["steps"], max_length=task["length"], learning_rate=3e-5,
        report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True, bf16=on_gpu, **settings,
    )  # fmt: skip
    trainer = (PreparedPairs if task["pairs"] else SFTTrainer)(
        model=model, args=arguments, train_dataset=documents, peft_config=peft_config,
        processing_class=AutoTokenizer.from_pretrained(folder),
    )  # fmt: skip
    steps = metered(trainer, task["started"])
    trainer.train()
    return steps | {
        "losses": [round(line["loss"], 6) for line in trainer.state.log_history if "loss" in line],
        "attention": getattr(trainer.model.config, "_attn_implementation", attention),
        "trained_parameters": sum(one.numel() for one in trainer.model.parameters() if one.requires_grad),
        "memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3) if on_gpu else None,
        "memory_reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 3) if on_gpu else None,
        "hardware": torch.cuda.get_device_name() if on_gpu else "cpu",
        **surroundings((*PACKAGES, "datasets", "unsloth", "unsloth_zoo", "bitsandbytes", "liger_kernel", "xformers")),
    }


def random_model(folder: Path, attention: str | None, dtype: str) -> Any:
    """The model of config.json with random weights, on the GPU if there is one."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    loader: Any = AutoModelForCausalLM
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return loader.from_config(
            AutoConfig.from_pretrained(folder), attn_implementation=attention, dtype=getattr(torch, dtype)
        )


def fastest_attention() -> str:
    """The fastest of the kernels that keep packed documents apart: flash-attn 4 or 2, else torch's flex attention."""
    if find_spec("flash_attn") is not None:
        return "flash_attention_4" if find_spec("flash_attn.cute") is not None else "flash_attention_2"
    return "flex_attention"


def _adapters(rank: int | None) -> Any:
    """LoRA on all linear layers but the head, with alpha twice the rank; None for a full fine-tune."""
    from peft import LoraConfig

    settings = {"task_type": "CAUSAL_LM", "lora_dropout": 0.0, "target_modules": "all-linear"}
    return LoraConfig(r=rank, lora_alpha=2 * rank, **settings) if rank else None


def _by_unsloth(task: Line) -> Any:
    """The weights in `task["weights_folder"]` with the same adapters, as Unsloth's notebooks make them."""
    import torch
    from unsloth import FastLanguageModel

    options = task["unsloth"]
    loaded = {"load_in_4bit": False, "dtype": torch.bfloat16, "max_seq_length": task["length"]} | options
    model, _ = FastLanguageModel.from_pretrained(task["weights_folder"], **loaded)
    return FastLanguageModel.get_peft_model(
        model, r=task["rank"], lora_alpha=2 * task["rank"], lora_dropout=0.0, bias="none",
        use_gradient_checkpointing=options["use_gradient_checkpointing"],
    )  # fmt: skip


def metered(trainer: Any, started: float) -> Line:
    """Real tokens per second of each optimizer step, and seconds from `started` to the end of the first.

    The result fills as the trainer trains.
    """
    import torch
    from transformers import TrainerCallback

    found: Line = {"speeds": [], "first_step_s": None}
    collate, tokens, began = trainer.data_collator, 0, 0.0

    def collate_and_count(examples: list[Any]) -> Any:
        nonlocal tokens
        batch = collate(examples)
        mask = batch.get("attention_mask")
        tokens += int(mask.sum()) if mask is not None else batch["input_ids"].numel()
        return batch

    class Clock(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            nonlocal began
            began = began or time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            nonlocal tokens, began
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # a step ends when the GPU has done it
            now = time.perf_counter()
            found["first_step_s"] = found["first_step_s"] or round(time.time() - started, 1)
            found["speeds"].append(tokens / (now - began))
            tokens, began = 0, now
            end_of_step(state.global_step)

    trainer.data_collator = collate_and_count
    trainer.add_callback(Clock())
    return found


def main(words: list[str] | None = None) -> int:
    """Train, or write weights that Unsloth can load."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--write-weights", type=Path, metavar="DIR", help="write random weights in bf16, train nothing")
    asked = parser.parse_args(words)
    if asked.write_weights is not None:
        random_model(asked.folder, None, "bfloat16").save_pretrained(asked.write_weights)
    else:
        wait_for_gpus()
        (asked.folder / "result.json").write_text(json.dumps(train(asked.folder)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
