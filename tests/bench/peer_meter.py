"""Seconds and real tokens of each optimizer step of a transformers Trainer, whoever built it."""

from __future__ import annotations

import time
from collections.abc import Callable
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
