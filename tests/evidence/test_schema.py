"""What evidence is called, and files that were damaged or edited."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tunebook.errors import DataError
from tunebook.evidence.schema import Evidence, Kind, Results, RunDescription, Score, read_evidence

from .conftest import MakeRun, Record, curve, edit_json


@pytest.mark.parametrize(
    ("weights", "data", "layers", "has_score", "kind"),
    [
        ("pretrained", "real", "all 24", True, Kind.real),
        ("pretrained", "real", "all", False, Kind.real),
        ("pretrained", "real", "4 of 24", True, Kind.machinery),
        ("pretrained", "generated", "all 24", False, Kind.machinery),
        ("random", "generated", "all 24", True, Kind.machinery),
        ("random", "real", "all 2", True, Kind.from_scratch),
        ("random", "real", "all 2", False, Kind.machinery),
    ],
)
def test_only_whole_models_that_learn_from_real_data_are_more_than_machinery(
    weights: str, data: str, layers: str, has_score: bool, kind: Kind
) -> None:
    ran = RunDescription.model_validate(
        {"recipe": "x", "title": "x", "weights": weights, "data": data, "layers": layers, "steps": 9, "overrides": []}
    )
    score = Score(metric="acc", value=0.5, stderr=None, num_items=9)
    results = Results(
        steps=[1], losses=[1.0], tokens_per_second_per_gpu=None, memory_gib=None, planned_memory_gib=None,
        scores={"boolq": score} if has_score else {},
    )  # fmt: skip
    assert Evidence.model_construct(ran=ran, results=results).kind is kind


@pytest.fixture
def evidence(make_run: MakeRun, record: Record) -> Path:
    return record(make_run(), make_run(), target="loss<=3")


def test_a_curve_is_one_line_and_read_as_it_was(evidence: Path) -> None:
    assert max(map(len, evidence.read_text().splitlines())) > 300
    assert read_evidence(evidence).results.losses == curve()


def test_a_file_that_was_edited_by_hand_is_refused(evidence: Path) -> None:
    evidence.write_text(evidence.read_text().replace('"label": "try"', '"label": "true"'))
    with pytest.raises(DataError, match="changed after it was written"):
        read_evidence(evidence)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format: Input should be less than or equal to 1"),
        ({"extra": 1}, "extra: Extra inputs are not permitted"),
        ({"repeats": []}, "repeats: List should have at least 2 items"),
        ({"results": None}, "results: Input should be"),
    ],
)
def test_a_file_of_another_form_is_refused_with_the_place(evidence: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_evidence(edit_json(evidence, **change))
