from __future__ import annotations

import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from tunebook.config.compose import compose
from tunebook.errors import RequestError
from tunebook.sweep.space import as_text, read_space, title_of


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
        ("range(0.1,1.0,0.2)", FloatDistribution(0.1, 0.9, step=0.2)),
        ("cosine,linear", CategoricalDistribution(["cosine", "linear"])),
        ("choice(1,2)", CategoricalDistribution(["1", "2"])),
        ("[a,b],[c]", CategoricalDistribution(["[a,b]", "[c]"])),
    ],
)
def test_a_search_chooses_from_what_hydra_means(value: str, distribution: object) -> None:
    space = read_space(["training.max_steps=3", f"key={value}"], is_search=True)
    assert space.fixed == ["training.max_steps=3"]
    assert space.choices == {"key": distribution}


def test_a_grid_is_every_combination_and_the_last_key_changes_fastest() -> None:
    space = read_space(["optimizer.learning_rate=0.1,0.2", "training.max_length=99", "s=range(1,3)"], is_search=False)
    assert space.grid() == [
        {"optimizer.learning_rate": "0.1", "s": "1"},
        {"optimizer.learning_rate": "0.1", "s": "2"},
        {"optimizer.learning_rate": "0.2", "s": "1"},
        {"optimizer.learning_rate": "0.2", "s": "2"},
    ]
    assert space.overrides(space.grid()[2]) == ["training.max_length=99", "optimizer.learning_rate=0.2", "s=1"]
    assert title_of(space.grid()[2]) == "optimizer.learning_rate=0.2 s=1"
    words = ["training.seed=1,2", "dataset.system_prompt=Be brief; be kind"]  # a text that Hydra's grammar lacks
    assert len(read_space(words, is_search=False).grid()) == 2
    assert [*read_space(["a=1,2", "b=1,2", "a=3"], is_search=False).choices] == ["b"], "the last one counts"


@pytest.mark.parametrize(
    ("word", "is_search", "problem_id"),
    [
        ("a=1", False, "sweep-without-values"),
        ("a=1", True, "sweep-without-values"),
        ("a=interval(0,1)", False, "sweep-range"),
        ("a=glob(*)", True, "sweep-range"),
        ("a=interval(2,1)", True, "sweep-range"),
        ("a=tag(log,interval(0,1))", True, "sweep-range"),
        ("a=tag(lg,interval(1,2))", True, "sweep-range"),
        ("a=range(5,1)", True, "sweep-range"),
        ("a=range(1,5,0)", True, "sweep-range"),
        ("training.seed=0,[1", False, "override-form"),
    ],
)
def test_what_cannot_be_swept_is_refused(word: str, is_search: bool, problem_id: str) -> None:
    with pytest.raises(RequestError) as raised:
        read_space([word], is_search=is_search)
    assert raised.value.problem_id == problem_id


def test_proposed_numbers_are_composed_to_the_bit() -> None:
    value = 3.0517578125e-05 * 1.1
    space = read_space(["training.max_steps=3", "training.seed=1,2"], is_search=True)
    values = {"optimizer.learning_rate": value, "training.seed": 12}
    assert as_text(values) == {"optimizer.learning_rate": repr(value), "training.seed": "12"}
    config = compose("quickstart", space.overrides(values)).config
    assert (config.optimizer.learning_rate, config.training.seed, config.training.max_steps) == (value, 12, 3)


def test_every_end_and_every_choice_is_in_a_corner() -> None:
    space = read_space(["a=int(interval(1,8))", "b=x,y,z", "c=interval(0.5,1)"], is_search=True)
    assert space.corners() == [{"a": 1, "b": "x", "c": 0.5}, {"a": 8, "b": "y", "c": 1.0}, {"a": 8, "b": "z", "c": 1.0}]
