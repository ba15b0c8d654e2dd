"""Counts the last phases of a rank's start (wrapping the model, the checks of that, the first step), then steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from tunebook.record.start_up import StartClock, note_first_step


class StartRecord(TrainerCallback):
    """Goes before the callbacks that check the wrapped model; after the first step it only counts steps."""

    def __init__(self, clock: StartClock, folder: Path) -> None:
        self.clock = clock
        self.folder = folder
        self._is_over = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The model was wrapped, the optimizer made, and a checkpoint read where there is one."""
        self.clock.passed("wrap")

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Every callback's beginning is over, the leak probe's among them."""
        if not self._is_over:
            self.clock.passed("checks")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """A step has ended; for the first one a GPU is waited for, once."""
        self.clock.step = state.global_step
        if self._is_over:
            return
        self._is_over = True
        if args.device.type == "cuda":
            torch.cuda.synchronize()
        self.clock.passed("first_step")
        if state.is_world_process_zero:
            note_first_step(self.folder, self.clock)
