"""Plan a run without starting it: compose, resolve and check it, and compute its batch, memory and speed.

It needs no GPU, weights, data or network and does not import torch, so it takes a second or two.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tunebook.config.book import find_recipes
from tunebook.config.choices import Weights
from tunebook.config.compose import Composition, compose
from tunebook.config.schema import HardwareConfig, ModelConfig, RunConfig
from tunebook.data.batch import BatchPlan, solve_batch
from tunebook.data.files import missing_files
from tunebook.data.prepare import require_images, require_method
from tunebook.data.sources import begins_with_images, first_reads
from tunebook.errors import DataError, DoesNotFitError, Problem, RequestError, RulesError, TunebookError
from tunebook.hardware.detect import Machine, detect_machine
from tunebook.plan.auto.resolve import Resolution, resolve_auto
from tunebook.plan.memory.verdict import MemoryPlan, measured_memory, plan_host_memory, plan_memory
from tunebook.plan.rules import check, located
from tunebook.plan.speed import TimePlan, plan_time
from tunebook.record.run_folder import resolve_run

RUN_NOT_TRAINED = "run-not-trained"


@dataclass(kw_only=True)
class Draft:
    """A planned run. Fields after an error stay None."""

    recipe: str | None
    machine: Machine | None = None  # the machine it is planned for
    composition: Composition | None = None
    resolution: Resolution | None = None
    problems: list[Problem] = field(default_factory=list)  # every broken rule, errors before warnings
    batch: BatchPlan | None = None
    memory: MemoryPlan | None = None
    host: MemoryPlan | None = None
    time: TimePlan | None = None
    error: RequestError | None = None  # why it does not compose, or its batch cannot be solved
    unusable_data: DataError | None = None  # why it cannot be used here; the plan ignores it
    overrides: list[str] = field(default_factory=list)  # as typed, for the record
    recipes_dirs: list[Path] = field(default_factory=list)  # as typed

    @property
    def resolved(self) -> Resolution:
        """The resolution, once `raise_errors` has found no error."""
        assert self.resolution is not None
        return self.resolution

    @property
    def config(self) -> RunConfig:
        """The resolved configuration, once `raise_errors` has found no error."""
        return self.resolved.config

    def raise_errors(self, *about: str) -> None:
        """Raise the request's errors: RequestError, or RulesError with every broken rule at once.

        `about`: beginnings of the keys whose rules count; all if none is given.
        """
        if self.error is not None:
            raise self.error
        problems = [problem for problem in self.problems if not about or problem.key.startswith(about)]
        if any(problem.is_error for problem in problems):
            raise RulesError(problems)

    @property
    def shortcomings(self) -> list[TunebookError]:
        """Why a request without errors cannot be trained: it does not fit, or its data is unusable here."""
        errors: list[TunebookError] = [] if self.unusable_data is None else [self.unusable_data]
        if self.fits is False:
            advice = (
                "`tunebook plan` with the same overrides lists what would fit; with --measure it trains two steps here"
            )
            problem_id = "host-memory-too-small" if self.tightest is self.host else "does-not-fit"
            errors.insert(0, DoesNotFitError(f"{self.tightest.verdict}; {advice}", problem_id=problem_id))
        return errors

    @property
    def tightest(self) -> MemoryPlan:
        """The plan that decides whether it fits: that of the host if it is worse than that of the GPUs."""
        assert self.memory is not None and self.host is not None
        is_worse = self.host.fits is False or (self.host.is_tight and self.memory.fits is not None)
        return self.host if is_worse and self.memory.fits is not False else self.memory

    @property
    def fits(self) -> bool | None:
        """Whether it fits into the GPUs and the hosts; None if that is tight or unknown."""
        return self.tightest.fits if self.memory is not None else None

    @property
    def exit_code(self) -> int:
        """Exit code of a command that only plans."""
        if self.error is not None or any(problem.is_error for problem in self.problems):
            return RequestError.exit_code
        return next((error.exit_code for error in self.shortcomings), 0)


def draft_run(
    recipe: str | None,
    overrides: list[str],
    recipes_dirs: list[Path],
    machine: Machine | None = None,
    composition: Composition | None = None,
) -> Draft:
    """Plan a run as far as possible, on this machine by default. Errors are stored, not raised.

    `composition` is that of the recipe and the overrides, if the caller has it.
    """
    draft = Draft(recipe=recipe, machine=machine, overrides=overrides, recipes_dirs=recipes_dirs)
    try:
        composition = draft.composition = composition or compose(recipe, overrides, recipes_dirs)
    except RequestError as error:
        draft.error = error
        return draft
    draft.recipe = composition.config.recipe
    draft.machine = machine = machine or detect_machine()
    draft.unusable_data = _unusable_data(composition.config)
    try:
        parent_problems = _start_from_run(draft, composition.config)
        is_default = composition.set_by("training.max_length") is None
        draft.resolution = resolve_auto(composition.config, machine, is_default_length=is_default)
        config = draft.resolution.config
        found = [*check(config, composition.set_by), *parent_problems]
        draft.problems = sorted(found, key=lambda problem: not problem.is_error)
        if not any(problem.is_error for problem in draft.problems):
            if begins_with_images(config.dataset):
                require_images(config, has_images=True)
            draft.host = plan_host_memory(config, draft.resolution.host_memory_gib)
            draft.batch = solve_batch(config, None)
            draft.memory = measured_memory(config, draft.batch, machine) or plan_memory(config, draft.batch)
            draft.time = estimate_time(config, draft.batch, machine)
    except RulesError as error:
        draft.problems = located(error.problems, composition.set_by)
    except RequestError as error:
        draft.error = error
    return draft


def _unusable_data(config: RunConfig) -> DataError | None:
    """Why a file of the data is missing, or is not for the method, by the first document of each source."""
    missing = missing_files(config.dataset)
    try:
        for reads in set() if missing else first_reads(config.dataset):
            require_method(config, reads)
    except DataError as error:
        return error
    return missing


def _start_from_run(draft: Draft, config: RunConfig) -> list[Problem]:
    """Make the trained model of `model.run` the base model; if there is none yet, what to do first.

    A recipe's run can be planned before it is there: by the other keys of the model.
    Raises: RequestError for an unknown run that is no recipe, and for one without a model if no other is named.
    """
    model, name = config.model, config.model.run
    if name is None:
        return []
    if replaced := _replaced_by_run(draft, model):
        return replaced
    is_recipe = name in find_recipes(draft.recipes_dirs)
    fix = f"train it first: tunebook train {name}" if is_recipe else "model.run=RUN, a run that has finished training"
    try:
        run = resolve_run(name, Path(config.outputs))
    except RequestError as error:
        if not is_recipe:
            is_model = (Path(name).expanduser() / "config.json").is_file()
            why = f"it is the folder of a model; type model={name}" if is_model else error.message
            raise RequestError(f"model.run={name}: {why}", problem_id=error.problem_id) from error
        message = error.message
    else:
        if (run / "model" / "config.json").is_file():
            model.run = str(run)  # a newer run of the recipe must not replace it when this one is repeated
            model.name, model.path, model.revision = None, str(run / "model"), None
            model.facts, model.weights = None, Weights.pretrained  # its config.json has the facts
            message, fix = f"model.run={name} has a trained model, which replaces it", "model.run=null"
            places = [f"override '{word}'" for word in draft.overrides if word.startswith("model=")]
            return [
                Problem(id="setting-ignored", key="model", message=message, fix=fix, is_error=False, place=place)
                for place in places
            ]
        message = f"{run} has no trained model yet"
        if (run / "model" / "adapter_config.json").is_file():
            message = f"{run / 'model'} is an adapter alone"
            fix = f"tunebook export {run} --merge, then model.run=null model.name=null model.path=FOLDER"
    if model.name is None and model.path is None:
        raise RequestError(f"model.run={name}: {message}; {fix}", problem_id=RUN_NOT_TRAINED)
    return [Problem(id=RUN_NOT_TRAINED, key="model.run", message=message, fix=fix, is_error=False)]


def _replaced_by_run(draft: Draft, model: ModelConfig) -> list[Problem]:
    """What the user has typed and `model.run` would replace."""
    typed = {word.partition("=")[0]: word for word in draft.overrides}
    values = {
        "model": "model.run" not in typed,  # else it is what the run is planned by before the other one is there
        "model.name": model.name,
        "model.path": model.path,
        "model.revision": model.revision,
        "model.weights": model.weights is not Weights.pretrained,
    }
    fix = "model.run=null model.name=null" if model.path and model.name else "model.run=null"
    message = f"model.run={model.run} names the model, with its weights"
    return [
        Problem(id="model-named-by-run", key=key, message=message, fix=fix, place=f"override '{typed[key]}'")
        for key, value in values.items()
        if value and key in typed
    ]


def estimate_time(config: RunConfig, batch: BatchPlan, machine: Machine | None = None) -> TimePlan:
    """Estimate the speed on this machine's GPUs if they are of the planned generation, else on its usual GPU."""
    machine = machine or detect_machine()
    gpus = machine.gpus
    is_here = gpus and all(gpu.generation is config.hardware.generation for gpu in gpus)
    return plan_time(config, batch, gpu_name=gpus[0].name if is_here else None)


