"""How the GPUs of a machine are divided among trials that do not say how many they take."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tunebook.commands import sweep_dividing as dividing
from tunebook.commands import sweep_planning as planning
from tunebook.commands.sweep import sweep_command
from tunebook.commands.sweep_planning import SweepPlan, plan_sweep
from tunebook.config.choices import Generation, Strategy
from tunebook.errors import RequestError
from tunebook.hardware.detect import Gpu, Machine
from tunebook.plan.draft import Draft
from tunebook.sweep import shares
from tunebook.sweep.options import SweepOptions
from tunebook.sweep.space import trial_of

SMALL = ("model=qwen25_05b", "model.weights=random", "dataset=synthetic", "training.global_samples=64")
LARGE = ("model=qwen25_7b", *SMALL[1:])  # 113 GiB of states
FOUR = "training.seed=0,1,2,3"
HaveGpus = Callable[..., None]


@pytest.fixture
def have_gpus(monkeypatch: pytest.MonkeyPatch) -> HaveGpus:
    """This machine has so many GPUs of 139.8 GiB, or of another size."""

    def have(num_gpus: int, memory_gib: float = 139.8) -> None:
        gpus = [
            Gpu(
                name="a Hopper GPU",
                memory_gib=memory_gib,
                compute_capability=(9, 0),
                generation=Generation.hopper,
                index=number,
                uuid=f"GPU-{number}",
            )
            for number in range(num_gpus)
        ]
        found = Machine(gpus=gpus, driver="580.65", num_cpus=16, host_memory_gib=500.0)
        for module in (planning, shares):
            monkeypatch.setattr(module, "detect_machine", lambda: found)

    return have


def planned(*words: str, recipe: str | None = None, jobs: int | None = None, launcher: str = "joblib") -> SweepPlan:
    return plan_sweep(recipe, list(words), [], SweepOptions(launcher=launcher, jobs=jobs), is_started=True)


def sizes(plan: SweepPlan) -> list[int | None]:
    return [config.hardware.gpus_per_node for config in plan.configs]


@pytest.mark.parametrize(
    ("jobs", "at_once", "each", "said"),
    [
        (4, 4, 2, "4 at a time, each on 2 of the 8 GPUs found here (or hardware.gpus_per_node=N)"),
        (
            3,
            3,
            2,
            "3 at a time, each on 2 of the 8 GPUs found here, 2 of which stay idle (or hardware.gpus_per_node=N)",
        ),
        (1, 1, 8, "one at a time, each on GPUs or cores of its own"),
        (None, 4, 2, "4 at a time, each on 2 of the 8 GPUs found here (or hardware.gpus_per_node=N)"),
    ],
)
def test_gpus_are_divided_evenly_among_the_trials_at_a_time(
    have_gpus: HaveGpus, jobs: int | None, at_once: int, each: int, said: str
) -> None:
    have_gpus(8)
    plan = planned(*SMALL, FOUR, jobs=jobs)
    assert (plan.num_at_once, sizes(plan)) == (at_once, [each] * 4)
    assert plan.describe() == said


def test_more_trials_at_a_time_than_gpus_wait_for_one(have_gpus: HaveGpus) -> None:
    have_gpus(2)
    plan = planned(*SMALL, FOUR, jobs=5)
    assert (plan.num_at_once, sizes(plan)) == (2, [1] * 4)
    assert {config.parallelism.strategy for config in plan.configs} == {Strategy.single}
    assert plan.describe() == (
        "2 at a time, each on 1 of the 2 GPUs found here (or hardware.gpus_per_node=N); of --jobs=5 the others wait "
        "for one"
    )


def test_fewer_trials_than_asked_for_get_more_each(have_gpus: HaveGpus) -> None:
    have_gpus(8)
    for jobs in (8, 100, None):
        plan = planned(*SMALL, "training.seed=0,1", jobs=jobs)
        assert (plan.num_at_once, sizes(plan)) == (2, [4, 4])
        assert "others wait" not in plan.describe()


def test_where_jobs_are_open_too_each_trial_gets_enough_to_fit(have_gpus: HaveGpus) -> None:
    have_gpus(4, memory_gib=79.6)
    plan = planned(*LARGE, FOUR)
    assert (plan.num_at_once, sizes(plan)) == (2, [2] * 4)
    told = planned(*LARGE, FOUR, jobs=4)  # is obeyed: each trial says that it does not fit
    assert (told.num_at_once, sizes(told)) == (4, [1] * 4)


def test_trials_that_fit_on_no_share_run_one_at_a_time_on_all(have_gpus: HaveGpus) -> None:
    have_gpus(2)
    plan = planned("model=llama2_70b_chat", *SMALL[1:], "training.seed=0,1")
    assert (plan.num_at_once, plan.division, sizes(plan)) == (1, None, [2, 2])


@pytest.mark.parametrize(
    ("words", "each"),
    [
        (("hardware.gpus_per_node=2",), 2),
        (("parallelism=ddp",), 8),
        (("parallelism=single",), 1),
        (("hardware=cpu",), 1),
    ],
)
def test_what_was_typed_is_obeyed(have_gpus: HaveGpus, words: tuple[str, ...], each: int) -> None:
    have_gpus(8)
    plan = planned(*SMALL, *words, "training.seed=0,1")
    assert (plan.division, sizes(plan)) == (None, [each] * 2)
    if each == 8:
        with pytest.raises(RequestError, match=r"--jobs=4: a trial takes 8 GPUs.*hardware.gpus_per_node=2$"):
            planned(*SMALL, *words, "training.seed=0,1", jobs=4)


def test_trials_that_name_a_number_leave_room_for_those_that_do_not(have_gpus: HaveGpus) -> None:
    have_gpus(8)
    words = (*SMALL, "hardware.gpus_per_node=4,null", "training.seed=0,1")
    plan = planned(*words)
    assert (plan.num_at_once, sizes(plan)) == (2, [4] * 4)
    narrower = planned(*SMALL, "hardware.gpus_per_node=1,null", "training.seed=0,1", jobs=4)
    assert (narrower.num_at_once, sizes(narrower)) == (4, [1, 1, 2, 2])
    assert narrower.describe().startswith("4 at a time, each on 1 or 2 of the 8 GPUs found here")
    with pytest.raises(RequestError, match=r"--jobs=4: a trial takes 4 GPUs, and this machine has 8 GPUs"):
        planned(*words, jobs=4)


def test_a_share_that_cannot_be_planned_is_not_taken(have_gpus: HaveGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a rule that only a single GPU breaks: nothing is known of its memory then."""
    have_gpus(4)
    whole = dividing.TrialDrafts.with_gpus

    def refused_on_one(drafts: dividing.TrialDrafts, overrides: tuple[str, ...], num_gpus: int) -> Draft:
        draft = whole(drafts, overrides, num_gpus)
        error = RequestError("one GPU is too few", problem_id="config-invalid")
        return replace(draft, error=error) if num_gpus == 1 else draft

    monkeypatch.setattr(dividing.TrialDrafts, "with_gpus", refused_on_one)
    plan = planned(*SMALL, FOUR)
    assert (plan.num_at_once, sizes(plan)) == (2, [2] * 4)


