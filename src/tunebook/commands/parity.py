"""`tunebook parity`: train a recipe in several configurations, one after the other, and compare their losses.

Each is an ordinary run in its own folder and process. Exit code: 0 if all losses agree, 5 if one differs from the
reference by more than the tolerance, the run's own code if one failed, 6 if stopped.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tunebook.commands.sweep_planning import check_launch
from tunebook.commands.train import plan_job
from tunebook.config.schema import RunConfig, SlurmConfig
from tunebook.errors import RequestError, StoppedError
from tunebook.files import atomic_write_json
from tunebook.parity.cases import Case, list_cases, mark_refused, weights_alike, words_set_aside
from tunebook.parity.result import CaseResult, exit_code_of, parity_table, read_case, to_json, write_page
from tunebook.record.losses import check_tolerance, tolerance_of
from tunebook.record.provenance import describe_hardware
from tunebook.record.run_folder import WITHOUT_RECIPE, make_run_folder, time_name
from tunebook.sweep.options import SweepOptions
from tunebook.sweep.trial_process import Stopping, run_trial, train_command, write_trial_end
from tunebook.terminal import print_text


def check_attended(config: RunConfig) -> None:
    """Refuse runs whose end this command would not see, or that wait for other commands. Raises: RequestError."""
    try:
        check_launch(config, SweepOptions())
    except RequestError as error:  # its message names options of a sweep
        raise RequestError(_refusal_message(config), problem_id="parity-request") from error


def _refusal_message(config: RunConfig) -> str:
    """Return parity's message for what a sweep's trials would be refused for."""
    if isinstance(config.launcher, SlurmConfig):
        return (
            "launcher=slurm: a run's command would end when its job is submitted, before there is a loss to compare; "
            "let each wait for its job: launcher.wait=true"
        )
    return (
        f"hardware.num_nodes={config.hardware.num_nodes}: with launcher={config.launcher.name.name} on this machine "
        "alone, every configuration would wait for the other nodes; use launcher=slurm launcher.wait=true or "
        "launcher=ray launcher.address=HOST:PORT, or hardware.num_nodes=1"
    )


JSON_FILE = "parity.json"
PAGE_FILE = "parity.html"


def parity_command(
    recipe: str | None,
    overrides: list[str],
    recipes_dirs: list[Path],
    console: Console,
    *,
    over: list[str],
    gpus: str | None,
    num_steps: int,
    tolerance: float | None = None,
) -> int:
    """Run every configuration, print the table, write `parity.json` and `parity.html`; return the exit code.

    `over` are words such as `parallelism=ddp,zero2`, `gpus` such as `1,2,4`. Raises: RequestError before anything runs.
    """
    planned: list[RunConfig] = []

    def plan(case: Case) -> RunConfig:
        config = plan_job(recipe, list(case.overrides), recipes_dirs).config
        check_attended(config)
        planned.append(config)
        return config

    check_tolerance(tolerance)
    cases, reference = mark_refused(list_cases(overrides, over, gpus, num_steps), plan)
    cases = weights_alike(cases, [config.precision.master_weights for config in planned])
    allowed = tolerance_of(reference) if tolerance is None else tolerance
    outputs = Path(reference.outputs).expanduser().absolute()
    folder = make_run_folder(outputs / (recipe or WITHOUT_RECIPE) / f"parity-{time_name()}")
    print_text(f"parity of {len(cases)} configurations: {folder}", console)
    if aside := words_set_aside(overrides, over, gpus):
        why = "runs are not evaluated, saved before their end, stopped early or resumed, and --over and --gpus go first"
        print_text(f"set aside: {' '.join(aside)} ({why})", console)
    results, was_stopped = _run_all(cases, folder, recipe, recipes_dirs, console)
    atomic_write_json(
        folder / JSON_FILE, {"recipe": recipe, "hardware": describe_hardware(None)} | to_json(results, allowed)
    )
    console.print(parity_table(results, allowed))
    if any(result.losses for result in results):
        write_page(results, allowed, recipe or WITHOUT_RECIPE, folder / PAGE_FILE)
    print_text(f"written: {folder / JSON_FILE}", console)
    return StoppedError.exit_code if was_stopped else exit_code_of(results, allowed)


def _run_all(
    cases: list[Case], folder: Path, recipe: str | None, recipes_dirs: list[Path], console: Console
) -> tuple[list[CaseResult], bool]:
    """Return the results in the order of the cases, and whether a stop was requested.

    Without a reference nothing can be compared, so nothing else starts after it failed.
    """
    results: list[CaseResult] = []
    stopping = Stopping()
    with stopping.listening():
        for number, case in enumerate(cases, 1):
            exit_code = None
            has_reference = not results or not results[0].has_failed
            if case.refused is None and has_reference and not stopping.num_requests:
                console.print(Text(f"\n{number} of {len(cases)}: {case.name}"))
                end = run_trial(train_command(recipe, case.overrides, folder / case.name, recipes_dirs), stopping)
                write_trial_end(end, folder / f"{case.name}.json")
                exit_code = end.exit_code
                # Only its numbers are compared, and one saved model per configuration fills a disk.
                shutil.rmtree(folder / case.name / "model", ignore_errors=True)
            results.append(read_case(case, folder / case.name, exit_code, results[0] if results else None))
    return results, stopping.num_requests > 0