def draft_json(draft: Draft) -> dict[str, Any]:
    """Return what `plan --json` prints. Every key is always present; unknown values are null."""
    config = draft.resolution.config if draft.resolution else None
    measured = draft.memory.measured if draft.memory else None
    return {
        "recipe": draft.recipe,
        "hardware": _hardware_json(config.hardware) if config else None,
        "precision": config.precision.compute.name if config else None,
        "attention": config.attention.implementation.name if config else None,
        "packing": config.packing.mode.name if config else None,
        "batch": draft.batch.to_json() if draft.batch else None,
        "memory_gib": draft.memory.to_json() if draft.memory else None,
        "memory_source": ("measured" if measured else "estimated") if draft.memory else None,
        "measured": asdict(measured) if measured else None,
        "host_memory_gib": draft.host.to_json() if draft.host else None,
        "nvme_gib": round(draft.host.nvme_gib, 3) if draft.host and draft.host.nvme_gib is not None else None,
        "fits": draft.fits,
        "time": draft.time.to_json() if draft.time else None,
        "choices": [asdict(choice) for choice in draft.resolution.choices] if draft.resolution else [],
        "problems": _problems_json(draft),
    }


def _hardware_json(hardware: HardwareConfig) -> dict[str, Any]:
    keys = ("num_nodes", "gpus_per_node", "memory_gib")
    return {"generation": hardware.generation.name} | {key: getattr(hardware, key) for key in keys}


def _problems_json(draft: Draft) -> list[dict[str, Any]]:
    """Broken rules, then errors that stopped the planning; those have no key, only a message."""
    problems = [asdict(problem) for problem in draft.problems]
    errors = [*([draft.error] if draft.error else []), *draft.shortcomings]
    stopped: dict[str, Any] = {"key": None, "fix": None, "is_error": True, "place": None}
    return problems + [{"id": error.problem_id, "message": error.message} | stopped for error in errors]
