"""The reference's log-probabilities of a full fine-tune, computed once before the first step and kept with the data.

The model as all ranks hold it computes them, so that any strategy works and no second model is needed. They are of all
pairs, whatever the number of steps, in a file of the prepared data for these weights and this precision.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from tunebook.checkpoint.collectives import on_first_rank
from tunebook.config.choices import MixedPrecision
from tunebook.data.prepared import PreparedPart
from tunebook.errors import RequestError, counted
from tunebook.files import sha256_text
from tunebook.parallel.deepspeed import forget_parameter_order
from tunebook.train.methods.trainer import Run

_NUM_NAME_DIGITS = 16
_PRECISION = ("compute", "master_weights", "fp8_scaling")
_POSITIONS = ("yarn_factor", "yarn_original_positions")  # by which equal weights compute otherwise
_AUTOCAST = MixedPrecision.autocast.name


def reference_log_probabilities(trainer: Any, model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a batch's chosen and rejected sides, by TRL, with an adapter switched off. Shapes: twice (P,)."""
    if isinstance(trainer.model_wrapped, FSDPModule):
        # FSDP's first pass looks up which parameters are trained, and PEFT marks those of a switched-off adapter as
        # frozen. torch has no public name for this; it does nothing after the first pass.
        state: Any = trainer.model_wrapped._get_fsdp_state()
        state._lazy_init()
    forget_parameter_order(trainer.model_wrapped)  # passes with and without adapters take turns
    chosen, rejected = trainer.compute_ref_log_probs(model, inputs)
    forget_parameter_order(trainer.model_wrapped)
    return chosen, rejected


class ReferencePass(TrainerCallback):
    """Finds or computes the reference's log-probabilities when the training begins."""

    def __init__(self, trainer: Any, run: Run) -> None:
        self.trainer = trainer
        self.run = run
        self.tables: dict[str, torch.Tensor] = {}  # by part: of each pair, chosen and rejected

    def of(self, pairs: torch.Tensor, part: str) -> tuple[torch.Tensor, torch.Tensor]:
        """The log-probabilities of some pairs' sides. Shapes: (P,) -> twice (P,)."""
        table = self.tables[part]
        found = torch.where(pairs[:, None] >= 0, table[pairs.clamp(min=0).to(table.device)].to(pairs.device), 0.0)
        return found[:, 0], found[:, 1]

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Raises: RequestError if a resumed run does not find them: its model is trained already."""
        for name, part in self.run.prepared.parts().items():
            file = part.folder / f"reference-{self._key()}.npy"
            table: np.ndarray | None = on_first_rank(partial(_read, file))
            if table is None and state.global_step:
                raise RequestError(
                    f"{file} is gone, and this run's model is trained already, so it cannot compute the reference's "
                    "log-probabilities; run the same command with training.resume=never training.max_steps=1, which "
                    "computes them, and then without these two, which resumes",
                    problem_id="reference-missing",
                )
            if table is None:
                if state.is_world_process_zero:
                    what = counted(part.counts.num_documents, f"{name} pair")
                    print(f"the untrained model computes the log-probabilities of {what}, once", flush=True)
                table = self._compute(part)
                on_first_rank(partial(_write, file, table))
            self.tables[name] = torch.from_numpy(table)

    def _key(self) -> str:
        """The hash of everything but the data that the log-probabilities depend on."""
        identity = self.trainer.saver.identity
        precision = {name: identity.settings["precision"][name] for name in _PRECISION}
        precision["mixed_precision"] = identity.settings["parallelism"].get("mixed_precision", _AUTOCAST)
        positions = {name: identity.settings["model"][name] for name in _POSITIONS}
        seed = identity.settings["training"]["seed"] if identity.model["weights"] == "random" else None
        return sha256_text(json.dumps([identity.model, positions, precision, seed], sort_keys=True))[:_NUM_NAME_DIGITS]

    def _compute(self, part: PreparedPart) -> np.ndarray:
        """The table of all pairs, each computed by one rank."""
        trainer, dataset = self.trainer, part.load()
        table = torch.zeros(len(dataset), 2, dtype=torch.float64, device=trainer.args.device)
        trainer.model.eval()
        for batch in trainer._loader(dataset, self.run.batches_of(part)):
            inputs = trainer._prepare_inputs(batch)
            own = inputs.pop("pairs")
            with trainer.compute_loss_context_manager():
                sides = torch.stack(reference_log_probabilities(trainer, trainer.model_wrapped, inputs), dim=1)
            table[own[own >= 0]] = sides[own >= 0].double()
        trainer.model.train()
        return np.asarray(trainer.accelerator.reduce(table, reduction="sum").float().cpu())


def _read(file: Path) -> np.ndarray | None:
    return np.asarray(np.load(file)) if file.is_file() else None


def _write(file: Path, table: np.ndarray) -> None:
    unfinished = file.with_suffix(".unfinished.npy")
    np.save(unfinished, table)
    unfinished.rename(file)
