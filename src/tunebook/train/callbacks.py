"""The trainer's callbacks: stopping on request, early stopping, the last steps logged, the phases of the start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate.utils import reduce
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import SaveStrategy

from tunebook.checkpoint.save import CheckpointSaver
from tunebook.facts.methods import is_higher_better
from tunebook.record.start_up import StartClock, note_first_step
from tunebook.train.rank_process import StopRequest

VALIDATION_LOSS = "eval_validation_loss"  # the key in the trainer's log


def validation_values(state: TrainerState, metric: str = "validation_loss") -> dict[int, float]:
    """A validation's metric by step, in order, including those before a resume, which the checkpoint keeps."""
    key = f"eval_{metric}"
    return {int(entry["step"]): entry[key] for entry in state.log_history if key in entry}


def validation_costs(state: TrainerState, metric: str) -> dict[int, float]:
    """The same, lower for the better."""
    sign = -1.0 if is_higher_better(metric) else 1.0
    return {step: sign * value for step, value in validation_values(state, metric).items()}


class StopOnRequest(TrainerCallback):
    """Ends the run after the current step, with a save, once any rank has been asked to stop.

    The same collective reports when a background save has ended on every rank. The save is settled then, so that a
    failed save ends the run after this step and not at the next save.
    """

    def __init__(self, request: StopRequest, saver: CheckpointSaver, *, is_unsaved: bool = False) -> None:
        self.request = request
        self.saver = saver
        self.is_unsaved = is_unsaved  # a measurement
        self.is_stopping = False

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Stop all ranks if one was asked to. Raises: the error of a save in the background."""
        state_of_rank = [float(self.request.name is not None), float(self.saver.is_busy)]
        num_requests, num_busy = reduce(torch.tensor(state_of_rank, device=args.device), reduction="sum").tolist()
        if num_requests > 0:
            self.is_stopping = True
            control.should_log = True  # or no line would contain the steps since the last logged one
            control.should_save = not self.is_unsaved
            control.should_training_stop = True
        if self.saver.is_pending and num_busy == 0:
            self.saver.settle()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Complete the last save. Raises: as `on_step_end`."""
        self.saver.settle()


class EarlyStopping(TrainerCallback):
    """Ends the training after `patience` validations in a row without improvement, and saves the last step.

    It counts from the losses in the checkpoint, so a resume changes nothing. Upstream's callback counts from zero after
    a resume, and a restored one has the patience of the checkpoint instead of run.yaml's.
    """

    def __init__(self, patience: int, metric: str = "validation_loss") -> None:
        self.patience = patience
        self.metric = metric

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """End at once if the run was stopped or killed at its last step."""
        control.should_training_stop |= self.is_over(state)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """End after a validation. Every rank has the same losses."""
        if self.is_over(state):
            control.should_training_stop = True
            control.should_save |= args.save_strategy != SaveStrategy.NO

    def is_over(self, state: TrainerState) -> bool:
        """True if the last `patience` validations are not better than the best before them."""
        costs = list(validation_costs(state, self.metric).values())
        return bool(costs) and len(costs) - 1 - costs.index(min(costs)) >= self.patience


class LogToTheEnd(TrainerCallback):
    """Logs the last step wherever training ends, so that each step is in some line.

    Early stopping is decided by a validation, which is too late to log the step. So each step with a validation is
    logged.
    """

    def __init__(self, *, may_stop_early: bool) -> None:
        self.may_stop_early = may_stop_early

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Runs after upstream's callback, which decides what follows the step."""
        is_last = control.should_training_stop or state.global_step >= state.max_steps
        if is_last or (self.may_stop_early and control.should_evaluate):
            control.should_log = True


class StartRecord(TrainerCallback):
    """Times the last phases of a rank's start: wrapping, checks, first step.

    It runs before the callbacks that check the wrapped model.
    """

    def __init__(self, clock: StartClock, folder: Path) -> None:
        self.clock = clock
        self.folder = folder
        self._is_over = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The model was wrapped, the optimizer created, and a checkpoint read, if any."""
        self.clock.passed("wrap")

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """All callbacks have begun, including the leak probe. Our trainers have one epoch."""
        self.clock.passed("checks")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """After the first step, wait for the GPU once."""
        if self._is_over:
            return
        self._is_over = True
        if args.device.type == "cuda":
            torch.cuda.synchronize()
        self.clock.passed("first_step")
        if state.is_world_process_zero:
            note_first_step(self.folder, self.clock)
