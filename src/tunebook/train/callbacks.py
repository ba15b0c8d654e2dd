"""The trainer's callbacks: records, progress, early stopping, stopping on request, refusing a non-finite loss."""

from __future__ import annotations

import math
import resource
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather, reduce
from torch._dynamo.utils import calculate_time_spent, counters
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import SaveStrategy

from tunebook.checkpoint.save import CheckpointSaver
from tunebook.data.sampler import RankBatches
from tunebook.errors import InvalidTrainingError
from tunebook.model.flops import model_flops_utilization
from tunebook.record.manifest import add_to_manifest
from tunebook.record.metrics import remove_later_lines, write_line
from tunebook.record.start_up import COMPILED_KEY, StartClock, note_first_step
from tunebook.train.rank_process import StopRequest
from tunebook.train.reporting import TrainingProgress

_GIB = 1024**3
VALIDATION_LOSS = "eval_validation_loss"  # the key in the trainer's log
_SEEN = "tunebook_seen"  # in a checkpoint's trainer_state.json, under stateful_callbacks


def validation_losses(state: TrainerState) -> dict[int, float]:
    """The validation losses by step, in order, including those before a resume, which the checkpoint keeps."""
    return {int(entry["step"]): entry[VALIDATION_LOSS] for entry in state.log_history if VALIDATION_LOSS in entry}


def loss_not_finite(step: int, which: str = "loss") -> InvalidTrainingError:
    """The error for a loss that is not finite. The run's final error handling adds the last good checkpoint."""
    return InvalidTrainingError(
        f"the {which} is not finite at step {step}, so the weights after it are useless. Usual causes: a learning rate "
        "that is too high, fp16 with a base model trained in bf16 (use precision=fp32 or bf16), damaged data (see "
        "tunebook data)",
        problem_id="loss-not-finite",
    )


class FiniteLoss(TrainerCallback):
    """Stops the run at the first logged loss, gradient norm or validation loss that is not finite, before a save."""

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

    The same collective reports when a background save has ended on every rank. The save is settled then, so that a
    failed save ends the run after this step and not at the next save.
    """

    def __init__(self, request: StopRequest, saver: CheckpointSaver) -> None:
        self.request = request
        self.saver = saver
        self.is_stopping = False

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Stop all ranks if one was asked to. Raises: the error of a save in the background."""
        state_of_rank = [float(self.request.name is not None), float(self.saver.is_busy)]
        num_asked, num_busy = reduce(torch.tensor(state_of_rank, device=args.device), reduction="sum").tolist()
        if num_asked > 0:
            self.is_stopping = True
            control.should_log = True  # or no line would contain the steps since the last logged one
            control.should_save = True
            control.should_training_stop = True
        if self.saver.is_pending and num_busy == 0:
            self.saver.settle()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Complete the last save before upstream waits for its uploads. Raises: as `on_step_end`."""
        self.saver.settle()


class SaveNothing(TrainerCallback):
    """Keeps a measurement from saving a checkpoint, even if it is asked to stop; runs after `StopOnRequest`."""

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Every rank does the same."""
        control.should_save = False


class EarlyStopping(TrainerCallback):
    """Ends the training after `patience` validations in a row without improvement, and saves the last step.

    It counts from the losses in the checkpoint, so a resume changes nothing. Upstream's callback counts from zero after
    a resume, and a restored one has the patience of the checkpoint instead of run.yaml's.
    """

    def __init__(self, patience: int) -> None:
        self.patience = patience

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
        """True if the last `patience` validation losses are not better than the best before them."""
        losses = list(validation_losses(state).values())
        return bool(losses) and len(losses) - 1 - losses.index(min(losses)) >= self.patience


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


