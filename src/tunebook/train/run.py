"""What one rank does, from the frozen `run.yaml` to the final model. The launcher starts it once per rank.

The rank writes its result to `outcome-<rank>.json` in the run folder, since torchrun turns every failure into exit
code 1.
"""

from __future__ import annotations

import json
import math
import os
import sys
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from tunebook.checkpoint.choose import choose_checkpoint, same_command
from tunebook.checkpoint.identity import differences, resumed_identity
from tunebook.checkpoint.record import RECORD_FILE, read_record
from tunebook.checkpoint.unpickling import restricted_unpickling
from tunebook.checkpoint.verify import newest_checkpoint
from tunebook.config.choices import Generation, PeftMethod, Switch
from tunebook.config.frozen import load_config
from tunebook.config.schema import RunConfig
from tunebook.data.batch import schedule_of, solve_batch
from tunebook.data.prepared import PREPARED_FILE, load_prepared
from tunebook.errors import DataError, DoesNotFitError, InvalidTrainingError, StoppedError, TunebookError
from tunebook.facts.compiling import compiles_kernels
from tunebook.facts.peaks import peak_of
from tunebook.hardware.disk import disk_full, is_disk_full
from tunebook.model.flops import attended_length_tokens, flops_per_token
from tunebook.model.gpu_memory import is_out_of_memory
from tunebook.record.manifest import MODEL_FILES, add_to_manifest
from tunebook.record.metrics import read_metrics
from tunebook.record.provenance import describe_processor
from tunebook.record.run_folder import FINISHED, LOG_FILE, UNSAVED_FILE, write_outcome
from tunebook.record.start_up import StartClock
from tunebook.terminal import quiet_libraries
from tunebook.train.build import build_trainer
from tunebook.train.callbacks import (
    EarlyStopping,
    FiniteLoss,
    LogToTheEnd,
    Records,
    SaveNothing,
    StopOnRequest,
    validation_losses,
)
from tunebook.train.methods.sft import RecipeTrainer
from tunebook.train.out_of_memory import memory_ran_out
from tunebook.train.rank_process import AGREED_ENDINGS, StopRequest
from tunebook.train.reporting import TrainingProgress, set_up_libraries
from tunebook.train.restoring import RestoredState


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a training ended."""

    reason: str = FINISHED
    step: int | None = None  # optimizer steps; None: the last logged one
    best_step: int | None = None  # of the weights in `model/`, if the best were loaded


def run_rank(folder: Path, request: StopRequest, clock: StartClock | None = None) -> int:
    """Train in this process and write the outcome; returns the exit code.

    `request` is listening already. `clock` has the phases of this process so far.
    """
    exit_code, ending = 0, Ending()
    try:
        with quiet_libraries(folder / LOG_FILE):
            set_up_libraries()
            ending = train(folder, request, clock or StartClock())
    except TunebookError as error:
        exit_code, ending = error.exit_code, Ending(reason=error.message)
    except BaseException as error:
        if is_disk_full(error):
            exit_code = DoesNotFitError.exit_code
            ending = Ending(reason=f"{disk_full(folder).message}. {_last_good(folder)}")
        elif is_out_of_memory(error):
            traceback.print_exc()
            exit_code = DoesNotFitError.exit_code
            ending = Ending(reason=f"{memory_ran_out(folder, error).message}. {_last_good(folder)}")
        else:
            traceback.print_exc()
            exit_code, ending = 1, Ending(reason=f"{type(error).__name__}: {error}")
    _write_ending(folder, exit_code, ending)
    if exit_code in AGREED_ENDINGS and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # waits for all ranks, so a rank that failed alone skips it
    return exit_code


def train(folder: Path, request: StopRequest, clock: StartClock) -> Ending:
    """Run what `run.yaml` says, without composing or deciding anything.

    Raises: StoppedError after a clean save on request; InvalidTrainingError for a loss that is not finite.
    """
    config = load_config(folder / "run.yaml")
    prepared = load_prepared(Path(json.loads((folder / PREPARED_FILE).read_text())["folder"]))
    lengths = prepared.train.load_lengths().astype(np.int64)
    plan = solve_batch(config, lengths)
    schedule = schedule_of(config, plan, lengths)
    clock.passed("data")
    trainer = build_trainer(config, plan, prepared, schedule, folder, clock)
    if trainer.args.process_index == 0 and compiles_kernels(config):
        print("the first steps compile kernels, which takes up to minutes; later runs reuse them", flush=True)
    patience = config.training.early_stopping_patience
    stopping = trainer.stopping = StopOnRequest(request, trainer.saver)
    trainer.add_callback(stopping)
    if is_unsaved := (folder / UNSAVED_FILE).exists():
        trainer.add_callback(SaveNothing())
    trainer.add_callback(LogToTheEnd(may_stop_early=patience is not None))
    trainer.records = _records(config, trainer, folder)
    trainer.add_callback(trainer.records)
    trainer.add_callback(FiniteLoss())
    resumed = _resumed(config, trainer, folder)
    if patience is not None:
        trainer.add_callback(EarlyStopping(patience))  # uses the restored state
    if trainer.args.process_index == 0:
        facts: dict[str, Any] = {"hardware": {"nccl": nccl_version()}, "model": _loaded_model(trainer)}
        if trainer.args.device.type == "cpu":
            facts["processor"] = describe_processor()
        add_to_manifest(folder, facts)
    _run_to_its_end(config, trainer, resumed, folder)
    trainer.accelerator.wait_for_everyone()  # rank 0 may still be saving and must not be killed
    if stopping.is_stopping:
        by = request.name or request.in_file() or "another rank"
        raise StoppedError(
            f"stopped by {by} after step {trainer.state.global_step}, saved in "
            f"{newest_checkpoint(folder)}; {same_command(config)} resumes from there",
            problem_id="stopped",
        )
    if config.training.load_best_at_end and trainer.best_step is None:
        raise _no_best(folder)
    if is_unsaved:
        return _ending_of(config, trainer)
    files = trainer.save_final_model(folder / "model")
    if trainer.args.process_index == 0:
        add_to_manifest(folder, {MODEL_FILES: {name: asdict(entry) for name, entry in files.items()}})
    return _ending_of(config, trainer)


def _no_best(folder: Path) -> DataError:
    """The error for a training without a checkpoint that can be loaded as the best."""
    return DataError(
        f"training.load_best_at_end=true, and no step of the run has both a validation loss and a checkpoint in "
        f"{folder / 'checkpoints'}, so there is no model/ to write. To use the last checkpoint: tunebook export "
        f"{folder}",
        problem_id="best-checkpoint-missing",
    )


def _ending_of(config: RunConfig, trainer: RecipeTrainer) -> Ending:
    """The ending of a training that was not stopped; the first rank prints an early stop and the best checkpoint."""
    state, best, losses = trainer.state, trainer.best_step, validation_losses(trainer.state)
    lowest = min(losses, key=lambda step: (losses[step], step), default=0)
    reason, text, better = FINISHED, None, ""
    score = state.best_metric if state.best_metric is not None else math.nan
    model = f"model/ is checkpoint-{best} ({score:.4f})"
    if best is not None:
        if losses.get(lowest, math.inf) < score:
            every = f"training.save_every_steps={config.training.save_every_steps}"
            better = f"; step {lowest} had {losses[lowest]:.4f} and has no checkpoint ({every})"
        text = f"{model}, the best by validation loss{better}"
    if state.global_step < state.max_steps:
        patience = config.training.early_stopping_patience or 0
        evaluations = "1 evaluation" if patience == 1 else f"{patience} evaluations"
        last = f"the best was {losses[lowest]:.4f}, and model/ is that of the last step"
        text = reason = (
            f"stopped early after step {state.global_step}: no better validation loss in {evaluations}; "
            f"{last if best is None else model + better}"
        )
    if text is not None and trainer.args.process_index == 0:
        print(text, flush=True)
    return Ending(reason=reason, step=state.global_step, best_step=best)


def _resumed(config: RunConfig, trainer: RecipeTrainer, folder: Path) -> Path | None:
    """The checkpoint to resume from; the first rank prints it."""

    def say(text: str) -> None:
        if trainer.args.process_index == 0:
            print(text, flush=True)

    resumed = choose_checkpoint(config, folder, trainer.saver.identity, say)
    if resumed is not None:
        record, own = read_record(resumed), trainer.saver.identity
        is_same = record.identity.data_sha256 == own.data_sha256
        trainer.add_callback(RestoredState(config.training, trainer, resumed, has_same_data=is_same, say=say))
        trainer.saver.identity = resumed_identity(record.identity, own)
        say(
            f"resuming from {resumed}: every file in it was read and is what was written. {RECORD_FILE} proves that, "
            "but not who wrote it; files that would run code are refused"
        )
        if changes := "; ".join(difference.text for difference in differences(record.identity, own)):
            say(
                f"changed from step {record.step + 1} on (training.resume_anyway): {changes}. Kept from the "
                "checkpoint: the weights, the optimizer's moments and step count, and the state of the random numbers"
            )
        resumed = trainer.loadable(resumed)
    return resumed


def _run_to_its_end(config: RunConfig, trainer: RecipeTrainer, resumed: Path | None, folder: Path) -> None:
    """Train, and validate once at the end if no interval is configured. Raises: as `train`."""
    is_validated_once = trainer.validation_batches is not None and not config.training.evaluate_every_steps
    try:
        with restricted_unpickling(), trainer.saver.settled():
            trainer.train(resume_from_checkpoint=str(resumed) if resumed else None)
            trainer.require_finite_loss()
        if is_validated_once and not (trainer.stopping and trainer.stopping.is_stopping):
            trainer.evaluate()
    except InvalidTrainingError as error:
        raise InvalidTrainingError(f"{error.message}. {_last_good(folder)}", problem_id=error.problem_id) from error


def _last_good(folder: Path) -> str:
    kept = newest_checkpoint(folder)
    return f"The last good checkpoint is {kept}" if kept else "There is no good checkpoint: nothing was saved yet"


def _loaded_model(trainer: RecipeTrainer) -> dict[str, Any]:
    """The manifest's facts about the base weights: the hub's commit, or a folder's fingerprint."""
    model: Any = trainer.model
    commit = getattr(model.config, "_commit_hash", None)
    known = {"weights_fingerprint": trainer.saver.identity.model["weights_fingerprint"]}
    return known | ({"revision": commit} if commit else {})


