"""The mean length that is planned with, against lengths that are drawn as the generator draws them."""

from __future__ import annotations

import numpy as np
import pytest

from tunebook.config.choices import Overlong, Source
from tunebook.config.plain import plain_config
from tunebook.config.schema import DatasetConfig, RunConfig, SyntheticConfig, TrainingConfig
from tunebook.data import synthetic
from tunebook.plan.mean_length import mean_tokens


def config_of(dataset: DatasetConfig, max_length: int = 1024) -> RunConfig:
    return plain_config(dataset=dataset, training=TrainingConfig(max_length=max_length, global_samples=8))


def drawn_lengths(settings: SyntheticConfig) -> np.ndarray:
    random = np.random.default_rng(0)
    return np.concatenate([synthetic._draw_lengths(random, settings) for _ in range(200)])


def after(lengths: np.ndarray, overlong: Overlong, longest: int) -> np.ndarray:
    """What is left of documents once those that are too long were dealt with."""
    if overlong is Overlong.cut:
        return np.minimum(lengths, longest)
    if overlong is Overlong.drop:
        return lengths[lengths <= longest]
    pieces = [np.diff([*range(0, length, longest), length]) for length in lengths]
    return np.concatenate(pieces)


@pytest.mark.parametrize("overlong", list(Overlong))
@pytest.mark.parametrize("longest", [200, 1024, 8192])
@pytest.mark.parametrize(("sigma", "most"), [(0.9, 4096), (0.9, 700), (0.0, 4096)])
def test_it_is_that_of_the_documents_that_are_drawn(overlong: Overlong, longest: int, sigma: float, most: int) -> None:
    settings = SyntheticConfig(log_sigma_tokens=sigma, max_tokens=most)
    found = mean_tokens(
        config_of(DatasetConfig(source=Source.synthetic, synthetic=settings, overlong=overlong), longest)
    )
    lengths = after(drawn_lengths(settings), overlong, longest)
    assert found == (pytest.approx(float(lengths.mean()), rel=0.01) if len(lengths) else None)


def test_what_is_stated_of_a_data_set_comes_first_and_otherwise_nothing_is_known() -> None:
    assert mean_tokens(config_of(DatasetConfig(source=Source.synthetic, mean_tokens=300.0))) == 300
    assert mean_tokens(config_of(DatasetConfig(source=Source.files, path="a.jsonl", mean_tokens=3000.0))) == 1024
    assert mean_tokens(config_of(DatasetConfig(source=Source.files, path="a.jsonl"))) is None
