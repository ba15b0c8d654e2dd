"""The number and mean length that are planned with, against the documents that are generated."""

from __future__ import annotations

import numpy as np
import pytest

from tunebook.config.choices import Source
from tunebook.config.frozen import plain_config
from tunebook.config.schema import DatasetConfig, RunConfig, SyntheticConfig, TrainingConfig
from tunebook.data.batch import count_documents, longest_document, mean_tokens
from tunebook.data.synthetic import generate


def config_of(dataset: DatasetConfig, max_length: int = 1024) -> RunConfig:
    return plain_config(dataset=dataset, training=TrainingConfig(max_length=max_length, global_samples=8))


@pytest.mark.parametrize("longest", [200, 8192])
@pytest.mark.parametrize(("sigma", "most"), [(0.9, 4096), (0.9, 700), (0.0, 4096)])
def test_it_is_that_of_the_documents_that_are_drawn(longest: int, sigma: float, most: int) -> None:
    settings = SyntheticConfig(log_sigma_tokens=sigma, max_tokens=most, num_documents=2_500)
    config = config_of(DatasetConfig(source=Source.synthetic, synthetic=settings), longest)
    batches = generate(settings, num_documents=settings.num_documents, vocab_size=1000, eos_token_id=0)
    drawn = np.concatenate([batch.column("input_ids").value_lengths().to_numpy() for batch in batches])
    assert mean_tokens(config) == pytest.approx(float(np.minimum(drawn, longest).mean()), rel=1e-9)


def test_what_is_stated_of_a_data_set_comes_first_and_otherwise_nothing_is_known() -> None:
    assert mean_tokens(config_of(DatasetConfig(source=Source.synthetic, mean_tokens=300.0))) == 300
    assert mean_tokens(config_of(DatasetConfig(source=Source.files, path="a.jsonl", mean_tokens=3000.0))) == 1024
    assert mean_tokens(config_of(DatasetConfig(source=Source.files, path="a.jsonl"))) is None


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        (DatasetConfig(source=Source.synthetic), 20_000),
        (DatasetConfig(source=Source.synthetic, synthetic=SyntheticConfig(num_documents=500)), 500),
        (DatasetConfig(source=Source.synthetic, max_documents=3_000, validation_share=0.1), 2_700),
        (DatasetConfig(source=Source.synthetic, max_documents=30_000), 20_000),
        (DatasetConfig(source=Source.synthetic, num_documents=659_808), 659_808),
        (DatasetConfig(source=Source.hub, num_documents=52_000, validation_share=0.05), 49_400),
        (DatasetConfig(source=Source.hub, num_documents=52_000, max_documents=1_000), 1_000),
        (DatasetConfig(source=Source.hub, max_documents=1_000), None),  # it may have fewer
        (DatasetConfig(source=Source.files, path="a.jsonl"), None),
    ],
)
def test_documents_of_an_epoch_are_those_read_without_those_held_out(
    dataset: DatasetConfig, expected: int | None
) -> None:
    assert count_documents(config_of(dataset)) == expected


@pytest.mark.parametrize(("source", "longest"), [(Source.synthetic, 512), (Source.files, 1024)])
def test_generated_documents_are_no_longer_than_they_are_drawn(source: Source, longest: int) -> None:
    dataset = DatasetConfig(source=source, path="a.jsonl", synthetic=SyntheticConfig(max_tokens=512))
    assert longest_document(config_of(dataset)) == longest
    assert longest_document(config_of(dataset, max_length=256)) == 256
