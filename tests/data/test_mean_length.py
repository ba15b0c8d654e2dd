"""The number and mean length that are planned with, against the documents that are generated."""

from __future__ import annotations

import numpy as np
import pytest

from tunebook.config.choices import Overlong, Source
from tunebook.config.frozen import plain_config
from tunebook.config.schema import DatasetConfig, RunConfig, SyntheticConfig, TrainingConfig
from tunebook.data.mean_length import count_documents, longest_document, mean_tokens, with_file_estimate
from tunebook.data.synthetic import generate


def config_of(dataset: DatasetConfig, max_length: int = 1024) -> RunConfig:
    return plain_config(dataset=dataset, training=TrainingConfig(max_length=max_length, global_samples=8))


def after(lengths: np.ndarray, overlong: Overlong, longest: int) -> np.ndarray:
    """The lengths after documents that are too long were cut, dropped or split."""
    if overlong is Overlong.cut:
        return np.minimum(lengths, longest)
    if overlong is Overlong.drop:
        return lengths[lengths <= longest]
    rests = lengths % longest
    return np.concatenate([np.full((lengths // longest).sum(), longest), rests[rests > 0]])


@pytest.mark.parametrize("overlong", [Overlong.cut, Overlong.drop, Overlong.split])
@pytest.mark.parametrize("longest", [200, 1024, 8192])
@pytest.mark.parametrize(("sigma", "most"), [(0.9, 4096), (0.9, 700), (0.0, 4096)])
def test_it_is_that_of_the_documents_that_are_drawn(overlong: Overlong, longest: int, sigma: float, most: int) -> None:
    settings = SyntheticConfig(log_sigma_tokens=sigma, max_tokens=most, num_documents=2_500)
    config = config_of(DatasetConfig(source=Source.synthetic, synthetic=settings, overlong=overlong), longest)
    batches = generate(settings, num_documents=settings.num_documents, vocab_size=1000, eos_token_id=0)
    drawn = np.concatenate([batch.column("input_ids").value_lengths().to_numpy() for batch in batches])
    lengths = after(drawn, overlong, longest)
    assert mean_tokens(config) == (pytest.approx(float(lengths.mean()), rel=1e-9) if len(lengths) else None)
    assert count_documents(config) == (len(lengths) or None)


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


@pytest.mark.parametrize("name", ["some.jsonl", "some.json"])
def test_documents_of_a_file_are_counted_and_their_tokens_bounded_by_its_size(tmp_path, name):
    lines = ['{"text": "one"}', '{"text": "two"}', '{"text": "three"}']
    text = "\n".join(lines) if name.endswith("l") else f"[{', '.join(lines)}]"
    (tmp_path / name).write_text(text)
    found = with_file_estimate(DatasetConfig(source=Source.files, path=str(tmp_path / "*")))
    assert found.num_documents == 3
    assert found.mean_tokens == pytest.approx(len(text) / 1.89 / 3)


def test_documents_of_a_large_file_are_those_that_its_start_promises(tmp_path):
    """4 MiB of lines of 64 bytes are 65,536 documents, of which a quarter is counted."""
    (tmp_path / "large.jsonl").write_bytes((b"x" * 63 + b"\n") * 65_536)
    found = with_file_estimate(DatasetConfig(source=Source.files, path=str(tmp_path / "large.jsonl")))
    assert (found.num_documents, found.mean_tokens) == (65_536, pytest.approx(64 / 1.89))


@pytest.mark.parametrize(
    "dataset",
    [
        DatasetConfig(source=Source.files, path="absent.jsonl"),
        DatasetConfig(source=Source.files, path="some.jsonl.gz"),
        DatasetConfig(source=Source.files, path="empty.jsonl"),
        DatasetConfig(source=Source.files, path="some.jsonl", mean_tokens=7.0),  # stated
        DatasetConfig(source=Source.hub, path=None),
    ],
    ids=["absent", "compressed", "empty", "stated", "hub"],
)
def test_other_files_and_stated_lengths_are_left_as_they_are(tmp_path, monkeypatch, dataset):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some.jsonl.gz").write_bytes(b"\x1f\x8b")
    (tmp_path / "empty.jsonl").write_bytes(b"")
    (tmp_path / "some.jsonl").write_text("{}\n")
    assert with_file_estimate(dataset) == dataset


@pytest.mark.parametrize(("source", "longest"), [(Source.synthetic, 512), (Source.files, 1024)])
def test_generated_documents_are_no_longer_than_they_are_drawn(source: Source, longest: int) -> None:
    dataset = DatasetConfig(source=source, path="a.jsonl", synthetic=SyntheticConfig(max_tokens=512))
    assert longest_document(config_of(dataset)) == longest
    assert longest_document(config_of(dataset, max_length=256)) == 256
