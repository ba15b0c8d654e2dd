"""Check that the typed command of evidence or of a run still composes to the same run; return the command to repeat it.

A command is composed again each time. So it trains another run after its recipe or a config group has changed.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from tunebook.config.choices import Generation, LauncherName
from tunebook.config.frozen import typed_in_of
from tunebook.config.identity import comparable_config
from tunebook.config.override_text import command_words, shell_command
from tunebook.config.schema import RunConfig
from tunebook.errors import RequestError
from tunebook.evidence.compare import config_differences, input_differences, named_differences
from tunebook.evidence.gather import RunFacts, claim_overrides
from tunebook.evidence.schema import Evidence, Hardware
from tunebook.facts.generations import GENERATIONS
from tunebook.hardware.detect import Gpu, Machine
from tunebook.plan.draft import Draft, draft_run
from tunebook.record.run_folder import RUN_FILE, WITHOUT_RECIPE

_USUAL_MEMORY_GIB = 512.0  # of a host with GPUs: evidence records only the GPUs' memory


def command_of(evidence: Evidence, recipes_dirs: list[Path]) -> str | None:
    """The command that trains the recorded run; None if it would train another run now, on the same hardware."""
    ran, machine = evidence.ran, machine_of_evidence(evidence.hardware)
    recipe = None if ran.recipe == WITHOUT_RECIPE else ran.recipe
    config = _config_of(draft_run(recipe, ran.overrides, recipes_dirs, machine))
    if config is None or config_differences(evidence.inputs.config, comparable_config(config)):
        return None
    # Older evidence does not record the launcher. A run on one node needs no cluster, which not everyone has.
    has_launcher = config.launcher.name is LauncherName.local or any(w.startswith("launcher=") for w in ran.overrides)
    local = [] if has_launcher or evidence.hardware.nodes > 1 else ["launcher=local"]
    return shell_command(command_words("train", ran.recipe, [*ran.overrides, *local]))


def require_same_run(run: RunFacts, recipes_dirs: list[Path]) -> None:
    """Raises: RequestError unless recipe and overrides still train what the run trained, on its machine."""
    recipe, words = run.config.recipe, claim_overrides(run.manifest)
    folder = typed_in_of(run.record.folder / RUN_FILE)  # relative paths start here
    is_gone = folder is not None and not folder.is_dir()
    recipes_dirs = [one.expanduser().absolute() for one in recipes_dirs]
    with contextlib.nullcontext() if folder is None or is_gone else contextlib.chdir(folder):
        draft = draft_run(recipe, words, recipes_dirs, machine_of_manifest(run.manifest["hardware"]))
    config = _config_of(draft)
    if config is None:
        problems = draft.error.message if draft.error else "; ".join(problem.message for problem in draft.problems)
        what = f"does not compose any more ({problems})"
    elif differing := input_differences(
        run.inputs, run.inputs.model_copy(update={"config": comparable_config(config)})
    ):
        what = f"composes to another run now: {named_differences(differing)}"
    else:
        return
    moved = f"{folder}, where it was typed, does not exist, so relative paths start here. " if is_gone else ""
    command = shell_command(command_words("train", recipe, words))
    raise RequestError(
        f"{run.record.folder}: `{command}` {what}. {moved}The recipe, or a file that it reads, was changed since the "
        "run: undo that change, or train again as it is now (training.resume=never)",
        problem_id="evidence-of-changed-code",
    )


def _config_of(draft: Draft) -> RunConfig | None:
    return None if draft.resolution is None else draft.resolution.config


def machine_of_evidence(hardware: Hardware) -> Machine:
    """The machine that evidence was recorded on, or one of its nodes."""
    num_gpus = 0 if hardware.gpu is None else hardware.gpus // hardware.nodes
    gpu = {"name": hardware.gpu, "memory_gib": hardware.memory_gib or 0.0, "generation": hardware.generation}
    memory_gib = hardware.memory_gib if hardware.gpu is None else None
    return _machine([gpu] * num_gpus, hardware.driver, hardware.cpus, memory_gib or _USUAL_MEMORY_GIB)


def machine_of_manifest(found: dict[str, Any]) -> Machine:
    """The machine that started a run, from the manifest's section `hardware`."""
    return _machine(found["gpus"], found["driver"], found["cpus"], found["memory_gib"])


def _machine(gpus: list[dict[str, Any]], driver: str | None, num_cpus: int, memory_gib: float) -> Machine:
    found = [
        Gpu(
            name=gpu["name"],
            memory_gib=gpu["memory_gib"],
            compute_capability=GENERATIONS[Generation[gpu["generation"]]].compute_capabilities[0],
            generation=Generation[gpu["generation"]],
            index=index,
        )
        for index, gpu in enumerate(gpus)
    ]
    return Machine(gpus=found, driver=driver, num_cpus=num_cpus, host_memory_gib=memory_gib)
