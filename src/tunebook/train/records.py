"""A trainer mixin for records: the numbers of metrics.jsonl go into the log that trackers and checkpoints read."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Trainer

from tunebook.train.callbacks import Records, loss_not_finite


class RecordedLogs(Trainer):
    """Completes each log with the numbers of `records`, and refuses a loss that is not finite."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.records: Records | None = None
        super().__init__(*args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As upstream, with the numbers of metrics.jsonl. Called on every rank."""
        logs.pop("train_samples_per_second", None)  # the summary at the end counts rows, not documents
        if self.records is not None:
            self.records.complete(logs, self.args, self.state)
        super().log(logs, start_time)

    def _summed(self, values: torch.Tensor) -> torch.Tensor:
        summed: torch.Tensor = self.accelerator.reduce(values, reduction="sum")
        return summed

    def require_finite_loss(self) -> None:
        """Raises: InvalidTrainingError on every rank if any rank's loss since the last log is not finite."""
        is_finite = torch.isfinite(self._tr_loss).float().reshape(1)
        if self.accelerator.reduce(is_finite, reduction="sum").item() < self.accelerator.num_processes:
            raise loss_not_finite(self.state.global_step)
