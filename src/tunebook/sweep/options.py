"""Command-line options of `tunebook sweep`: how trials are launched, and how values are searched for."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from tunebook.errors import RequestError, did_you_mean

# What starts the trials: one after the other, in parallel on this machine, each as a Slurm job.
LAUNCHERS = ("basic", "joblib", "slurm")
DIRECTIONS = ("minimize", "maximize")
# Metrics in a trial's results, and which values are better unless --direction is given.
METRICS = {
    "evaluation_score": "maximize",
    "validation_loss": "minimize",
    "final_loss": "minimize",
    "tokens_per_second_per_gpu": "maximize",
    "seconds": "minimize",
}
# Metrics that a running trial already reports, and their keys in the lines of metrics.jsonl.
SHOWN_WHILE_RUNNING = {"final_loss": "loss", "validation_loss": "validation_loss"}
SEARCHES = ("optuna",)
_EXAMPLE = (
    "--search=optuna --num-trials=20 --metric=validation_loss 'optimizer.learning_rate=tag(log,interval(1e-6,1e-4))'"
)


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """The options as typed; None if omitted."""

    launcher: str = "basic"
    jobs: int | None = None
    search: str | None = None
    num_trials: int | None = None
    metric: str | None = None
    direction: str | None = None
    seed: int | None = None
    prune: int | None = None  # first step at which a trial may be ended early


def check_options(options: SweepOptions) -> None:
    """Refuse invalid options and combinations. Raises: RequestError with what to type."""
    _check_name("--launcher", options.launcher, LAUNCHERS)
    if options.jobs is not None and options.jobs < 1:
        raise _wrong(f"--jobs={options.jobs}: at least one trial must run at a time; type --jobs=2")
    if options.launcher == "basic" and (options.jobs or 1) > 1:
        raise _wrong(
            f"--jobs={options.jobs}: the basic launcher runs one trial at a time; type --launcher=joblib "
            f"--jobs={options.jobs}, or --launcher=slurm --jobs={options.jobs}"
        )
    if options.metric is not None:
        _check_name("--metric", options.metric, METRICS)
    if options.direction is not None:
        _check_name("--direction", options.direction, DIRECTIONS)
        if options.metric is None:
            raise _wrong(f"--direction={options.direction} says nothing without a metric; add --metric=NAME")
    _check_search(options)


def _check_search(options: SweepOptions) -> None:
    if options.search is None:
        named = {"--num-trials": options.num_trials, "--seed": options.seed, "--prune": options.prune}
        for name, value in named.items():
            if value is not None:
                raise _wrong(f"{name} belongs to a search, and none was asked for; type {_EXAMPLE}")
        return
    _check_name("--search", options.search, SEARCHES)
    if options.num_trials is None:
        raise _wrong("a search needs to know how many trials it may take; add --num-trials=20")
    if options.num_trials < 1:
        raise _wrong(f"--num-trials={options.num_trials}: a search needs at least one trial; type --num-trials=20")
    if options.seed is not None and not 0 <= options.seed < 2**31:
        raise _wrong(f"--seed={options.seed}: a seed is a whole number from 0 to {2**31 - 1}; type --seed=0")
    if options.prune is not None and options.prune < 1:
        raise _wrong(f"--prune={options.prune}: this is the step from which trials may be ended early; type --prune=50")


def _check_name(option: str, value: str, known: Collection[str]) -> None:
    if value not in known:
        raise _wrong(
            f"{option}={value}: there is no such choice.{did_you_mean(value, known)} Choose {', '.join(known)}"
        )


def _wrong(message: str) -> RequestError:
    return RequestError(message, problem_id="sweep-option")