def _num_adapted(config: RunConfig, parameters: Iterable[torch.nn.Parameter]) -> int | None:
    """The trained parameters of adapters; None in a full fine-tune, which trains all that a token reaches."""
    if config.peft.method is PeftMethod.full:
        return None
    return sum(parameter.numel() for parameter in parameters if parameter.requires_grad)


def _records(config: RunConfig, trainer: RecipeTrainer, folder: Path) -> Records:
    generation, facts = config.hardware.generation, config.model.facts
    peak = None
    if torch.cuda.is_available() and generation is not Generation.cpu:
        name = torch.cuda.get_device_name()
        uses_tf32 = config.precision.tf32 is Switch.enabled
        peak = peak_of(generation, config.precision.compute, gpu_name=name, uses_tf32=uses_tf32)
    batches = trainer.train_batches
    model: Any = trainer.model
    adapted = _num_adapted(config, model.parameters())
    attended = attended_length_tokens(batches.schedule.lengths.tolist())
    is_first_rank = trainer.args.process_index == 0
    return Records(
        batches=batches,
        folder=folder if is_first_rank else None,
        progress=TrainingProgress(Console()) if is_first_rank else None,
        flops_per_token=flops_per_token(facts, attended, adapted) if facts is not None else None,
        peak_tflops=peak.tflops if peak is not None else None,
    )


def nccl_version() -> str | None:
    """The version of NCCL that torch was built with; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(map(str, version))


def _write_ending(folder: Path, exit_code: int, ending: Ending) -> None:
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
