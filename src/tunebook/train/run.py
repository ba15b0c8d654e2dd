"""What one rank does, from the frozen `run.yaml` to the final model. The launcher starts it once per rank."""

from __future__ import annotations

import json
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tunebook.train.methods.sft  # noqa: F401  # of most runs: imported with the other libraries, before it is needed
from tunebook.checkpoint.choose import choose_checkpoint, same_command
from tunebook.checkpoint.identity import differences
from tunebook.checkpoint.record import RECORD_FILE, read_record
from tunebook.checkpoint.unpickling import restricted_unpickling
from tunebook.checkpoint.verify import newest_checkpoint
from tunebook.config.frozen import load_config
from tunebook.config.schema import RunConfig
from tunebook.data.batch import schedule_of, solve_batch
from tunebook.data.prepared import PREPARED_FILE, load_prepared
from tunebook.errors import DoesNotFitError, InvalidTrainingError, StoppedError, TunebookError
from tunebook.facts.compiling import compiles_kernels
from tunebook.hardware.disk import disk_full, is_disk_full
from tunebook.model.gpu_memory import is_out_of_memory
from tunebook.record.manifest import MODEL_FILES, add_to_manifest
from tunebook.record.run_folder import LOG_FILE, UNSAVED_FILE
from tunebook.record.start_up import StartClock
from tunebook.terminal import quiet_libraries
from tunebook.train.build import build_trainer
from tunebook.train.callbacks import EarlyStopping, LogToTheEnd, StopOnRequest
from tunebook.train.endings import Ending, best_missing, ending_of, last_good, memory_ran_out, write_ending
from tunebook.train.methods.trainer import MethodTrainer
from tunebook.train.rank_process import AGREED_ENDINGS, StopRequest
from tunebook.train.records import records_of
from tunebook.train.reporting import set_up_libraries
from tunebook.train.restoring import RestoredState


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
        exit_code, reason = 1, f"{type(error).__name__}: {error}"
        if is_disk_full(error):
            exit_code, reason = DoesNotFitError.exit_code, f"{disk_full(folder).message}. {last_good(folder)}"
        else:
            traceback.print_exc()
        if is_out_of_memory(error):
            exit_code, reason = DoesNotFitError.exit_code, f"{memory_ran_out(error).message}. {last_good(folder)}"
        ending = Ending(reason=reason)
    write_ending(folder, exit_code, ending)
    if exit_code in AGREED_ENDINGS and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # waits for all ranks, so a rank that failed alone skips it
    return exit_code


def train(folder: Path, request: StopRequest, clock: StartClock) -> Ending:
    """Run what `run.yaml` says, without composing or deciding anything.

    Raises: StoppedError after a clean save on request; InvalidTrainingError for a loss that is not finite.
    """
    config = load_config(folder / "run.yaml")
    prepared = load_prepared(Path(json.loads((folder / PREPARED_FILE).read_text())["folder"]))
    lengths, widths = (of().astype(np.int64) for of in (prepared.train.load_lengths, prepared.train.load_widths))
    plan = solve_batch(config, lengths, widths)
    schedule = schedule_of(config, plan, lengths, widths)
    clock.passed("data")
    trainer = build_trainer(config, plan, prepared, schedule, folder, clock)
    is_unsaved = (folder / UNSAVED_FILE).exists()
    stopping = trainer.stopping = StopOnRequest(request, trainer.saver, is_unsaved=is_unsaved)
    trainer.add_callback(stopping)
    resumed = _add_callbacks(config, trainer, folder)
    if trainer.is_world_process_zero():
        _record_facts(config, trainer, folder)
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
        raise best_missing(folder)
    if not is_unsaved:
        files = trainer.save_final_model(folder / "model")
        if trainer.is_world_process_zero():
            add_to_manifest(folder, {MODEL_FILES: {name: asdict(entry) for name, entry in files.items()}})
    return ending_of(config, trainer)


def _add_callbacks(config: RunConfig, trainer: MethodTrainer, folder: Path) -> Path | None:
    """Add the callbacks in the order that they need each other; returns the checkpoint to resume from.

    A new callback goes here. `build_trainer` adds only those that check the wrapped model.
    """
    patience = config.training.early_stopping_patience
    model: Any = trainer.model
    trainer.records = records_of(
        config, trainer.train_batches, model, folder if trainer.is_world_process_zero() else None
    )
    trainer.add_callback(LogToTheEnd(may_stop_early=patience is not None))
    trainer.add_callback(trainer.records)
    resumed = _resumed(config, trainer, folder)
    if patience is not None:
        trainer.add_callback(EarlyStopping(patience, config.training.best_metric))  # uses the restored state
    return resumed


def _record_facts(config: RunConfig, trainer: MethodTrainer, folder: Path) -> None:
    """Record what only a rank knows: NCCL, and the base weights (the hub's commit, or a folder's fingerprint)."""
    if compiles_kernels(config):
        print("the first steps compile kernels, which takes up to minutes; later runs reuse them", flush=True)
    model: Any = trainer.model
    weights = {"weights_fingerprint": trainer.saver.identity.model["weights_fingerprint"]}
    if (commit := getattr(model.config, "_commit_hash", None)) is not None:
        weights["revision"] = commit
    nccl = None
    if torch.cuda.is_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    add_to_manifest(folder, {"hardware": {"nccl": nccl}, "model": weights})


def _resumed(config: RunConfig, trainer: MethodTrainer, folder: Path) -> Path | None:
    """The checkpoint to resume from; the first rank prints it."""

    def say(text: str) -> None:
        if trainer.is_world_process_zero():
            print(text, flush=True)

    resumed = choose_checkpoint(config, folder, trainer.saver.identity, say)
    if resumed is None:
        return None
    record, identity = read_record(resumed), trainer.saver.identity
    is_same = record.identity.data_sha256 == identity.data_sha256
    trainer.add_callback(RestoredState(config.training, trainer, resumed, has_same_data=is_same))
    say(
        f"resuming from {resumed}: every file in it was read and is what was written. {RECORD_FILE} proves that, "
        "but not who wrote it; files that would run code are refused"
    )
    if changes := "; ".join(difference.text for difference in differences(record.identity, identity)):
        say(
            f"changed from step {record.step + 1} on (training.resume_anyway): {changes}. Kept from the "
            "checkpoint: the weights, the optimizer's moments and step count, and the state of the random numbers"
        )
    return trainer.loadable(resumed)


def _run_to_its_end(config: RunConfig, trainer: MethodTrainer, resumed: Path | None, folder: Path) -> None:
    """Train, and validate once at the end if no interval is configured. Raises: as `train`."""
    is_validated_once = trainer.validation_batches is not None and not config.training.evaluate_every_steps
    try:
        with restricted_unpickling(), trainer.saver.settled():
            trainer.train(resume_from_checkpoint=str(resumed) if resumed else None)
            trainer.require_finite_loss()
        if is_validated_once and not (trainer.stopping and trainer.stopping.is_stopping):
            trainer.evaluate()
    except InvalidTrainingError as error:
        raise InvalidTrainingError(f"{error.message}. {last_good(folder)}", problem_id=error.problem_id) from error
