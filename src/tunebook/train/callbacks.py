"""Around the trainer's steps: records, progress, stopping on request, refusing a loss that is not finite."""

from __future__ import annotations

import math
import resource
import time
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather, reduce
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import SaveStrategy

from tunebook.checkpoint.save import CheckpointSaver
from tunebook.data.sampler import RankBatches
from tunebook.errors import InvalidTrainingError
from tunebook.model.flops import model_flops_utilisation
from tunebook.record.metrics import MetricsWriter
from tunebook.train.progress import TrainingProgress
from tunebook.train.signals import StopRequest

_GIB = 1024**3
VALIDATION_LOSS = "eval_validation_loss"  # as the trainer logs it
_SEEN = "tunebook_seen"  # in a checkpoint's trainer_state.json, under stateful_callbacks


def validation_losses(state: TrainerState) -> dict[int, float]:
    """Each validation loss by its step, in order; a checkpoint keeps them, so those before a resume are among them."""
    return {int(entry["step"]): entry[VALIDATION_LOSS] for entry in state.log_history if VALIDATION_LOSS in entry}


def loss_not_finite(step: int, which: str = "loss") -> InvalidTrainingError:
    """The error for a loss that is no number; the last good checkpoint is added where the run ends."""
    return InvalidTrainingError(
        f"the {which} is not finite at step {step}: the weights after it are worthless. Usual causes: a learning rate "
        "that is too high, fp16 with a base model trained in bf16 (precision=fp32 or bf16), damaged data (tunebook "
        "data shows it)",
        problem_id="loss-not-finite",
    )


class FiniteLoss(TrainerCallback):
    """Stops the run at the first logged loss or gradient norm that is not finite, before anything is saved.

    A validation loss that is not finite can be ranked with no other, and stops the run too.
    """

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Logged values are the same on every rank, so all ranks raise together."""
        logs = kwargs["logs"]
        for name in ("loss", "grad_norm"):
            if name in logs and not math.isfinite(logs[name]):
                raise loss_not_finite(state.global_step)
        if not math.isfinite(logs.get(VALIDATION_LOSS, 0.0)):
            raise loss_not_finite(state.global_step, "validation loss")


class StopOnRequest(TrainerCallback):
    """Ends the run after the current step, with a save, once any rank has been asked to stop.

    What the ranks tell each other for that also says when a save in the background has ended on every rank: then it is
    settled, so that one that failed ends the run after this step and not at the next save.
    """

    def __init__(self, request: StopRequest, saver: CheckpointSaver) -> None:
        self.request = request
        self.saver = saver
        self.is_stopping = False

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """All ranks agree: one rank's request is every rank's. Raises: what a save in the background ended with."""
        told = torch.tensor([float(self.request.name is not None), float(self.saver.is_busy)], device=args.device)
        num_asked, num_busy = reduce(told, reduction="sum").tolist()
        if num_asked > 0:
            self.is_stopping = True
            control.should_log = True  # or the steps since the last logged one would be in no line, now or later
            control.should_save = True
            control.should_training_stop = True
        if self.saver.is_in_the_air and num_busy == 0:
            self.saver.settle()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The last save is complete before upstream waits for its uploads. Raises: as `on_step_end`."""
        self.saver.settle()


class EarlyStopping(TrainerCallback):
    """Ends the training once `patience` validations in a row were no better than the best before them.

    Counted anew each time from the losses that every checkpoint keeps, so a resume changes nothing. Upstream's callback
    starts to count at zero after a resume, and its restored form has the patience of the checkpoint, not of run.yaml.
    The last step is saved, as at the planned end of a training.
    """

    def __init__(self, patience: int) -> None:
        self.patience = patience

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """A run that was stopped, or killed, at the step that ended it is over."""
        control.should_training_stop |= self.is_over(state)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Every rank has the same losses."""
        if self.is_over(state):
            control.should_training_stop = True
            control.should_save |= args.save_strategy != SaveStrategy.NO

    def is_over(self, state: TrainerState) -> bool:
        """Whether the last `patience` validation losses are no better than the best before them."""
        losses = list(validation_losses(state).values())
        return bool(losses) and len(losses) - 1 - losses.index(min(losses)) >= self.patience


class LogToTheEnd(TrainerCallback):
    """Has the steps since the last logged one in a line too, wherever training ends: each step is in some line.

    Early stopping is decided by a validation, after the step's own line would be written: so each of them has one.
    """

    def __init__(self, *, may_stop_early: bool) -> None:
        self.may_stop_early = may_stop_early

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """After upstream's own callback, which decides what the step is followed by."""
        is_last = control.should_training_stop or state.global_step >= state.max_steps
        if is_last or (self.may_stop_early and control.should_evaluate):
            control.should_log = True


