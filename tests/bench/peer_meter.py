"""Seconds and real tokens of each optimizer step of a transformers Trainer, whoever built it."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback


def unmasked_tokens(batch: Any) -> int:
    """Those that the attention mask does not hide, or all."""
    mask = batch.get("attention_mask")
    return int(mask.sum()) if mask is not None else batch["input_ids"].numel()


class Meter(TrainerCallback):
    """Seconds and real tokens of each optimizer step."""

    def __init__(self, count: Callable[[Any], int] = unmasked_tokens) -> None:
        self.tokens = 0
        self.speeds: list[float] = []
        self.seconds: list[float] = []
        self._count = count
        self._started = 0.0

    def counting(self, collate: Any) -> Any:
        """The trainer's collator, counted."""

        def collate_and_count(examples: list[Any]) -> Any:
            batch = collate(examples)
            self.tokens += self._count(batch)
            return batch

        return collate_and_count

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """What was collated for this step has been counted before it begins."""
        if not self._started:
            self._started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A step ends when the GPU has done it."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds.append(now - self._started)
        self.speeds.append(self.tokens / self.seconds[-1])
        self.tokens, self._started = 0, now


class Recorder(Meter):
    """A meter that finds the trainer's collator by itself, and ends the program once training is done."""

    def __init__(self, file: Path, padding_id: int) -> None:
        # Not by the mask: packed rows have ones over their padding, or the number of each document.
        super().__init__(lambda batch: int((batch["input_ids"] != padding_id).sum()))
        self.file = file
        self.padding_id = padding_id

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Before the first batch is collated."""
        loader = kwargs["train_dataloader"]
        loader = getattr(loader, "base_dataloader", loader)  # what accelerate has wrapped
        loader.collate_fn = self.counting(loader.collate_fn)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """What was measured; the model is not saved, which would take longer than training it."""
        if state.is_world_process_zero:
            has_gpu = torch.cuda.is_available()
            model = kwargs["model"]
            measured = {
                "speeds": self.speeds,
                "seconds": self.seconds,
                "losses": [line["loss"] for line in state.log_history if "loss" in line],
                "memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3) if has_gpu else None,
                "hardware": torch.cuda.get_device_name() if has_gpu else "cpu",
                "weights_dtype": str(next(model.parameters()).dtype),
                "attention": model.config._attn_implementation,
                "rows_per_step": args.per_device_train_batch_size * args.gradient_accumulation_steps,
            }
            self.file.write_text(json.dumps(measured), encoding="utf-8")
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