def test_a_trial_counts_on_its_share_of_the_hosts_memory(have_gpus: HaveGpus) -> None:
    have_gpus(8)
    drafts = planned(*SMALL, FOUR).drafts
    whole, share = drafts.whole((*SMALL,)), drafts.with_gpus((*SMALL,), 2)
    assert whole.resolution is not None and share.resolution is not None
    assert (whole.resolution.host_memory_gib, share.resolution.host_memory_gib) == (500.0, 125.0)


def test_one_after_the_other_each_trial_has_all(have_gpus: HaveGpus) -> None:
    have_gpus(8)
    plan = planned(*SMALL, "training.seed=0,1", launcher="basic")
    assert (plan.num_at_once, plan.division, sizes(plan)) == (1, None, [8, 8])


def test_a_batch_that_only_the_share_divides_is_no_problem(have_gpus: HaveGpus) -> None:
    """10 documents are no whole number for each of 4 GPUs, and 5 for each of 2."""
    have_gpus(4)
    words = (*SMALL[:3], "training.global_samples=10", "packing=padded", "training.seed=0,1")
    assert sizes(planned(*words, jobs=2)) == [2, 2]
    with pytest.raises(RequestError, match=r"global_samples=10"):
        planned(*words, jobs=1)


def test_the_trials_of_a_search_have_the_same_share_however_many_there_are(have_gpus: HaveGpus) -> None:
    have_gpus(4)
    words = [*SMALL, "training.max_steps=int(interval(1,9))"]
    for num_trials in (2, 20):  # the same command with more trials goes on with the first
        options = SweepOptions(launcher="joblib", search="optuna", num_trials=num_trials, metric="final_loss")
        plan = plan_sweep(None, words, [], options, is_started=True)
        assert (plan.num_at_once, sizes(plan)) == (min(4, num_trials), [1, 1])
    proposed = plan.config_of(trial_of(5, plan.fixed, {"training.max_steps": 3}))
    assert (proposed.training.max_steps, proposed.hardware.gpus_per_node) == (3, 1)


# Waits until as many are there as run at a time, and says which GPUs it sees.
SEES = """
import json, os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
folder.mkdir()
seen = folder.parent / f"{folder.name}.sees"
seen.write_text(os.environ["CUDA_VISIBLE_DEVICES"])
end = time.monotonic() + 60
while len(list(folder.parent.glob("*.sees"))) < 2:
    assert time.monotonic() < end
    time.sleep(0.02)
"""


def test_each_trial_sees_its_share_alone(have_gpus: HaveGpus, tmp_path: Path) -> None:
    have_gpus(4)
    console = Console(width=160, record=True)
    words = [f"outputs={tmp_path}", *SMALL, "training.seed=0,1"]
    code = sweep_command(
        *(None, words, [], console),
        options=SweepOptions(launcher="joblib", jobs=2),
        command_of=lambda _trial, folder: [sys.executable, "-c", SEES, str(folder)],
    )
    assert code == 0
    seen = sorted(file.read_text() for file in (tmp_path / "custom").glob("sweep-*/*.sees"))
    assert seen == ["GPU-0,GPU-1", "GPU-2,GPU-3"]
    assert "2 at a time, each on 2 of the 4 GPUs found here" in console.export_text()
