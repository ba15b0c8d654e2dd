"""Output of a training run other than its records: lines on the terminal, the libraries' log, tracker settings."""

from __future__ import annotations

import logging
import os
import secrets
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import datasets
from transformers.utils import logging as transformers_logging

from tunebook.config.choices import TrackerName
from tunebook.config.schema import TrackingConfig
from tunebook.record.manifest import WANDB_RUN_ID, add_to_manifest, manifest_or_empty

_LOGGERS = ("transformers", "trl", "accelerate", "datasets", "peft", "deepspeed", "DeepSpeed")
# At most one line in this time, plus the first and the last step
_LINE_EVERY_S = 10.0
_LINE_EVERY_S_WITHOUT_TERMINAL = 30.0


class Progress:
    """Lines on the terminal: step, loss, tokens per second over all GPUs, time left."""

    def __init__(self) -> None:
        self._line_every_s = _LINE_EVERY_S if sys.stdout.isatty() else _LINE_EVERY_S_WITHOUT_TERMINAL
        self._last_line = 0.0
        self._started = time.perf_counter()
        self._first_step = 0
        self._total = 0

    def start(self, step: int, total: int) -> None:
        """Begin at `step` (not 0 in a resumed run) of `total`."""
        self._first_step, self._total, self._started = step, total, time.perf_counter()

    def advance(self, step: int, loss: float, tokens_per_second: float) -> None:
        """Show a logged step."""
        now = time.perf_counter()
        if step in (self._first_step + 1, self._total) or now - self._last_line >= self._line_every_s:
            self._last_line = now
            left = (now - self._started) / max(1, step - self._first_step) * (self._total - step)
            speed = f"{tokens_per_second:,.0f} tokens/s"
            print(f"step {step}/{self._total}  loss {loss:.4f}  {speed}  {left:,.0f} s left", flush=True)

    def validated(self, step: int, numbers: Mapping[str, float]) -> None:
        """Show numbers of a validation by their names, the loss first."""
        texts = "  ".join(f"{name} {value:.4f}" for name, value in numbers.items())
        print(f"step {step}  validation {texts}", flush=True)


def set_up_libraries() -> None:
    """Let the libraries log what they do, and show no progress bars of their own."""
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.INFO)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    datasets.disable_progress_bars()


def set_up_tracking(tracking: TrackingConfig, folder: Path, *, is_first_rank: bool) -> None:
    """Set the environment variables of the run's tracker, so that all attempts of a run share one curve.

    TensorBoard and trackio resume a run by its folder and its name. wandb needs an id, which the manifest keeps. The
    user's variables take precedence, except for the project, which is a key of the configuration.
    """
    if tracking.name is TrackerName.tensorboard:
        os.environ["TENSORBOARD_LOGGING_DIR"] = str(folder / "tensorboard")
    if tracking.name is not TrackerName.wandb:
        return
    os.environ["WANDB_PROJECT"] = tracking.project
    os.environ.setdefault("WANDB_DIR", str(folder))
    if is_first_rank:
        recorded = manifest_or_empty(folder).get(WANDB_RUN_ID)
        run_id = os.environ.setdefault("WANDB_RUN_ID", recorded or f"tunebook-{secrets.token_hex(8)}")
        os.environ.setdefault("WANDB_RESUME", "allow")
        add_to_manifest(folder, {WANDB_RUN_ID: run_id})
