from __future__ import annotations

from pathlib import Path

import pytest

from tunebook.commands.sweep_planning import SweepPlan, plan_sweep
from tunebook.errors import RequestError
from tunebook.sweep.options import SweepOptions
from tunebook.sweep.results import Goal
from tunebook.sweep.space import trial_of

CPU = ("hardware=cpu",)
LIST = (*CPU, "training.seed=0,1")
RATE = "optimizer.learning_rate=tag(log,interval(1e-5,1e-3))"


def planned(*words: str, **options: object) -> SweepPlan:
    return plan_sweep("quickstart", list(words), [], SweepOptions(**options), is_started=False)  # type: ignore[arg-type]


def searched(*words: str, **options: object) -> SweepPlan:
    return planned(*CPU, *words, search="optuna", num_trials=4, **options)


def test_a_list_is_ranked_by_what_all_have_unless_a_metric_is_named() -> None:
    plan = planned(*LIST)
    assert (plan.num_trials, plan.num_at_once, plan.goal, plan.search_record()) == (2, 1, None, None)
    assert planned(*LIST, metric="seconds").goal == Goal(metric="seconds", direction="minimize")


def test_it_is_told_how_many_trials_are_worked_out() -> None:
    told: list[tuple[int, int]] = []
    options = SweepOptions()
    plan_sweep("quickstart", list(LIST), [], options, is_started=False, progress=lambda *done: told.append(done))
    assert told == [(1, 2), (2, 2)]


def test_a_search_goes_by_the_most_telling_metric_that_is_measured() -> None:
    assert searched(RATE).goal == Goal(metric="evaluation_score", direction="maximize")
    held_out = searched(RATE, "evaluation=none", "dataset.validation_share=0.05")
    assert held_out.goal == Goal(metric="validation_loss", direction="minimize")
    assert searched(RATE, "evaluation=none").goal == Goal(metric="final_loss", direction="minimize")
    turned = searched(RATE, metric="final_loss", direction="maximize")
    assert turned.goal == Goal(metric="final_loss", direction="maximize")


def test_a_search_is_recorded_with_all_that_its_proposals_depend_on() -> None:
    records = [
        searched(RATE, metric="final_loss").search_record(),
        searched(RATE, metric="seconds").search_record(),
        searched(RATE, metric="final_loss", direction="maximize").search_record(),
        searched(RATE, metric="final_loss", seed=1).search_record(),
        searched(RATE, metric="final_loss", prune=9).search_record(),
        searched(RATE.replace("1e-5", "1e-6"), metric="final_loss").search_record(),
    ]
    assert all(one != other for number, one in enumerate(records) for other in records[:number])
    assert records[0] == searched(RATE, metric="final_loss", jobs=1).search_record()


@pytest.mark.parametrize(
    ("words", "options", "message"),
    [
        ((RATE, "evaluation=none"), {"metric": "validation_loss"}, r"no trial.*measures it.*validation_share=0.05"),
        ((RATE, "evaluation=none"), {"metric": "evaluation_score"}, r"evaluation=quickstart.*--metric=final_loss"),
        ((RATE, "evaluation.after=false"), {"metric": "evaluation_score"}, r"evaluation.after=true"),
        ((RATE,), {"prune": 9}, r"a running trial does not show its evaluation_score yet"),
        ((RATE,), {"prune": 5, "metric": "seconds"}, r"a running trial does not show its seconds yet; type"),
        (("optimizer.learning_rat=interval(0,1)",), {}, r"all 2 trials: .*Did you mean 'optimizer.learning_rate'\?"),
        (("training.seed=interval(0,9)",), {}, r"to search whole numbers: training.seed=int\(interval\(0,9\)\)"),
        (("training.global_samples=int(interval(0,9))",), {}, r"1 of 2 trials \(training.global_samples=0\)"),
    ],
)
def test_a_search_that_could_not_succeed_is_refused(
    words: tuple[str, ...], options: dict[str, object], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        searched(*words, **options)


@pytest.mark.parametrize(
    ("words", "options", "message"),
    [
        (("launcher=slurm",), {}, r"a trial would end when its job is submitted.*--launcher=slurm.*launcher.wait=true"),
        (
            ("hardware.num_nodes=2", "parallelism=ddp", "launcher.master_address=head"),
            {},
            r"hardware.num_nodes=2: launcher=local on several nodes waits for a command on each",
        ),
        (("launcher=ray",), {"launcher": "slurm"}, r"launcher=ray ask for two launchers.*leave launcher=ray out"),
        (
            ("hardware.num_nodes=2", "parallelism=ddp"),
            {"launcher": "slurm"},
            r"hardware.num_nodes=2: with --launcher=slurm a trial is one process.*launcher.wait=true",
        ),
        (
            ("launcher.container_image=me/tunebook",),
            {"launcher": "slurm"},
            r"launcher.container_image=me/tunebook: with --launcher=slurm",
        ),
    ],
)
def test_launches_whose_end_nobody_would_see_are_refused(
    words: tuple[str, ...], options: dict[str, object], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        planned(*LIST, *words, **options)


def test_a_trial_that_waits_for_its_own_job_is_no_such_launch() -> None:
    assert planned(*LIST, "launcher=slurm", "launcher.wait=true").num_trials == 2


def test_a_slurm_trial_runs_locally_inside_its_job() -> None:
    plan = planned(*LIST, "launcher.partition=gpus", "launcher.stop_timeout_s=20", launcher="slurm", jobs=2)
    assert plan.configs[0].launcher.partition == "gpus"  # type: ignore[attr-defined]
    command = plan.command(plan.trials[1], Path("/out"))
    assert command[4:] == [
        *("quickstart", "hardware=cpu", "training.seed=1", "launcher.stop_timeout_s=20", "launcher=local"),
        *("--run-folder", "/out"),
    ]
    assert plan.describe() == "as Slurm jobs, 2 at a time"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["training.resume=never"], ["training.seed=1", "training.resume=auto"]),
        (["training.resume='never'"], ["training.seed=1", "training.resume=auto"]),
        (["training.resume=auto"], ["training.resume=auto", "training.seed=1"]),
        ([], ["training.seed=1"]),
    ],
)
def test_a_trial_goes_on_in_its_folder_where_the_sweep_is_to_start_anew(words: list[str], told: list[str]) -> None:
    plan = planned("hardware=cpu", *words, "training.seed=0,1")
    command = plan.command(plan.trials[1], Path("/out"))
    assert command[4:] == ["quickstart", "hardware=cpu", *told, "--run-folder", "/out"]


def test_a_folder_to_begin_from_is_told_to_the_trials(tmp_path: Path) -> None:
    plan = planned(f"training.resume={tmp_path}", *LIST)
    assert f"training.resume={tmp_path}" in plan.command(plan.trials[0], Path("/out"))


def test_a_proposed_trial_is_composed_and_checked_like_any_other() -> None:
    plan = searched("training.global_samples=int(interval(8,16))", "training.max_steps=int(interval(1,9))")
    assert plan.config_of(plan.trials[0]) is plan.configs[0]
    proposed = trial_of(5, plan.fixed, {"training.global_samples": 12, "training.max_steps": 3})
    config = plan.config_of(proposed)
    assert (config.training.global_samples, config.training.max_steps) == (12, 3)
    with pytest.raises(RequestError, match=r"training.global_samples"):
        plan.config_of(trial_of(6, plan.fixed, {"training.global_samples": -1, "training.max_steps": 3}))


def test_how_a_search_runs_is_said() -> None:
    assert searched(RATE, metric="final_loss", seed=5).describe() == (
        "one at a time; searched by Optuna: minimize final_loss, seed 5"
    )