class Records(TrainerCallback):
    """Computes the numbers of `metrics.jsonl`; rank 0 writes them, and shows the progress.

    The trainer's log gets them, too, and with it trackers and checkpoints. Speeds exclude validation and saving.
    """

    def __init__(
        self,
        *,
        batches: RankBatches,
        folder: Path | None,
        progress: TrainingProgress | None,
        flops_per_token: float | None,
        peak_tflops: float | None,
    ) -> None:
        self.batches = batches
        self.folder = folder  # None: this rank writes nothing
        self.progress = progress
        self.flops_per_token = flops_per_token
        self.peak_tflops = peak_tflops
        self._last = time.perf_counter()
        self._seconds = 0.0  # training time since the last logged step
        self._saving_seconds = 0.0  # time that training waited for saves since the last logged step
        self._logged_step = 0
        self._first_step = 0  # steps of an earlier run or attempt
        self._before: dict[str, int] | None = None  # their tokens and documents; None: by this run's schedule

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the clock; a resumed run starts at its step, and writes the lines of later steps again."""
        self._logged_step = self._first_step = state.global_step
        stored: Any = state.stateful_callbacks
        self._before = stored.get(_SEEN)
        self._last = time.perf_counter()
        if self.folder is not None:
            remove_later_lines(self.folder, state.global_step, validation_losses(state))
        if self.progress is not None:
            self.progress.start(state.global_step, state.max_steps)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add the step's time with its data loading, and store the tokens and documents for the next checkpoint.

        A resumed run with another batch size could not compute them, since the earlier steps had another schedule.
        The epoch is that of the documents. Upstream counts micro-batches, and one epoch for all of ours.
        """
        now = time.perf_counter()
        self._seconds += now - self._last
        self._last = now
        stored: Any = state.stateful_callbacks
        stored[_SEEN] = seen = self._seen(state.global_step)
        state.epoch = round(seen["documents"] / len(self.batches.schedule.lengths), 4)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Exclude the save from the training time. The next line reports it."""
        now = time.perf_counter()
        self._saving_seconds += now - self._last
        self._last = now

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Exclude the validation from the training time."""
        self._last = time.perf_counter()

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Exclude the log from the training time."""
        self._last = time.perf_counter()

    def complete(self, logs: dict[str, Any], args: TrainingArguments, state: TrainerState) -> None:
        """Write the line of one of the trainer's logs. Add a step's numbers to its log: of the ranks', the highest.

        Called on every rank before any reader of the log. A collective.
        """
        line: dict[str, Any] = {"step": state.global_step}
        if "loss" in logs:
            numbers = self._numbers(logs, state, args.world_size)
            line |= numbers
            highest = {key: max(value) if isinstance(value, list) else value for key, value in numbers.items()}
            logs |= {key: value for key, value in highest.items() if value is not None}
            if self.progress is not None:
                speed = numbers["tokens_per_second_per_gpu"] * args.world_size
                self.progress.advance(state.global_step, logs["loss"], speed)
        elif VALIDATION_LOSS in logs:
            num_tokens = int(logs["eval_validation_tokens"])
            line |= {"validation_loss": logs[VALIDATION_LOSS], "validation_tokens": num_tokens}
            if self.progress is not None:
                self.progress.validated(state.global_step, logs[VALIDATION_LOSS])
        else:
            return  # the summary at the end
        if self.folder is not None:
            write_line(self.folder, line)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Close the progress display."""
        if self.progress is not None:
            self.progress.stop()

    def _seen(self, step: int) -> dict[str, int]:
        before = self._before
        if before is None:
            earlier = self.batches.totals(0, self._first_step)
            before = {"tokens": earlier.tokens, "documents": earlier.documents}
        since = self.batches.totals(self._first_step, step)
        return {"tokens": before["tokens"] + since.tokens, "documents": before["documents"] + since.documents}

    def _numbers(self, logs: dict[str, Any], state: TrainerState, num_gpus: int) -> dict[str, Any]:
        step = state.global_step
        num_steps = step - self._logged_step
        totals = self.batches.totals(self._logged_step, step)
        seen = self._seen(step)
        seconds, self._seconds, self._logged_step = self._seconds, 0.0, step
        saving, self._saving_seconds = self._saving_seconds, 0.0
        speed = totals.tokens / seconds / num_gpus if seconds else 0.0
        has_peak = self.flops_per_token is not None and self.peak_tflops is not None
        numbers = {
            "num_steps": num_steps,
            "epoch": state.epoch,
            "loss": logs["loss"],
            "grad_norm": logs.get("grad_norm"),
            "learning_rate": logs["learning_rate"],
            "tokens_seen": seen["tokens"],
            "documents_seen": seen["documents"],
            "tokens_per_second_per_gpu": round(speed, 1),
            "padding_share": round(1 - totals.tokens / max(1, totals.computed_tokens), 4),
            "mfu": round(model_flops_utilization(speed, self.flops_per_token, self.peak_tflops), 4)
            if has_peak and self.flops_per_token and self.peak_tflops
            else None,
            "peak_tflops": self.peak_tflops,
            "seconds": round(seconds, 4),
        }
        saved = {"save_seconds": round(saving, 4)} if saving else {}
        return numbers | saved | _memory_of_every_rank()


def _memory_of_every_rank() -> dict[str, list[float]]:
    """GiB by rank: `memory_gib`, the peak of allocated tensors, or of the process' resident memory on a CPU.

    On GPUs also `memory_reserved_gib`, the peak of the allocator's reserved memory, and `memory_device_gib`, the memory
    of the whole GPU that is in use now, with the contexts of CUDA and NCCL and with other processes.
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


def compiled_graphs() -> tuple[int, float]:
    """The graphs that torch has compiled in this process, and the seconds that it took, cached code included."""
    return counters["stats"]["unique_graphs"], calculate_time_spent().get("entire_frame_compile", 0.0)


class StartRecord(TrainerCallback):
    """Times the last phases of a rank's start (wrapping, checks, first step), then counts steps.

    At the end it records what was compiled: graphs after the first step interrupt the training.

    It runs before the callbacks that check the wrapped model.
    """

    def __init__(self, clock: StartClock, folder: Path) -> None:
        self.clock = clock
        self.folder = folder
        self._is_over = False
        self._graphs_at_start = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The model was wrapped, the optimizer created, and a checkpoint read, if any."""
        self.clock.passed("wrap")

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """All callbacks have begun, including the leak probe."""
        if not self._is_over:
            self.clock.passed("checks")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """A step has ended. After the first one, wait for the GPU once."""
        self.clock.step = state.global_step
        if self._is_over:
            return
        self._is_over = True
        if args.device.type == "cuda":
            torch.cuda.synchronize()
        self.clock.passed("first_step")
        self._graphs_at_start = compiled_graphs()[0]
        if state.is_world_process_zero:
            note_first_step(self.folder, self.clock)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Record the compiled graphs of rank 0, if any."""
        graphs, seconds = compiled_graphs()
        if graphs and state.is_world_process_zero:
            later = graphs - self._graphs_at_start
            found = {"graphs": graphs, "after_first_step": later, "seconds": round(seconds, 3)}
            add_to_manifest(self.folder, {COMPILED_KEY: found})
