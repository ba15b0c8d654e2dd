from __future__ import annotations

import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from tunebook.config.compose import compose
from tunebook.errors import RequestError
from tunebook.sweep.space import corners, describe, read_space, trial_of


@pytest.mark.parametrize(
    ("value", "distribution"),
    [
        ("interval(1e-6,1e-4)", FloatDistribution(1e-6, 1e-4)),
        ("tag(log,interval(1e-6,1e-4))", FloatDistribution(1e-6, 1e-4, log=True)),
        ("interval(1,8)", FloatDistribution(1.0, 8.0)),
        ("int(interval(1,8))", IntDistribution(1, 8)),
        ("tag(log,int(interval(1,64)))", IntDistribution(1, 64, log=True)),
        ("range(1,10,2)", IntDistribution(1, 9, step=2)),
        ("range(8,65,8)", IntDistribution(8, 64, step=8)),
        ("range(0,1000000000000,7)", IntDistribution(0, 999999999999, step=7)),
        ("range(0.1,1.0,0.2)", FloatDistribution(0.1, 0.9, step=0.2)),
        ("cosine,linear", CategoricalDistribution(["cosine", "linear"])),
        ("choice(1,2)", CategoricalDistribution(["1", "2"])),
        ("[a,b],[c]", CategoricalDistribution(["[a,b]", "[c]"])),
    ],
)
def test_ranges_and_choices_mean_what_hydra_means_by_them(value: str, distribution: object) -> None:
    fixed, space = read_space(["training.max_steps=3", f"key={value}"])
    assert fixed == ["training.max_steps=3"]
    assert space == {"key": distribution}


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (
            "a=interval(1e-4,1e-6)",
            r"low end 0.0001 is not below the high end 1e-06; type 'a=interval\(1e-06,0.0001\)'$",
        ),
        ("a=interval(1,1)", r"low end 1.0 is not below the high end 1.0; type a=1$"),
        ("a.b=int(interval(1,1))", r"low end 1 is not below the high end 1; type a.b=1$"),
        ("a=int(interval(8,1))", r"type 'a=int\(interval\(1,8\)\)'$"),
        ("a=tag(log,interval(1e-3,1e-5))", r"type 'a=tag\(log,interval\(1e-05,0.001\)\)'$"),
        ("a=tag(log,int(interval(8,1)))", r"type 'a=tag\(log,int\(interval\(1,8\)\)\)'$"),
        ("a=range(1,5,0)", r"in steps of 0 never reaches its end"),
        ("a=tag(log,interval(0,1))", r"there is no magnitude of 0.0"),
        ("a=tag(lg,interval(1,2))", r"the tag 'lg' means nothing here; type tag\(log,interval"),
        ("a=tag(log,choice(1,2))", r"only an interval can be searched in magnitudes"),
        ("a=range(5,1,-1)", r"this range has 4 values going up"),
        ("a=range(1,2)", r"this range has 1 values"),
        ("a=interval(1,2),interval(3,4)", r"cannot choose from this; type one interval"),
        ("a=1,1", r"a value is named twice"),
        ("a=interval(x,y)", r"'a=interval\(x,y\)' is no range \(.*mismatch.*\); write numbers, as in key=interval"),
        ("a=log(interval(1,2))", r"is no range \(.*Unknown function 'log'.*tag\(log,interval"),
        ("a=glob(*)", r"cannot choose from this"),
    ],
)
def test_what_is_no_range_says_what_to_type(word: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        read_space([word])


def test_a_search_over_nothing_shows_how_ranges_are_written() -> None:
    with pytest.raises(RequestError, match=r"nothing|anything to choose from; write a range, such as") as raised:
        read_space(["optimizer.learning_rate=1e-6..1e-4"])
    assert raised.value.problem_id == "sweep-without-values"


def test_proposed_numbers_are_composed_to_the_bit() -> None:
    value = 3.0517578125e-05 * 1.1
    trial = trial_of(7, ["training.max_steps=3"], {"optimizer.learning_rate": value, "training.seed": 12})
    assert trial.number == 7
    assert trial.swept == {"optimizer.learning_rate": repr(value), "training.seed": "12"}
    config = compose("quickstart", list(trial.overrides)).config
    assert (config.optimizer.learning_rate, config.training.seed, config.training.max_steps) == (value, 12, 3)


def test_every_end_and_every_choice_is_in_a_corner() -> None:
    words = ["a=int(interval(1,8))", "b=x,y,z", "c=interval(0.5,1)"]
    found = [trial.swept for trial in corners(*read_space(words))]
    assert found == [
        {"a": "1", "b": "x", "c": "0.5"},
        {"a": "8", "b": "y", "c": "1.0"},
        {"a": "8", "b": "z", "c": "1.0"},
    ]


def test_two_spaces_are_told_apart_as_json() -> None:
    one, other = (describe(read_space([word])[1]) for word in ("a=interval(0,1)", "a=interval(0,2)"))
    assert one != other
    assert one == describe(read_space(["a=interval(0,1)"])[1])
