"""Restore a checkpoint's state, but with run.yaml's hyperparameters.

torch and DeepSpeed store hyperparameters in an optimizer's state, so loading a checkpoint restores the old ones. The
moments and step counts come from the checkpoint; learning rate, weight decay, betas and epsilon from run.yaml.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from tunebook.checkpoint.collectives import on_first_rank
from tunebook.checkpoint.record import checkpoint_path
from tunebook.checkpoint.verify import is_complete
from tunebook.config.choices import ResumeAnyway
from tunebook.config.schema import TrainingConfig
from tunebook.errors import DataError
from tunebook.train.callbacks import VALIDATION_LOSS, validation_costs, validation_values

Hyperparameters: TypeAlias = list[dict[str, Any]]  # by parameter group

_BASE_RATE = "initial_lr"  # where a scheduler stores a group's learning rate before its factor


def hyperparameters(optimizer: Any) -> Hyperparameters:
    """The constructor's arguments of an optimizer for each group, and the scheduler's base learning rate.

    Other keys of a group are state, such as the step count of some optimizers.
    """
    inner = optimizer
    while hasattr(inner, "optimizer"):  # accelerate's and DeepSpeed's wrappers
        inner = inner.optimizer
    names = (inner.defaults.keys() - {"lr"}) | {_BASE_RATE}
    return [{name: group[name] for name in names & group.keys()} for group in optimizer.param_groups]


def apply_hyperparameters(written: Hyperparameters, optimizer: Any, scheduler: Any) -> None:
    """Put hyperparameters back into an optimizer after a checkpoint was loaded, and set the rate of the next step.

    The rate is exactly the schedule's value at the scheduler's number of steps.
    """
    assert isinstance(scheduler, LambdaLR), f"every schedule of transformers we offer is one, not {type(scheduler)}"
    scheduler.base_lrs = [group[_BASE_RATE] for group in written]
    rates = [
        base * factor(scheduler.last_epoch)
        for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    ]
    for group, values, rate in zip(optimizer.param_groups, written, rates, strict=True):
        group.update(values | {"lr": rate})
    scheduler._last_lr = rates


def keep_stored_formats(optimizer: Any) -> None:
    """Have an optimizer load its state in the number formats in which it was saved.

    torch converts it to those of the weights, and Adafactor's state of bf16 weights is in fp32.
    """
    while hasattr(optimizer, "optimizer"):  # accelerate's wrapper
        optimizer = optimizer.optimizer
    stored: dict[str, Any] = {}

    def restore(loaded: Any) -> None:
        numbers = [number for group in stored["param_groups"] for number in group["params"]]
        parameters = [parameter for group in loaded.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            for name, value in stored["state"].get(number, {}).items():
                if isinstance(value, torch.Tensor) and value.dtype != loaded.state[parameter][name].dtype:
                    loaded.state[parameter][name] = value.to(parameter.device)
        stored.clear()

    optimizer.register_load_state_dict_pre_hook(lambda _, state: stored.update(state))
    optimizer.register_load_state_dict_post_hook(restore)


def load_stored_weights(model: Any, folder: Path, load_result: Any) -> None:
    """Load a checkpoint's weights through transformers if their stored names do not match the model's.

    Some architectures are stored under other names, such as experts one by one that are one tensor in the model.
    `load_result` is the result of `load_state_dict`. Raises: DataError for weights that are still missing.
    """
    if not (_not_loaded(model, load_result) or load_result.unexpected_keys):
        return
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32  # represents the other formats exactly
    stored = type(model).from_pretrained(folder, dtype=dtype)
    again = model.load_state_dict(stored.state_dict(), strict=False)
    if wrong := [*_not_loaded(model, again), *again.unexpected_keys]:
        raise DataError(
            f"{folder} does not fill the model: the names of {len(wrong)} weights differ, such as {wrong[0]}, so the "
            "weights in memory would be of two models. Resume with the versions of transformers and Tunebook that "
            "saved it (see its complete.json)",
            problem_id="checkpoint-not-loaded",
        )


def _not_loaded(model: Any, load_result: Any) -> list[str]:
    """The missing weights, without those tied to a loaded one."""
    missing = set(load_result.missing_keys)
    tied = [{*pair} for pair in getattr(model, "all_tied_weights_keys", {}).items()]
    return sorted(missing - {name for pair in tied if pair - missing for name in pair})


class RestoredState(TrainerCallback):
    """Corrects the trainer's state that was loaded from the checkpoint `resumed`, before the first step.

    Upstream restores the intervals of the run that saved it, and drops a best checkpoint that has moved. Without
    `has_same_data` the earlier validation losses cannot be compared with later ones.
    """

    def __init__(self, training: TrainingConfig, trainer: Any, resumed: Path, *, has_same_data: bool) -> None:
        self.training = training
        self.trainer = trainer
        self.resumed = resumed
        self.has_same_data = has_same_data

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Raises: DataError on every rank if the best checkpoint so far is missing."""
        state.compute_steps(args, state.max_steps)  # type: ignore[no-untyped-call]
        if not self.has_same_data:
            state.log_history = [entry for entry in state.log_history if VALIDATION_LOSS not in entry]
            state.best_global_step = state.best_metric = state.best_model_checkpoint = None
        if args.metric_for_best_model is not None:
            self._find_best(state)

    def _find_best(self, state: TrainerState) -> None:
        """Set the path of the best checkpoint. Rank the existing ones if no step was ranked, or on request."""
        best = state.best_global_step
        folders = [self.trainer.saver.folder, self.resumed.parent]
        if state.best_model_checkpoint is not None:
            folders.append(Path(state.best_model_checkpoint).parent)
        metric = self.training.best_metric
        values, costs = validation_values(state, metric), validation_costs(state, metric)
        steps = values.keys() | ({best} if best is not None else set())
        existing = on_first_rank(lambda: _complete(steps, folders))
        if best not in existing:
            is_allowed = best is None or ResumeAnyway.best in self.training.resume_anyway
            if self.training.load_best_at_end and not is_allowed:
                raise DataError(
                    f"the best {metric} so far was {state.best_metric:.4f} at step {best}, and there is no "
                    f"complete checkpoint-{best} in {self.resumed.parent}, so training.load_best_at_end=true could not "
                    "load it. Restore it from a copy, or use the best of the existing ones: "
                    "'training.resume_anyway=[best]'",
                    problem_id="best-checkpoint-missing",
                )
            best = min(costs.keys() & existing.keys(), key=lambda step: (costs[step], step), default=None)
            state.best_global_step, state.best_metric = best, values[best] if best is not None else None
        state.best_model_checkpoint = str(existing[best]) if best is not None else None


def _complete(steps: Collection[int], folders: list[Path]) -> dict[int, Path]:
    """The first complete checkpoint of each step, in the order of the folders."""
    paths = {step: [checkpoint_path(folder, step) for folder in folders] for step in steps}
    checkpoints = {step: next(filter(is_complete, places), None) for step, places in paths.items()}
    return {step: path for step, path in checkpoints.items() if path is not None}
