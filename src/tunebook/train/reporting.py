"""Output of a training run other than its records: progress on the terminal, the libraries' log, tracker settings."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.integration_utils import TensorBoardCallback
from transformers.utils import logging as transformers_logging

from tunebook.config.choices import TrackerName
from tunebook.config.schema import TrackingConfig
from tunebook.record.manifest import WANDB_RUN_ID, add_to_manifest, manifest_or_empty

_PROJECT, _FOLDER, _ID, _RESUME = "WANDB_PROJECT", "WANDB_DIR", "WANDB_RUN_ID", "WANDB_RESUME"
_LOGGERS = ("transformers", "trl", "accelerate", "datasets", "peft", "deepspeed", "DeepSpeed")
_LINE_EVERY_S = 10.0  # without a terminal: at most one line in this time, plus the first and the last step


class TrainingProgress:
    """Step, loss, tokens per second over all GPUs, time left: a bar in a terminal, lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._last_line = 0.0
        self._started = time.perf_counter()
        self._first_step = 0
        self._total = 0

    def start(self, step: int, total: int) -> None:
        """Begin at `step` (not 0 in a resumed run) of `total`."""
        self._first_step, self._total, self._started = step, total, time.perf_counter()
        if not self.console.is_terminal:
            return
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[speed]} tokens/s"),
            TimeRemainingColumn(),
            console=self.console,
        )
        self._bar.start()
        self._task = self._bar.add_task("training", total=total, completed=step, loss="-", speed="-")

    def advance(self, step: int, loss: float, tokens_per_second: float) -> None:
        """Show a logged step."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=step, loss=f"{loss:.4f}", speed=f"{tokens_per_second:,.0f}")
            return
        now = time.perf_counter()
        if step in (self._first_step + 1, self._total) or now - self._last_line >= _LINE_EVERY_S:
            self._last_line = now
            done = step - self._first_step
            left = (now - self._started) / max(1, done) * (self._total - step)
            self.console.print(
                f"step {step}/{self._total}  loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s  {left:,.0f} s left",
                highlight=False,
            )

    def validated(self, step: int, loss: float) -> None:
        """Show a validation loss."""
        self.console.print(f"step {step}  validation loss {loss:.4f}", highlight=False)

    def stop(self) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class ResumableTensorBoard(TensorBoardCallback):
    """Upstream's callback, but TensorBoard drops the points after the step at which an attempt starts."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Every attempt marks its start, also the first: TensorBoard ignores the first mark in a folder."""
        if state.is_world_process_zero:
            self.tb_writer = self._SummaryWriter(self.logging_dir, purge_step=state.global_step + 1)
        super().on_train_begin(args, state, control, **kwargs)  # type: ignore[no-untyped-call]


def set_up_libraries() -> None:
    """Let the libraries log what they do, and show no progress bars of their own."""
    import datasets

    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.INFO)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    datasets.disable_progress_bars()


def set_up_tracking(tracking: TrackingConfig, folder: Path, *, is_first_rank: bool, say: Callable[[str], None]) -> None:
    """Set the environment variables of the run's tracker, so that all attempts of a run share one curve.

    TensorBoard and trackio resume a run by its folder and its name. wandb needs an id, which the manifest keeps. The
    user's variables take precedence, except for wandb's project, which is a key of the configuration. Only the first
    rank writes and prints.
    """
    wandb_run_id = None
    if tracking.name is TrackerName.wandb and is_first_rank:
        wandb_run_id = _run_id(folder)
        project = os.environ.get(_PROJECT, tracking.project)
        if project != tracking.project:
            say(f"{_PROJECT}={project} is not used: the project is set by tracking.project={tracking.project}")
    os.environ.update(tracker_environment(tracking, folder, os.environ, wandb_run_id))


def tracker_environment(
    tracking: TrackingConfig, folder: Path, given: Mapping[str, str], wandb_run_id: str | None = None
) -> dict[str, str]:
    """The variables that a tracker reads instead of arguments; `given` is the present environment."""
    if tracking.name is TrackerName.tensorboard:
        return {"TENSORBOARD_LOGGING_DIR": str(folder / "tensorboard")}
    if tracking.name is not TrackerName.wandb:
        return {}
    variables = {_PROJECT: tracking.project, _FOLDER: given.get(_FOLDER, str(folder))}
    if wandb_run_id is not None:
        variables |= {_ID: wandb_run_id, _RESUME: given.get(_RESUME, "allow")}
    return variables


def _run_id(folder: Path) -> str:
    """The user's id, that of an earlier attempt, or a new one, which the manifest keeps for the next attempt."""
    recorded = manifest_or_empty(folder).get(WANDB_RUN_ID)
    run_id = os.environ.get(_ID) or recorded or f"tunebook-{secrets.token_hex(8)}"
    if run_id != recorded:
        add_to_manifest(folder, {WANDB_RUN_ID: run_id})
    return run_id
