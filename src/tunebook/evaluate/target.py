"""Model of an evaluation or chat: a run's model, a model folder outside of any run, or a hub name.

`latest` and a recipe's name mean the newest finished run. A run that is running, stopped or failed can be named by its
folder.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from tunebook.checkpoint.record import CHECKPOINTS_FOLDER
from tunebook.checkpoint.verify import require_unchanged_model
from tunebook.config.book import find_recipes, resolve_path
from tunebook.config.choices import Compute, Generation, MasterWeights, PeftMethod
from tunebook.config.compose import compose
from tunebook.config.frozen import plain_config
from tunebook.config.recipe_files import group_choices
from tunebook.config.schema import (
    DatasetConfig,
    EvaluationConfig,
    HardwareConfig,
    ModelConfig,
    PeftSettings,
    PrecisionConfig,
    RunConfig,
)
from tunebook.errors import RequestError, nearest
from tunebook.facts.generations import GENERATIONS
from tunebook.files import read_json
from tunebook.hardware.detect import detect_machine
from tunebook.model.adapters import ADAPTER_FILE, holds_model, is_adapter
from tunebook.model.base_config import read_dtype
from tunebook.model.hub import fetch_config
from tunebook.model.tokenizer_files import has_vocabulary
from tunebook.model.weight_files import WEIGHT_FILES
from tunebook.record.manifest import RunState, manifest_or_empty
from tunebook.record.model_origin import Origin, read_origin
from tunebook.record.run_folder import LATEST, MODEL_FOLDER, RUN_FILE, find_runs, is_run, resolve_run

EVALUATIONS = "evaluations"  # folder in outputs/ with the results of models that belong to no run
_MISTYPED = 0.8  # similarity of a recipe name with a wrong letter
_LONGEST_NAME_BYTES = 255  # of a file on Linux
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True, kw_only=True)
class Target:
    """A model: `folder`, or else `hub_name`. With `run`, it must match what the run was trained with."""

    run: Path | None = None
    folder: Path | None = None  # of a full model or an adapter
    hub_name: str | None = None
    origin: Origin | None = None  # the source run of an exported folder outside of any run

    @property
    def name(self) -> str:
        """Name in messages."""
        return self.hub_name or str(self.folder)


def names_model(word: str, outputs: Path) -> bool:
    """Whether the first word of a chat is the name of a run or recipe, or a path or hub name, which have a slash."""
    if not re.fullmatch(r"\S+", word) or len(os.fsencode(word)) > _LONGEST_NAME_BYTES:
        return False
    is_run_name = word == LATEST or bool(find_runs(outputs, word))
    is_recipe = nearest(word, find_recipes([]), least_alike=_MISTYPED) is not None
    return is_run_name or is_recipe or "/" in word or Path(word).exists()


def find_target(text: str, outputs: Path, *, is_model: bool = False) -> Target:
    """Find the model folder, run under `outputs` or hub model that `text` names; print a chosen run to stderr.

    With `is_model`, it may also be a model of the book, or a single word such as gpt2 of the hub. Raises: RequestError
    for a run without a model, a folder without weights, an unknown name.
    """
    if is_model and text in group_choices("model"):
        model = compose(None, [f"model={text}"]).config.model
        text = model.name or str(resolve_path(model.path or ""))
    path = Path(text).expanduser().absolute()
    if path.is_dir() and not is_run(path):
        run = next((folder for folder in path.parents if (folder / RUN_FILE).is_file()), None)
        if holds_model(path) or run is not None:
            _require_model(path, run)
            return Target(run=run, folder=path, origin=None if run else read_origin(path))
    try:
        run = choose_run(text, outputs)
    except RequestError as error:
        if error.problem_id != "unknown-run":
            raise
        is_path = text.startswith((".", "~", "/")) or Path(text).exists()
        if ("/" in text or is_model) and _HUB_NAME.fullmatch(text) and not is_path:
            return Target(hub_name=text)
        if is_path:
            message = f"there is no run and no model in {path}; for a model of the hub, type model=ORG/NAME"
            raise RequestError(message, problem_id="unknown-run") from error
        raise
    if not holds_model(run / MODEL_FOLDER):
        raise _not_finished(run)
    _require_model(run / MODEL_FOLDER, run)
    return Target(run=run, folder=run / MODEL_FOLDER)


def _require_model(folder: Path, run: Path | None) -> None:
    """Refuse a folder without a full model or adapter, and a run's model that was changed.

    Raises: RequestError, DataError.
    """
    if not holds_model(folder) or not any(any(folder.glob(pattern)) for pattern in WEIGHT_FILES):
        raise RequestError(
            f"{folder} holds no full model (config.json or adapter_config.json, and {' or '.join(WEIGHT_FILES)}): it "
            "is a sharded or unfinished checkpoint, or another kind of folder. Name the run itself, or make one with: "
            "tunebook export RUN",
            problem_id="model-without-weights",
        )
    if run is not None and folder == run / MODEL_FOLDER:
        require_unchanged_model(run)


def _not_finished(run: Path) -> RequestError:
    return RequestError(
        f"{run} has not finished, so it has no model/. Name one of its checkpoints ({run / CHECKPOINTS_FOLDER}), or "
        f"make a model of the newest: tunebook export {run}",
        problem_id="run-without-model",
    )


def choose_run(target: str, outputs: Path) -> Path:
    """Find the run that `latest`, a recipe or a folder names; print a run that was chosen among several.

    `latest` and a recipe name their newest finished run. A run named by its folder is always accepted. Raises:
    RequestError if there is no run, or if none has finished.
    """
    outputs = outputs.expanduser().absolute()
    resolved = resolve_run(target, outputs)
    if is_run(Path(target).expanduser()) or is_run(outputs / target):
        return resolved
    runs = find_runs(outputs) if target == LATEST else find_runs(resolved.parent.parent, resolved.parent.name)
    for run in reversed(runs):
        state = manifest_or_empty(run).get("status", {}).get("state")
        if state == RunState.finished.name and holds_model(run / MODEL_FOLDER):
            print(f"the newest finished run: {run}", file=sys.stderr)
            return run
    raise _not_finished(runs[-1])


def _model_config(target: Target) -> ModelConfig:
    """Return the model of a target without a run; for an adapter its base, with the adapter folder's tokenizer."""
    if target.folder is None:
        return ModelConfig(name=target.hub_name)
    if not is_adapter(target.folder):
        return ModelConfig(path=str(target.folder))
    base = str(read_json(target.folder / ADAPTER_FILE).get("base_model_name_or_path"))
    tokenizer = str(target.folder) if has_vocabulary(target.folder) else None
    if Path(base).is_dir():
        return ModelConfig(path=base, tokenizer=tokenizer)
    return ModelConfig(name=base, tokenizer=tokenizer)


