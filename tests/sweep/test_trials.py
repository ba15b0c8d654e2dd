from __future__ import annotations

import pytest
from hydra.core.override_parser.types import RangeSweep

from tunebook.config.compose import compose
from tunebook.errors import RequestError
from tunebook.sweep.trials import Trial, check_trials, expand_trials, num_values, parse_sweep_overrides


def check_with_compose(overrides: list[str]) -> None:
    compose("quickstart", overrides)


def test_every_combination_is_one_trial_and_the_last_key_changes_fastest() -> None:
    trials = expand_trials(["optimizer.learning_rate=0.1,0.2", "training.max_length=99", "training.seed=0,1"])
    assert [trial.swept for trial in trials] == [
        {"optimizer.learning_rate": "0.1", "training.seed": "0"},
        {"optimizer.learning_rate": "0.1", "training.seed": "1"},
        {"optimizer.learning_rate": "0.2", "training.seed": "0"},
        {"optimizer.learning_rate": "0.2", "training.seed": "1"},
    ]
    assert trials[2] == Trial(
        number=2,
        overrides=("optimizer.learning_rate=0.2", "training.max_length=99", "training.seed=0"),
        swept={"optimizer.learning_rate": "0.2", "training.seed": "0"},
    )
    assert (trials[2].name, trials[2].title) == ("trial-002", "optimizer.learning_rate=0.2 training.seed=0")


def test_ranges_choices_groups_and_lists_are_understood() -> None:
    trials = expand_trials(["training.seed=range(1,4)", "optimizer=adamw,adamw_8bit", "evaluation.tasks=[a,b]"])
    assert len(trials) == 6
    assert trials[5].overrides == ("training.seed=3", "optimizer=adamw_8bit", "evaluation.tasks=[a,b]")
    assert [trial.swept["peft.rank"] for trial in expand_trials(["peft.rank=choice(4,8)"])] == ["4", "8"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], r"no override lists several values.*tunebook train"),
        (["training.seed=1"], r"no override lists several values"),
        (["+training.seed=0,1"], r"keys can be set, not added or removed"),
        (["~training.seed"], r"keys can be set, not added or removed"),
        (["training.seed=0,[1"], r"cannot be read"),
        (["training.seed=glob(*)"], r"glob\(\.\.\.\).*write them out with commas"),
        (["optimizer.learning_rate=interval(0,1)"], r"interval\(\.\.\.\)"),
        (["optimizer.learning_rate=interval(0,1)"], r"--search=optuna --num-trials=20"),
        (["training.seed=0,1", "hydra.sweep.dir=/tmp"], r"override 'hydra.sweep.dir=/tmp': Hydra's own keys"),
        (["training.seed=0,1", "hydra/launcher=joblib"], r"--launcher=joblib --jobs=2"),
        (["training.seed=0,1", "training.seed=5"], r"training.seed is given 2 times.*the last one win"),
        (["training.seed=0,1,0"], r"two trials would be the same \(training.seed=0\)"),
        (["training.seed=range(0,5,0)"], r"in steps of 0 never reaches its end.*training.seed=range\(0,10,2\)"),
        (["a=range(0,1,0.0)"], r"in steps of 0"),
        (["a=range(0,inf)"], r"a range has two ends; write numbers"),
        (["a=range(0,1000000000000)"], r"1,000,000,000,000 trials \(1,000,000,000,000 of a\).*--search=optuna"),
        (["a=range(0,1e9,0.001)"], r"at most 2,000 are listed"),
        (["a=range(0,100)", "b=range(0,7)", "c=1,2,3", "d=x"], r"2,100 trials \(100 of a x 7 of b x 3 of c\)"),
        (["training.seed=shuffle(0,1)"], r"shuffle\(\.\.\.\) would order the trials differently each time"),
        (["training.seed=0,1", "recipes=quickstart"], r"name the recipe as the first word"),
    ],
)
def test_what_is_no_sweep_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        expand_trials(words)


@pytest.mark.parametrize(
    "text",
    ["0,10", "8,65,8", "1,10,2", "10,1,-3", "5,1", "0,1,0.1", "0,0.3,0.1", "0.1,1.0,0.2", "1,0,-0.25", "0,1e-3,1e-4"],
)
def test_a_range_is_counted_as_hydra_counts_it_up(text: str) -> None:
    (override,) = parse_sweep_overrides([f"a=range({text})"])
    sweep = override.value()
    assert isinstance(sweep, RangeSweep)
    assert num_values(sweep) == len(list(sweep.range()))


def test_good_trials_pass() -> None:
    check_trials(expand_trials(["optimizer.learning_rate=0.1,0.2"]), check_with_compose)


def test_a_misspelt_key_is_reported_once_for_all_its_values() -> None:
    trials = expand_trials(["optimizer.learning_rat=0.1,0.2", "training.seed=0,1"])
    with pytest.raises(RequestError) as raised:
        check_trials(trials, check_with_compose)
    headline, *problems = raised.value.message.splitlines()
    assert "none of its trials was started" in headline
    assert len(problems) == 1
    assert problems[0].startswith("all 4 trials: ")
    assert "Did you mean 'optimizer.learning_rate'?" in problems[0]
    assert raised.value.problem_id == "unknown-key"


def test_different_problems_name_the_trials_that_have_them() -> None:
    trials = expand_trials(["training.seed=0,1,zero", "optimizer=adamw,adam"])
    with pytest.raises(RequestError) as raised:
        check_trials(trials, check_with_compose)
    wrong_choice, wrong_type, both, *_ = raised.value.message.splitlines()[1:]
    assert wrong_choice.startswith("2 of 6 trials (training.seed=0 optimizer=adam; training.seed=1 optimizer=adam): ")
    assert "no optimizer 'adam'" in wrong_choice
    assert wrong_type.startswith("1 of 6 trials (training.seed=zero optimizer=adamw): ")
    assert both == "1 of 6 trials (training.seed=zero optimizer=adam): 2 problems"
