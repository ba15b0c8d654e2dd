"""How a rank's training ended: its outcome for the launcher, and the errors of a run that ran out of something."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tunebook.checkpoint.verify import newest_checkpoint
from tunebook.config.schema import RunConfig
from tunebook.errors import DataError, DoesNotFitError
from tunebook.record.metrics import read_metrics
from tunebook.record.run_folder import FINISHED, write_outcome

_GIB = 2**30
_OF_THE_HOST = "DefaultCPUAllocator"  # part of torch's error message for host memory


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a training ended."""

    reason: str = FINISHED
    step: int | None = None  # optimizer steps; None: the last logged one
    best_step: int | None = None  # of the weights in `model/`, if the best were loaded


def ending_of(config: RunConfig, trainer: Any) -> Ending:
    """The ending of a training that was not stopped; the first rank prints an early stop and the best checkpoint."""
    state, best, texts = trainer.state, trainer.best_step, []
    if is_early := state.global_step < state.max_steps:
        patience = config.training.early_stopping_patience
        texts.append(
            f"stopped early after step {state.global_step}: no better {_words(config)} in "
            f"{patience} evaluation{'s' if patience != 1 else ''}"
        )
    if best is not None:
        texts.append(f"model/ is checkpoint-{best} ({state.best_metric:.4f}), the best by {_words(config)}")
    if texts and trainer.args.process_index == 0:
        print("; ".join(texts), flush=True)
    return Ending(reason="; ".join(texts) if is_early else FINISHED, step=state.global_step, best_step=best)


def _words(config: RunConfig) -> str:
    return config.training.best_metric.replace("_", " ")


def best_missing(folder: Path) -> DataError:
    """The error for a training without a checkpoint that can be loaded as the best."""
    return DataError(
        f"training.load_best_at_end=true, and no step of the run has both a validation loss and a checkpoint in "
        f"{folder / 'checkpoints'}, so there is no model/ to write. To use the last checkpoint: tunebook export "
        f"{folder}",
        problem_id="best-checkpoint-missing",
    )


def memory_ran_out(error: BaseException) -> DoesNotFitError:
    """The error after a failed allocation, with what filled the memory of this process' GPU."""
    is_of_host = not torch.cuda.is_available() or isinstance(error, MemoryError) or _OF_THE_HOST in str(error)
    message = f"the {'host' if is_of_host else 'GPU'} of rank {os.environ.get('RANK', '0')} ran out of memory"
    if not is_of_host:
        with suppress(RuntimeError):  # after such an error the driver may not answer
            free, whole = torch.cuda.mem_get_info()
            peak, others = torch.cuda.max_memory_allocated(), whole - free - torch.cuda.memory_reserved()
            message += (
                f": tensors took up to {peak / _GIB:.1f} of its {whole / _GIB:.1f} GiB, and CUDA's context, NCCL and "
                f"other processes (nvidia-smi lists those) {others / _GIB:.1f}"
            )
    return DoesNotFitError(
        f"{message}; try a smaller training.micro_batch_size, activation=checkpointing, activation.offload=true or "
        "shorter rows. tunebook plan --compare parallelism=zero3,fsdp,fsdp_offload shows what would fit",
        problem_id="memory-ran-out",
    )


def last_good(folder: Path) -> str:
    """The sentence that names the newest complete checkpoint."""
    kept = newest_checkpoint(folder)
    return f"The last good checkpoint is {kept}" if kept else "There is no good checkpoint: nothing was saved yet"


def write_ending(folder: Path, exit_code: int, ending: Ending) -> None:
    """Write this rank's outcome. torchrun turns every failure into exit code 1, so the launcher reads these files."""
    rank = int(os.environ.get("RANK", "0"))
    try:
        steps = [line["step"] for line in read_metrics(folder)]
        write_outcome(
            folder,
            rank=rank,
            exit_code=exit_code,
            reason=ending.reason,
            step=ending.step if ending.step is not None else max(steps, default=None),
            best_step=ending.best_step,
            last_checkpoint=newest_checkpoint(folder),
        )
    except OSError as error:  # the disk is full, or the folder was removed. The launcher still gets the exit code
        print(f"rank {rank} cannot write its outcome ({error}): {ending.reason}", file=sys.stderr)