def bare_config(target: Target) -> RunConfig:
    """Return the configuration of a target without a run, from its folder or hub name; it trains nothing.

    Fetches the config.json of a hub model. Detects the GPUs without importing torch. Raises: RequestError for a model
    that is not local and cannot be fetched.
    """
    model = _model_config(target)
    if target.origin is not None:  # as in the training
        model = replace(model, template_date=target.origin.template_date or model.template_date)
        if target.folder is not None and is_adapter(target.folder):  # a whole model's own config.json says it
            original = target.origin.yarn_original_positions
            model = replace(model, yarn_factor=target.origin.yarn_factor, yarn_original_positions=original)
    if model.name is not None:
        fetch_config(model)
    gpus, origin = detect_machine().gpus, target.origin
    generation = gpus[0].generation if gpus else Generation.cpu
    dtype = read_dtype(model) if gpus else None
    # Products are computed in the weights' format. A CPU computes fp32 fastest. fp16 weights are kept in fp32 and their
    # products computed in fp16.
    precision = PrecisionConfig(
        compute=Compute.fp16 if dtype == "float16" else Compute.fp32,
        master_weights=MasterWeights.bf16
        if dtype == "bfloat16" and GENERATIONS[generation].has_bf16
        else MasterWeights.fp32,
    )
    return plain_config(
        recipe=origin.recipe if origin else None,
        model=model,
        dataset=DatasetConfig(system_prompt=origin.system_prompt if origin else None),
        hardware=HardwareConfig(generation=generation, gpus_per_node=max(1, len(gpus))),
        precision=precision,
        peft=PeftSettings(method=PeftMethod.lora),
        evaluation=EvaluationConfig(tasks=[], batch_size=None),
    )


def results_folder(target: Target, outputs: Path) -> Path:
    """Return the results folder of a target without a run: `outputs/evaluations/<name>`."""
    name = target.hub_name or str(target.folder and target.folder.resolve())
    return outputs.expanduser().absolute() / EVALUATIONS / re.sub(r"[^A-Za-z0-9._-]+", "-", name[-200:]).strip("-")
