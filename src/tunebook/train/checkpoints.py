"""A trainer mixin for checkpoints: complete or absent, verified before a load, and resumed by run.yaml's settings.

Overridden in transformers' Trainer: `_save_checkpoint`, `_get_output_dir`, `_load_best_model`,
`_save` (an adapter's generation settings), `_determine_best_metric` (only saved steps are ranked), `create_scheduler`
and `_load_optimizer_and_scheduler` (run.yaml's hyperparameters apply after a resume), `_run_epoch` (a resumed run may
be complete already), `_issue_warnings_after_load` (weights that were not loaded are an error), `create_model_card`
(upstream's does not know the run, and takes the checkpoints' folder for a model).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from accelerate.utils.modeling import is_peft_model

from tunebook.checkpoint.choose import require_verified
from tunebook.checkpoint.collectives import on_first_rank
from tunebook.checkpoint.record import FileEntry, checkpoint_path, read_record, step_of
from tunebook.checkpoint.resharding import needs_universal, write_universal
from tunebook.checkpoint.save import CheckpointSaver, publish_folder, seal_files
from tunebook.errors import TunebookError
from tunebook.train.callbacks import StopOnRequest
from tunebook.train.records import RecordedLogs
from tunebook.train.restoring import (
    Hyperparameters,
    apply_hyperparameters,
    hyperparameters,
    keep_stored_formats,
    load_stored_weights,
)


class CompleteCheckpoints(RecordedLogs):
    """Saves through `saver`, and loads what it wrote."""

    def __init__(self, *args: Any, saver: CheckpointSaver, **kwargs: Any) -> None:
        self.saver = saver
        self.processor_files: list[Path] = []  # saved with the model: how it reads images
        self.best_step: int | None = None  # step of the best checkpoint, once it is loaded at the end
        self.stopping: StopOnRequest | None = None
        self._written: Hyperparameters = []  # run.yaml's, before a checkpoint is loaded
        self._loaded_from: Path | None = None
        self._is_saving = False
        self._is_universal = False  # True if the loaded checkpoint is from another number of ranks
        super().__init__(*args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write a complete checkpoint or none, and never weights after a non-finite loss.

        The saver completes it, in the background if configured.
        """
        self.require_finite_loss()
        step = self.state.global_step
        try:
            self.saver.begin(step)
            # Upstream looks for the best step's folder before FSDP has made it, on some ranks or on all.
            checkpoint_path(self.saver.unfinished, step).mkdir(parents=True, exist_ok=True)
            self._is_saving = True
            super()._save_checkpoint(model, trial)
        except BaseException:
            self.saver.abandon(step)
            raise
        finally:
            self._is_saving = False
        self.saver.finish(step, self.state.best_global_step)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """As upstream, with the files that say how the model reads images.

        An adapter gets generation settings, too: the base's may not end answers where training does.
        """
        super()._save(output_dir, state_dict)
        if not self.args.should_save:  # a rank that only helped to gather the weights
            return
        for file in self.processor_files:
            shutil.copyfile(file, Path(output_dir or str(self.args.output_dir)) / file.name)
        if is_peft_model(self.model):
            model: Any = self.model
            model.generation_config.save_pretrained(output_dir or self.args.output_dir)

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """As upstream, but only for saved steps: others cannot be loaded at the end."""
        return self.control.should_save and super()._determine_best_metric(metrics, trial)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """As upstream, but without a step if a callback ended the training at its begin."""
        if not self.control.should_training_stop:
            super()._run_epoch(*args, **kwargs)  # type: ignore[no-untyped-call]

    def _get_output_dir(self, trial: Any) -> str:
        """The folder for upstream's checkpoints: a hidden one while a checkpoint is written."""
        if self._is_saving:
            return str(self.saver.unfinished)
        folder: str = super()._get_output_dir(trial)
        return folder

    def create_model_card(  # type: ignore[override]  # as TRL's
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """Nothing: `tunebook export` writes a card from the run's records."""

    def loadable(self, checkpoint: Path) -> Path:
        """The folder to load a checkpoint from: a converted one if ZeRO's number of ranks has changed. A collective."""
        record = on_first_rank(lambda: read_record(checkpoint))
        self._is_universal = needs_universal(record.identity, self.saver.identity)
        if self.is_deepspeed_enabled:
            self.accelerator.state.deepspeed_plugin.deepspeed_config["checkpoint"] = {
                "load_universal": self._is_universal
            }
            if self.deepspeed is not None:  # the engine exists and has read that setting
                self.deepspeed._config.load_universal_checkpoint = self._is_universal
        self._loaded_from = checkpoint
        if self._is_universal:
            self._loaded_from = on_first_rank(lambda: write_universal(checkpoint, self.saver.unfinished))
        return self._loaded_from

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """As upstream. The optimizer is complete now, and no checkpoint is loaded yet."""
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        self._written = hyperparameters(self.optimizer)
        return scheduler

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """As upstream, then run.yaml's hyperparameters, which the checkpoint's would silently replace.

        Universal checkpoints of DeepSpeed 0.19 restore one step tensor that all groups of ZeRO-3 share, so that every
        group's update increments it. It is on the CPU, where a fused update on a GPU does not accept it.
        """
        if not (self.is_deepspeed_enabled or self.is_fsdp_enabled):
            keep_stored_formats(self.optimizer)
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        apply_hyperparameters(self._written, self.optimizer, self.lr_scheduler)
        engine: Any = self.deepspeed
        if engine is None:
            return
        if hasattr(engine.optimizer, "clip_grad"):
            engine.optimizer.clip_grad = engine.gradient_clipping()  # ZeRO-1 and 2 restore it from the checkpoint, too
        if self._is_universal:
            for parameter, state in engine.optimizer.optimizer.state.items():
                if isinstance(state.get("step"), torch.Tensor):
                    state["step"] = state["step"].to(parameter.device, copy=True)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Load the weights that upstream did not find by name; it only warns about them."""
        assert self._loaded_from is not None
        load_stored_weights(self.model, self._loaded_from, load_result)

    def _load_best_model(self) -> None:
        """As upstream, after every rank has verified the checkpoint; not before a requeue."""
        if self.stopping is not None and self.stopping.is_stopping:
            return
        self.saver.settle()
        best = Path(str(self.state.best_model_checkpoint))
        if best.parent == self.saver.unfinished:  # where it was while upstream noted its path
            best = self.saver.folder / best.name
        require_verified(best)
        self.state.best_model_checkpoint = str(self.loadable(best))
        super()._load_best_model()
        self.state.best_model_checkpoint = str(best)
        self.best_step = step_of(best)

    def save_final_model(self, folder: Path) -> dict[str, FileEntry]:
        """Write the trained model, gathered from all ranks, as one complete Hugging Face folder or none.

        Its files are flushed to disk before it gets its name; returns their sizes and hashes. FSDP's checkpoints are
        sharded by default, and upstream would silently write no whole model. Raises: TunebookError if no weights were
        written.
        """
        unfinished = folder.with_name(f".{folder.name}.unfinished")
        if self.is_world_process_zero():
            for left in (unfinished, *folder.parent.glob(f".{folder.name}.replaced-*")):
                shutil.rmtree(left, ignore_errors=True)
        if self.is_fsdp_enabled:
            self.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
        try:
            self.save_model(str(unfinished))
            on_first_rank(lambda: _require_weights(unfinished, folder))
            files = seal_files(unfinished)
            on_first_rank(lambda: publish_folder(unfinished, folder))
        except BaseException:
            if self.is_world_process_zero():
                shutil.rmtree(unfinished, ignore_errors=True)
            raise
        return files


def _require_weights(unfinished: Path, folder: Path) -> None:
    if not any(unfinished.glob("*.safetensors")):
        raise TunebookError(
            f"the training is done, but no weights were written to {folder}; the newest folder in "
            f"{folder.parent / 'checkpoints'} holds them, if checkpoints were asked for",
            problem_id="model-not-written",
        )
