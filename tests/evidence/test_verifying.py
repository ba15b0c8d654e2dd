"""Which evidence a run is compared with, and the errors if there is none."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tunebook.commands.record_evidence import record_evidence
from tunebook.commands.recorded_evidence import claim_of_evidence, verify
from tunebook.commands.verify import verify_command
from tunebook.errors import DataError, RequestError
from tunebook.evidence.files import content_hash
from tunebook.evidence.gather import read_finished
from tunebook.evidence.page import PAGE_FILE

from .conftest import MakeRun


@pytest.fixture
def evidence(make_run: MakeRun, recipes_dir: Path) -> Path:
    return record_evidence([read_finished(make_run()), read_finished(make_run())], "try", [])


def test_a_file_that_is_not_there_is_a_wrong_request(evidence: Path, make_run: MakeRun) -> None:
    with pytest.raises(RequestError, match=r"--against /nope\.json is not a file; name one of recipes/NAME/evidence"):
        verify(read_finished(make_run()), [], Path("/nope.json"))


def test_evidence_of_another_recipe_is_named_with_both(make_run: MakeRun, project_root: Path) -> None:
    file = project_root / "recipes/zero1_lora/evidence/hopper-4-random_weights.json"
    said = (
        r"hopper-4-random_weights\.json is evidence of zero1_lora, and the run is of quickstart: .*needs no --against"
    )
    with pytest.raises(RequestError, match=said):
        verify(read_finished(make_run()), [], file)


def test_a_run_without_a_recipe_is_not_sent_to_record_what_would_be_refused(make_run: MakeRun) -> None:
    run = read_finished(make_run())
    run.config.recipe = None
    with pytest.raises(RequestError, match=r"no recipe, and evidence belongs to one: put its settings") as error:
        claim_of_evidence(run, [])
    assert error.value.problem_id == "evidence-without-recipe"
    assert "--record" not in error.value.message


def test_of_one_machine_the_file_with_the_same_split_is_taken(make_run: MakeRun, recipes_dir: Path) -> None:
    other_split = {"row_length: 1024": "row_length: 512"}
    for label, replaced in (("a", other_split), ("b", {})):
        runs = [make_run(gpus=1, replaced=replaced) for _ in range(2)]
        record_evidence([read_finished(run) for run in runs], label, [])
    found = verify(read_finished(make_run(gpus=1)), [])
    assert found.claim.name == "cpu-1-b.json"  # the first by name would leave speed and memory unjudged
    assert {row.name: row.verdict.value for row in found.rows}["tokens/s/GPU"] == "within tolerance"
    assert verify(read_finished(make_run(gpus=1, replaced=other_split)), []).claim.name == "cpu-1-a.json"
    assert verify(read_finished(make_run(replaced=other_split)), []).claim.name == "cpu-1-a.json"


def test_wrong_types_of_numbers_are_a_damaged_record(evidence: Path, make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    file = run / "evaluation" / "after.json"
    file.write_text(json.dumps({"tasks": {"words": {"value": 0.5, "stderr": None, "num_items": 3}}}))
    with pytest.raises(DataError, match=rf"{run}: .* or evaluation/ holds .*KeyError: 'metric'") as raised:
        verify_command([str(run)], tmp_path, [], Console(file=StringIO()))
    assert raised.value.problem_id == "broken-record"


def test_brackets_in_a_reason_are_not_markup(evidence: Path, make_run: MakeRun) -> None:
    found = verify(read_finished(make_run()), [])
    rows = [replace(row, why="of [bold] means", name="words [x]") for row in found.rows]
    out = StringIO()
    Console(file=out, width=400).print(replace(found, rows=rows).table())
    assert out.getvalue().count("of [bold] means") == len(rows)


def test_other_data_preparation_is_shown_and_not_judged(evidence: Path, make_run: MakeRun) -> None:
    assert json.loads(evidence.read_text())["inputs"]["data_fingerprint"] == "4" * 64
    assert "prepared data" not in {row.name for row in verify(read_finished(make_run()), []).rows}
    other = make_run(manifest={"dataset": {"fingerprint": "5" * 64}})
    found = verify(read_finished(other), [])
    (row,) = [row for row in found.rows if row.name == "prepared data"]
    assert (row.verdict.value, found.exit_code) == ("not judged", 0)
    assert "fingerprint 555555555555..., recorded with 444444444444...; tokens and labels are the same" in row.why
    assert "555555555555" in str(found.to_json())
    out = StringIO()
    verify_command([str(other)], Path("outputs"), [], Console(file=out, width=400))
    assert "recorded with 444444444444" in out.getvalue()
    assert "recorded with 444444444444" in (other / PAGE_FILE).read_text()


def test_unknown_tokens_are_not_called_equal(make_run: MakeRun, recipes_dir: Path) -> None:
    unknown = {"content_sha256": None}
    runs = [make_run(manifest={"dataset": unknown}) for _ in range(2)]
    record_evidence([read_finished(run) for run in runs], "try", [])
    other = make_run(manifest={"dataset": unknown | {"fingerprint": "5" * 64}})
    (why,) = [row.why for row in verify(read_finished(other), []).rows if row.name == "prepared data"]
    assert "whether the tokens are the same is not recorded" in why


def test_older_evidence_without_the_fingerprint_of_its_data_holds_as_before(evidence: Path, make_run: MakeRun) -> None:
    content = json.loads(evidence.read_text())
    del content["inputs"]["data_fingerprint"]
    evidence.write_text(json.dumps(content | {"content_sha256": content_hash(content)}))
    found = verify(read_finished(make_run(manifest={"dataset": {"fingerprint": "5" * 64}})), [])
    assert [row.name for row in found.rows] == ["loss", "tokens/s/GPU", "memory GiB", "words"]
    assert found.exit_code == 0


def test_evidence_of_other_weights_in_a_folder_is_no_evidence(make_run: MakeRun, recipes_dir: Path) -> None:
    """config.json identifies the architecture but not the weights."""

    def started_from(fingerprint: str | None) -> Path:
        return make_run(manifest={"model": {"weights_fingerprint": fingerprint}})

    file = record_evidence([read_finished(started_from("a" * 64)) for _ in range(2)], "try", [])
    assert json.loads(file.read_text())["inputs"]["weights_fingerprint"] == "a" * 64
    assert verify(read_finished(started_from("a" * 64)), []).exit_code == 0
    assert verify(read_finished(started_from(None)), []).exit_code == 0  # of a run from before there were any
    with pytest.raises(RequestError, match=f"weights_fingerprint is {'b' * 64}, recorded with {'a' * 64}"):
        verify(read_finished(started_from("b" * 64)), [])
