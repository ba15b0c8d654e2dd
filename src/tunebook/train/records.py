"""A trainer mixin for records, and the callback that computes them.

The numbers of metrics.jsonl go into the log that trackers and checkpoints read, too.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from tunebook.config.choices import Generation, PeftMethod, Switch
from tunebook.config.schema import RunConfig
from tunebook.data.sampler import RankBatches
from tunebook.errors import InvalidTrainingError
from tunebook.facts.methods import method_facts
from tunebook.facts.peaks import peak_of
from tunebook.model.flops import attended_length_tokens, flops_per_token, model_flops_utilization
from tunebook.record.metrics import remove_later_lines, write_line
from tunebook.train.callbacks import VALIDATION_LOSS, validation_values
from tunebook.train.reporting import Progress

_GIB = 1024**3
_SEEN = "tunebook_seen"  # in a checkpoint's trainer_state.json, under stateful_callbacks


class RecordedLogs(Trainer):
    """Completes each log with the numbers of `records`, and refuses a loss that is not finite before a save."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.records: Records | None = None
        super().__init__(*args, **kwargs)

    def step_metrics(self) -> dict[str, float]:
        """The method's metrics since the last logged step, over all ranks. A collective."""
        return {}

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As upstream, with the numbers of metrics.jsonl. Called on every rank.

        Raises: InvalidTrainingError for a number that is not finite. All ranks log the same, so they raise together.
        """
        logs.pop("train_samples_per_second", None)  # the summary at the end counts rows, not documents
        if "loss" in logs:
            logs |= self.step_metrics()
        if self.records is not None:
            self.records.complete(logs, self.args, self.state)
        super().log(logs, start_time)
        for name in ("loss", "grad_norm", VALIDATION_LOSS):
            if not math.isfinite(logs.get(name, 0.0)):
                raise loss_not_finite(self.state.global_step, name)

    def require_finite_loss(self) -> None:
        """Raises: InvalidTrainingError on every rank if any rank's loss since the last log is not finite."""
        is_finite = torch.isfinite(self._tr_loss).float().reshape(1)
        if self.accelerator.reduce(is_finite, reduction="sum").item() < self.accelerator.num_processes:
            raise loss_not_finite(self.state.global_step)


def loss_not_finite(step: int, name: str = "loss") -> InvalidTrainingError:
    """The error for a loss that is not finite. The run's final error handling adds the last good checkpoint."""
    return InvalidTrainingError(
        f"the {name} is not finite at step {step}, so the weights after it are useless. Usual causes: a learning rate "
        "that is too high, fp16 with a base model trained in bf16 (use precision=fp32 or bf16), damaged data (see "
        "tunebook data)",
        problem_id="loss-not-finite",
    )


def records_of(config: RunConfig, batches: RankBatches, model: torch.nn.Module, folder: Path | None) -> Records:
    """The records of a run; without a folder this rank writes and shows nothing."""
    generation, facts, peak = config.hardware.generation, config.model.facts, None
    if torch.cuda.is_available() and generation is not Generation.cpu:
        name = torch.cuda.get_device_name()
        uses_tf32 = config.precision.tf32 is Switch.enabled
        peak = peak_of(generation, config.precision.compute, gpu_name=name, uses_tf32=uses_tf32)
    schedule, rows = batches.schedule, method_facts(config).rows_per_document
    widths = schedule.lengths if schedule.widths is None else schedule.widths // rows
    attended = attended_length_tokens(widths.tolist())
    adapted = None  # a full fine-tune trains all that a token reaches
    if config.peft.method is not PeftMethod.full:
        adapted = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return Records(
        batches=batches,
        folder=folder,
        metrics=[*method_facts(config).metrics],
        flops_per_token=flops_per_token(facts, attended, adapted) if facts is not None else None,
        peak_tflops=peak.tflops if peak is not None else None,
    )


class Records(TrainerCallback):
    """Computes the numbers of `metrics.jsonl`; rank 0 writes them, and shows the progress.

    The trainer's log gets them, too, and with it trackers and checkpoints. Speeds exclude validation and saving.
    """

    def __init__(
        self,
        *,
        batches: RankBatches,
        folder: Path | None,
        metrics: Sequence[str],
        flops_per_token: float | None,
        peak_tflops: float | None,
    ) -> None:
        self.batches = batches
        self.folder = folder  # None: this rank writes and shows nothing
        self.metrics = metrics  # of the method, in addition to the loss
        self._progress = Progress()
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
        self._progress.start(state.global_step, state.max_steps)
        if self.folder is not None:
            remove_later_lines(self.folder, state.global_step, validation_values(state))

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
        step, is_writing = state.global_step, self.folder is not None
        line: dict[str, Any]
        if "loss" in logs:
            line = self._numbers(logs, state, args.world_size)
            highest = {key: max(value) if isinstance(value, list) else value for key, value in line.items()}
            logs |= {key: value for key, value in highest.items() if value is not None}
            if is_writing:
                self._progress.advance(step, logs["loss"], line["tokens_per_second_per_gpu"] * args.world_size)
        elif VALIDATION_LOSS in logs:
            loss = logs[VALIDATION_LOSS]
            line = {"validation_loss": loss, "validation_tokens": int(logs["eval_validation_tokens"])}
            line |= {name: logs[f"eval_{name}"] for name in (f"validation_{metric}" for metric in self.metrics)}
            if is_writing:
                first = {name.replace("_", " "): line[f"validation_{name}"] for name in [*self.metrics][:1]}
                self._progress.validated(step, {"loss": loss} | first)
        else:
            return  # the summary at the end
        if self.folder is not None:
            write_line(self.folder, {"step": step} | line)

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
        mfu = None
        if self.flops_per_token and self.peak_tflops:
            mfu = round(model_flops_utilization(speed, self.flops_per_token, self.peak_tflops), 4)
        numbers = {
            "num_steps": num_steps,
            "epoch": state.epoch,
            "loss": logs["loss"],
            **{name: logs[name] for name in self.metrics},
            "grad_norm": logs.get("grad_norm"),
            "learning_rate": logs["learning_rate"],
            "tokens_seen": seen["tokens"],
            "documents_seen": seen["documents"],
            "tokens_per_second_per_gpu": round(speed, 1),
            "padding_share": round(1 - totals.tokens / max(1, totals.computed_tokens), 4),
            "mfu": mfu,
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
        sizes = {
            "memory_gib": torch.cuda.max_memory_allocated(),
            "memory_reserved_gib": torch.cuda.max_memory_reserved(),
            "memory_device_gib": total - free,
        }
    else:
        sizes = {"memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    own_sizes = torch.tensor([[size / _GIB for size in sizes.values()]], device=PartialState().device)
    by_rank = gather(own_sizes).T.tolist()
    return {key: [round(value, 3) for value in values] for key, values in zip(sizes, by_rank, strict=True)}
