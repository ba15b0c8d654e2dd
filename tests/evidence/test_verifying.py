"""Which evidence a run is held against, and what is said where there is none for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tunebook.errors import RequestError
from tunebook.evidence.gather import config_of, gather_hardware, gather_inputs, read_finished
from tunebook.evidence.recording import record_evidence
from tunebook.evidence.verifying import recorded_evidence, verify

from .conftest import MakeRun


@pytest.fixture
def evidence(make_run: MakeRun, recipes_dir: Path) -> Path:
    return record_evidence([read_finished(make_run()), read_finished(make_run())], "try", [])


def test_a_file_that_is_not_there_is_a_wrong_request(evidence: Path, make_run: MakeRun) -> None:
    with pytest.raises(RequestError, match=r"--against /nope\.json is no file; name one of recipes/NAME/evidence"):
        verify(read_finished(make_run()), [], Path("/nope.json"))


def test_evidence_of_another_recipe_is_named_with_both(make_run: MakeRun, project_root: Path) -> None:
    file = project_root / "recipes/zero1_lora/evidence/hopper-4-random_weights.json"
    said = r"hopper-4-random_weights\.json is evidence of zero1_lora, and the run is of quickstart: .*--against is not"
    with pytest.raises(RequestError, match=said):
        verify(read_finished(make_run()), [], file)


def test_a_run_without_a_recipe_is_not_sent_to_record_what_would_be_refused(make_run: MakeRun) -> None:
    record = read_finished(make_run())
    config, inputs = config_of(record.folder), gather_inputs(record, config_of(record.folder))
    config.recipe = None
    with pytest.raises(RequestError, match=r"no recipe, and evidence belongs to one: put its settings") as error:
        recorded_evidence(config, inputs, gather_hardware(record, config), [])
    assert error.value.problem_id == "evidence-without-recipe"
    assert "--record" not in error.value.message
