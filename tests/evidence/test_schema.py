"""What evidence is called, by what ran."""

from __future__ import annotations

import pytest

from tunebook.evidence.schema import Evidence, Kind, Results, RunDescription, Score


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