class Records(TrainerCallback):
    """Writes `metrics.jsonl` and drives the progress display on rank 0. Speeds leave out validation and saving."""

    def __init__(
        self,
        *,
        batches: RankBatches,
        writer: MetricsWriter | None,
        progress: TrainingProgress | None,
        flops_per_token: float | None,
        peak_tflops: float | None,
    ) -> None:
        self.batches = batches
        self.writer = writer
        self.progress = progress
        self.flops_per_token = flops_per_token
        self.peak_tflops = peak_tflops
        self._last = time.perf_counter()
        self._seconds = 0.0  # training time since the last logged step
        self._saving_seconds = 0.0  # that training stood still since the last logged step
        self._logged_step = 0
        self._first_step = 0  # steps that an earlier run, or attempt, has done
        self._before: dict[str, int] | None = None  # what those went through; None: by this run's own schedule

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the clock; a resumed run starts at its step."""
        self._logged_step = self._first_step = state.global_step
        stored: Any = state.stateful_callbacks
        self._before = stored.get(_SEEN)
        self._last = time.perf_counter()
        if self.progress is not None:
            self.progress.start(state.global_step, state.max_steps)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Count the step's time, its data loading included. What was seen so far goes into the next checkpoint.

        A resumed run with another batch cannot work it out: its own schedule never was that of the steps before.
        """
        now = time.perf_counter()
        self._seconds += now - self._last
        self._last = now
        stored: Any = state.stateful_callbacks
        stored[_SEEN] = self._seen(state.global_step)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Saving is not training time, which stands still for it: what it took is told by the next line."""
        now = time.perf_counter()
        self._saving_seconds += now - self._last
        self._last = now

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Validation is not training time."""
        self._last = time.perf_counter()

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Turn the trainer's log into one line of metrics.jsonl."""
        logs = kwargs["logs"]
        if "loss" in logs:
            self._write_step(logs, state)
        elif VALIDATION_LOSS in logs:
            line = {
                "step": state.global_step,
                "validation_loss": logs[VALIDATION_LOSS],
                "validation_tokens": int(logs["eval_validation_tokens"]),
            }
            if self.writer is not None:
                self.writer.write(line)
            if self.progress is not None:
                self.progress.validated(state.global_step, logs[VALIDATION_LOSS])
        self._last = time.perf_counter()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Close the display."""
        if self.progress is not None:
            self.progress.stop()

    def _seen(self, step: int) -> dict[str, int]:
        before = self._before
        if before is None:
            earlier = self.batches.totals(0, self._first_step)
            before = {"tokens": earlier.tokens, "documents": earlier.documents}
        since = self.batches.totals(self._first_step, step)
        return {"tokens": before["tokens"] + since.tokens, "documents": before["documents"] + since.documents}

    def _write_step(self, logs: dict[str, Any], state: TrainerState) -> None:
        memory = _memory_of_every_rank()
        if self.writer is None:
            return
        step = state.global_step
        num_steps = step - self._logged_step
        totals = self.batches.totals(self._logged_step, step)
        seen = self._seen(step)
        seconds, self._seconds, self._logged_step = self._seconds, 0.0, step
        saving, self._saving_seconds = self._saving_seconds, 0.0
        speed = totals.tokens / seconds / self.batches.world_size if seconds else 0.0
        has_peak = self.flops_per_token is not None and self.peak_tflops is not None
        self.writer.write(
            {
                "step": step,
                "num_steps": num_steps,
                "epoch": round(seen["documents"] / self.batches.schedule.num_documents, 4),
                "loss": logs["loss"],
                "grad_norm": logs.get("grad_norm"),
                "learning_rate": logs["learning_rate"],
                "tokens_seen": seen["tokens"],
                "documents_seen": seen["documents"],
                "tokens_per_second_per_gpu": round(speed, 1),
                "padding_share": round(1 - totals.tokens / max(1, totals.computed_tokens), 4),
                "mfu": round(model_flops_utilisation(speed, self.flops_per_token, self.peak_tflops), 4)
                if has_peak and self.flops_per_token and self.peak_tflops
                else None,
                "peak_tflops": self.peak_tflops,
                "seconds": round(seconds, 4),
            }
            | ({"save_seconds": round(saving, 4)} if saving else {})
            | memory
        )
        if self.progress is not None:
            self.progress.advance(step, logs["loss"], speed * self.batches.world_size)


def _memory_of_every_rank() -> dict[str, list[float]]:
    """GiB by rank: `memory_gib`, the peak so far of what tensors take, or of the process' resident memory on a CPU.

    On GPUs also `memory_reserved_gib`, the peak of what the allocator holds for them, and `memory_device_gib`, what is
    in use of the whole GPU now: with CUDA's and NCCL's contexts, and with whatever else uses it.
    """
    if torch.cuda.is_available() and PartialState().device.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        found = {
            "memory_gib": torch.cuda.max_memory_allocated(),
            "memory_reserved_gib": torch.cuda.max_memory_reserved(),
            "memory_device_gib": total - free,
        }
    else:
        found = {"memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    mine = torch.tensor([[size / _GIB for size in found.values()]], device=PartialState().device)
    by_rank = gather(mine).T.tolist()
    return {key: [round(value, 3) for value in values] for key, values in zip(found, by_rank, strict=True)}
