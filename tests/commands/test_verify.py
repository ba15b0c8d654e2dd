"""Recording evidence from repeated runs, and comparing other runs with it."""

from __future__ import annotations

import json
import shutil
from io import StringIO
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

import tunebook.commands.record_evidence as recording
from tunebook.commands.record_evidence import record_evidence
from tunebook.commands.recorded_evidence import verify
from tunebook.commands.verify import verify_command
from tunebook.errors import DataError, RequestError
from tunebook.evidence.compare import input_differences
from tunebook.evidence.files import content_hash, read_evidence
from tunebook.evidence.gather import read_finished
from tunebook.evidence.page import PAGE_FILE
from tunebook.evidence.schema import Inputs
from tunebook.evidence.verifying import claim_of_run, compare_run

from ..evidence.conftest import NUM_STEPS, MakeRun, curve


def record(*folders: Path, label: str = "try") -> Path:
    return record_evidence([read_finished(folder) for folder in folders], label, [])


def verdicts(folder: Path, against: Path | None = None) -> dict[str, str]:
    return {row.name: row.verdict.value for row in verify(read_finished(folder), [], against).rows}


@pytest.fixture
def evidence(make_run: MakeRun, recipes_dir: Path) -> Path:
    return record(make_run(), make_run())


@pytest.fixture
def on_gpus(make_run: MakeRun, recipes_dir: Path) -> Path:
    return record(make_run(gpus=1, speed=1000.0, memory=2.0), make_run(gpus=1, speed=1010.0, memory=2.0))


def test_evidence_starts_with_what_ran(evidence: Path, recipes_dir: Path) -> None:
    assert evidence == recipes_dir / "quickstart" / "evidence" / "cpu-1-try.json"
    content = json.loads(evidence.read_text())
    assert list(content)[:3] == ["format", "ran", "hardware"]
    assert content["ran"] == {
        "recipe": "quickstart", "title": "A small model learns word tasks from scratch on a CPU", "weights": "random",
        "data": "real", "layers": "all 2", "steps": NUM_STEPS, "overrides": [],
    }  # fmt: skip
    assert len(content["repeats"]) == 2
    assert max(map(len, evidence.read_text().splitlines())) > 300  # a curve is one line, not one per step
    assert read_evidence(evidence).results.losses == curve()


def test_an_equal_run_agrees_and_a_cpus_speed_and_memory_are_only_shown(evidence: Path, make_run: MakeRun) -> None:
    assert verdicts(make_run(speed=10.0, memory=50.0)) == {
        "loss": "within tolerance", "tokens/s/GPU": "not judged", "memory GiB": "not judged",
        "words": "within tolerance",
    }  # fmt: skip


@pytest.mark.parametrize(("scale", "verdict"), [(1 + 5e-5, "within tolerance"), (1 + 5e-4, "DIFFERENT")])
def test_a_loss_that_leaves_the_tolerance_differs(
    evidence: Path, make_run: MakeRun, scale: float, verdict: str
) -> None:
    assert verdicts(make_run(losses=curve(scale)))["loss"] == verdict


def test_the_tolerance_is_three_times_what_repeated_runs_differ_by(make_run: MakeRun, recipes_dir: Path) -> None:
    found = read_evidence(record(make_run(), make_run(losses=curve(1.02), score=0.94)))
    # The last 10 of 60 steps are 2% higher, and small: their windows of 3 steps count against the curve's mean.
    apart = 0.02 * fmean(curve()[51:54]) / fmean(curve())
    assert found.tolerances["loss"].value == pytest.approx(3 * apart, rel=0.05)
    assert found.tolerances["score:words"].value == pytest.approx(0.12, rel=1e-2)
    assert "2 runs differ by up to 0.0023; 3 times that, at least 1e-05" in found.tolerances["loss"].how


def test_a_score_may_be_three_standard_errors_off(evidence: Path, make_run: MakeRun) -> None:
    assert verdicts(make_run(score=0.872))["words"] == "within tolerance"
    assert verdicts(make_run(score=0.868))["words"] == "DIFFERENT"


@pytest.mark.parametrize(
    ("numbers", "name"), [({"speed": 900.0}, "tokens/s/GPU"), ({"memory": 2.1}, "memory GiB")], ids=["speed", "memory"]
)
def test_on_the_same_gpus_speed_and_memory_are_judged(
    on_gpus: Path, make_run: MakeRun, numbers: dict[str, float], name: str
) -> None:
    assert verdicts(make_run(gpus=1))[name] == "within tolerance"
    assert verdicts(make_run(gpus=1, **numbers))[name] == "DIFFERENT"


def test_on_other_hardware_the_loss_is_judged_and_the_rest_shown(on_gpus: Path, make_run: MakeRun) -> None:
    other = make_run(gpus=0, speed=1.0, memory=9.0, losses=curve(1.5))
    assert verdicts(other) == {
        "loss": "DIFFERENT", "tokens/s/GPU": "not judged", "memory GiB": "not judged", "words": "within tolerance",
    }  # fmt: skip


@pytest.mark.parametrize(
    "replaced",
    [{"row_length: 1024": "row_length: 512"}, {"compile_layers: false": "compile_layers: true"}],
    ids=["rows", "kernels"],
)
def test_a_step_that_is_split_in_another_way_has_the_same_loss_but_no_comparable_speed(
    on_gpus: Path, make_run: MakeRun, replaced: dict[str, str]
) -> None:
    other = make_run(gpus=1, speed=1.0, replaced=replaced)
    assert verdicts(other)["loss"] == "within tolerance"
    assert verdicts(other)["tokens/s/GPU"] == "not judged"


def test_missing_step_is_infinitely_different(evidence: Path, make_run: MakeRun) -> None:
    found = verify(read_finished(make_run(losses=curve()[:-1])), [])
    assert found.rows[0].verdict.value == "DIFFERENT"
    assert found.rows[0].to_json()["difference"] is None
    assert found.exit_code == 5


def test_evidence_of_the_same_machine_is_preferred(on_gpus: Path, make_run: MakeRun) -> None:
    on_cpu = record(make_run(), make_run(), label="aaa")
    assert verify(read_finished(make_run(gpus=1)), []).claim.name == on_gpus.name
    assert verify(read_finished(make_run()), []).claim.name == on_cpu.name


def test_different_configuration_names_keys_and_a_command(evidence: Path, make_run: MakeRun) -> None:
    other = make_run("optimizer.learning_rate=3e-4", "training.seed=7")
    with pytest.raises(RequestError, match=r"optimizer.learning_rate is 0.0003, recorded with 0.0012") as error:
        verify(read_finished(other), [])
    assert error.value.problem_id == "evidence-of-other-config"
    assert "tunebook train quickstart" in error.value.message


def test_other_data_is_another_thing(evidence: Path, make_run: MakeRun) -> None:
    with pytest.raises(RequestError, match="data_sha256 is 999, recorded with 3333"):
        verify(read_finished(make_run(manifest={"dataset": {"content_sha256": "999"}})), [])


def test_same_data_in_another_folder_is_equal(make_run: MakeRun) -> None:
    def inputs_of(*words: str, sha256: str | None) -> Inputs:
        return read_finished(make_run(*words, manifest={"dataset": {"content_sha256": sha256}})).inputs

    here, there = "dataset.path=/here/a.jsonl", "dataset.path=/there/b.jsonl"
    assert input_differences(inputs_of(here, sha256="1"), inputs_of(there, sha256="1")) == []
    unknown = input_differences(inputs_of(here, sha256=None), inputs_of(there, sha256="1"))
    assert [key for key, _, _ in unknown] == ["dataset.path", "data_sha256"]


def test_evidence_of_a_changed_book_is_refused(evidence: Path, make_run: MakeRun) -> None:
    content = json.loads(evidence.read_text())
    content["inputs"]["config"]["optimizer"]["weight_decay"] = 0.3
    evidence.write_text(json.dumps(content | {"content_sha256": content_hash(content)}))
    with pytest.raises(
        RequestError, match=r"weight_decay is 0.1, recorded with 0.3\. The book.*commit aaaaaaaaaaaa"
    ) as error:
        verify(read_finished(make_run()), [])
    assert f"remove {evidence}" in error.value.message
    assert "tunebook train" not in error.value.message


def test_evidence_whose_overrides_no_longer_compose_is_refused(evidence: Path, make_run: MakeRun) -> None:
    content = json.loads(evidence.read_text())
    content["ran"]["overrides"] = ["optimizer.gone=1"]
    content["inputs"]["seed"] = 9
    evidence.write_text(json.dumps(content | {"content_sha256": content_hash(content)}))
    with pytest.raises(RequestError, match="was changed since commit aaaaaaaaaaaa"):
        verify(read_finished(make_run()), [])


def test_a_recipe_without_evidence_says_how_to_record_some(make_run: MakeRun, recipes_dir: Path) -> None:
    with pytest.raises(RequestError, match=r"nothing is recorded for quickstart.*--record --label NAME"):
        verify(read_finished(make_run()), [])


def test_comparison_with_one_run_uses_minimum_tolerances(make_run: MakeRun) -> None:
    original, other = read_finished(make_run(gpus=1)), read_finished(make_run(gpus=1, speed=960.0))
    claim = claim_of_run(original, [])
    found = compare_run(claim, other)
    assert found.exit_code == 0
    assert all("runs differ" not in row.why for row in found.rows)
    assert found.claim.tolerances["loss"].value == 1e-5
    slower = compare_run(claim, read_finished(make_run(gpus=1, speed=940.0)))
    assert {row.name for row in slower.rows if row.verdict.value == "DIFFERENT"} == {"tokens/s/GPU"}
    with pytest.raises(RequestError, match=r"is not a repetition of .*training.seed is 7, recorded with 0"):
        compare_run(claim, read_finished(make_run("training.seed=7")))


# --- what is refused as evidence


def refused(*folders: Path, label: str = "try") -> tuple[str | None, str]:
    with pytest.raises(RequestError) as error:
        record(*folders, label=label)
    return error.value.problem_id, error.value.message


def test_evidence_needs_two_different_runs(make_run: MakeRun, recipes_dir: Path) -> None:
    one = make_run()
    assert refused(one)[0] == "evidence-not-repeated"
    id, message = refused(one, one)
    assert (id, "the same one is named twice" in message) == ("evidence-not-repeated", True)


def test_copy_of_a_run_is_no_repetition(make_run: MakeRun, recipes_dir: Path, tmp_path: Path) -> None:
    one = make_run()
    copy = shutil.copytree(one, tmp_path / "copy")
    id, message = refused(one, copy)
    assert (id, f"{copy} is a copy of {one}" in message) == ("evidence-not-repeated", True)


def test_other_split_or_software_is_no_repetition(make_run: MakeRun, recipes_dir: Path) -> None:
    split = make_run(replaced={"row_length: 1024": "row_length: 512"})
    assert "packing.row_length is 512, not 1024" in refused(make_run(), split)[1]
    python = make_run(manifest={"environment": {"python": "3.9.0"}})
    assert "python is 3.9.0, not 3." in refused(make_run(), python)[1]
    code = {"git_commit": "b" * 40, "git_diff_sha256": None, "is_clean": True, "reason": None}
    assert f"git_commit is {'b' * 40}, not {'a' * 40}" in refused(make_run(), make_run(manifest={"code": code}))[1]


def test_user_recipe_must_be_committed(
    make_run: MakeRun, recipes_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine" / "quickstart.yaml"
    file.parent.mkdir()
    file.write_text("")
    monkeypatch.setattr(recording, "load_recipes", lambda *_: [SimpleNamespace(file=file)])
    id, message = refused(make_run(), make_run())
    assert (id, f"{file}: it is in no git repository" in message) == ("evidence-of-changed-code", True)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ({"is_clean": False, "git_diff_sha256": "f" * 64}, "its code was changed after commit aaaaaaaaaaaa"),
        ({"git_commit": None, "is_clean": None, "reason": "git is not installed"}, "(git is not installed)"),
    ],
    ids=["changed", "unknown"],
)
def test_uncommitted_code_is_refused(make_run: MakeRun, recipes_dir: Path, code: dict[str, Any], said: str) -> None:
    id, message = refused(make_run(), make_run(manifest={"code": code}))
    assert id == "evidence-of-changed-code"
    assert said in message


def test_a_loss_that_is_not_finite_is_no_evidence(make_run: MakeRun, recipes_dir: Path) -> None:
    losses: list[float | None] = [*curve()[:-1], None]
    id, message = refused(make_run(), make_run(losses=losses))
    assert id == "evidence-not-finite"
    assert f"not finite at step {NUM_STEPS}" in message


def test_runs_of_different_things_or_machines_are_no_repetition(make_run: MakeRun, recipes_dir: Path) -> None:
    assert "training.seed is 1, not 0" in refused(make_run(), make_run("training.seed=1"))[1]
    assert "1 x NVIDIA H200, not 1 x CPU" in refused(make_run(), make_run(gpus=1))[1]


def test_a_run_that_did_not_finish_is_neither_recorded_nor_compared(make_run: MakeRun) -> None:
    stopped = make_run(manifest={"status": {"state": "stopped", "reason": "stopped by SIGTERM"}})
    with pytest.raises(RequestError, match=r"has not finished \(stopped: stopped by SIGTERM\)"):
        read_finished(stopped)


def test_a_recorded_claim_is_not_overwritten(evidence: Path, make_run: MakeRun) -> None:
    before = evidence.read_bytes()
    assert refused(make_run(), make_run())[0] == "evidence-exists"
    assert evidence.read_bytes() == before


@pytest.mark.parametrize("label", ["", "../x", "Big", "a b", ".hidden"])
def test_a_label_is_part_of_a_files_name(make_run: MakeRun, recipes_dir: Path, label: str) -> None:
    assert refused(make_run(), make_run(), label=label)[0] == "evidence-label"


# --- runs that were changed since


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("learning_rate: 0.0012", "learning_rate: 0.0013", "the hash of run.yaml differs from the manifest's"),
        ("  seed: 0\n  deterministic", "  seed: 3\n  deterministic", "the manifest has seed 0, and run.yaml 3"),
        ("recipe: quickstart", "recipe: qwen05b_single", "the manifest has recipe quickstart"),
    ],
    ids=["learning_rate", "seed", "recipe"],
)
def test_edited_configuration_is_refused(make_run: MakeRun, old: str, new: str, said: str) -> None:
    run = make_run()
    text = (run / "run.yaml").read_text()
    assert text.count(old) == 1
    (run / "run.yaml").write_text(text.replace(old, new))
    with pytest.raises(RequestError, match=said) as error:
        read_finished(run)
    assert error.value.problem_id == "run-changed"


def test_a_run_with_a_hash_of_version_1_is_read_without_judging_it(make_run: MakeRun) -> None:
    run = make_run()
    manifest = json.loads((run / "manifest.json").read_text()) | {"config_sha256": "0" * 64}
    (run / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(RequestError, match="changed after the run"):
        read_finished(run)
    del manifest["hash_version"]
    (run / "manifest.json").write_text(json.dumps(manifest))
    read_finished(run)


# --- damaged files


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{}", "line 61: it has no step"),
        ("5", "line 61: 5 is not an object"),
        ('{"step": 61, "loss": "x"}', "line 61: loss is 'x', not a number"),
        ('{"step": 61, "loss": NaN}', "line 61 is not JSON"),
        ('{"step": 61, "loss": 1.0, "memory_gib": 3}', "memory_gib is 3, not a list"),
        ('{"step": 61, "loss": 1e999}', "line 61: loss is inf, not a number"),
        ('{"step": 61, "grad_norm": {}}', "line 61: grad_norm is {}, not a number"),
        ('{"step": 61, "learning_rate": "x"}', "line 61: learning_rate is 'x', not a number"),
        ('{"step": 61, "memory_device_gib": ["x"]}', r"memory_device_gib is \['x'\], not a list"),
        ('{"step": 61, "not_finite": 1}', "not_finite is 1, not a list of names"),
        ('{"step": 0, "loss": 1.0}', "line 61: step is 0, before the first"),
    ],
)
def test_a_line_that_no_run_writes_is_named(make_run: MakeRun, line: str, said: str) -> None:
    run = make_run()
    with (run / "metrics.jsonl").open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(DataError, match=said):
        read_finished(run)


def test_a_loss_that_is_null_is_named_by_its_own_step(make_run: MakeRun) -> None:
    run = make_run()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 61, "loss": null}\n')
    with pytest.raises(RequestError, match="not finite at step 61"):
        assert read_finished(run).results


@pytest.mark.parametrize(
    ("content", "said"), [("", "it is empty"), ("a: [1", "while parsing"), ("[1]", "not a mapping")]
)
def test_a_configuration_that_cannot_be_read_is_named(make_run: MakeRun, content: str, said: str) -> None:
    run = make_run()
    (run / "run.yaml").write_text(content)
    with pytest.raises(DataError, match=rf"run\.yaml: .*{said}"):
        read_finished(run)


def test_half_a_manifest_is_named_by_what_it_lacks(make_run: MakeRun) -> None:
    file = make_run() / "manifest.json"
    manifest = json.loads(file.read_text())
    file.write_text(json.dumps({key: value for key, value in manifest.items() if key != "hardware"}))
    with pytest.raises(DataError, match=r"manifest\.json is no whole manifest: hardware: Field required"):
        read_finished(file.parent)
    file.write_text('{"format": 1}')
    with pytest.raises(DataError, match=r"it has no status\.state"):
        read_finished(file.parent)


def test_manifest_of_a_later_version_may_have_more_keys(make_run: MakeRun) -> None:
    run = make_run(manifest={"hardware": {"racks": 2}})
    assert read_finished(run).manifest is not None


def test_a_file_that_was_edited_by_hand_is_refused(evidence: Path) -> None:
    evidence.write_text(evidence.read_text().replace('"label": "try"', '"label": "true"'))
    with pytest.raises(DataError, match="changed after it was written"):
        read_evidence(evidence)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"format": 2},
            "reads up to 1; read it with the version that wrote it, or a later one",
        ),
        ({"format": "new"}, "it is not evidence"),
        ({"tolerances": {}}, "tolerances.loss is missing"),
        (
            {
                "results": {
                    "steps": [1],
                    "losses": [1.0, 2.0],
                    "tokens_per_second_per_gpu": None,
                    "memory_gib": None,
                    "planned_memory_gib": None,
                    "scores": {},
                }
            },
            "steps has 1 entries and results.losses 2",
        ),
        ({"extra": 1}, "extra: Extra inputs are not permitted"),
        ({"repeats": []}, "repeats: List should have at least 2 items"),
        ({"results": None}, "results: Input should be"),
    ],
    ids=["newer", "no_format", "no_tolerance", "lengths", "extra", "repeats", "results"],
)
def test_a_file_of_another_form_is_refused_with_the_place(evidence: Path, change: dict[str, Any], said: str) -> None:
    content = json.loads(evidence.read_text()) | change
    evidence.write_text(json.dumps(content | {"content_sha256": content_hash(content)}))
    with pytest.raises(DataError, match=said):
        read_evidence(evidence)


# --- the command


def run_command(*runs: Path, **options: Any) -> tuple[int, str]:
    out = StringIO()
    console = Console(file=out, width=200)
    code = verify_command([str(run) for run in runs], Path("outputs"), [], console, **options)
    return code, out.getvalue()


def test_exit_code_is_0_or_5_and_the_page_is_written(evidence: Path, make_run: MakeRun) -> None:
    good, bad = make_run(), make_run(losses=curve(1.3))
    code, said = run_command(good)
    assert (code, "agrees with cpu-1-try.json" in said) == (0, True)
    code, said = run_command(bad)
    assert (code, "DIFFERS from cpu-1-try.json" in said) == (5, True)
    page = (bad / PAGE_FILE).read_text()
    assert "differs from cpu-1-try.json" in page
    assert "recorded, cpu-1-try" in page
    assert page.count("<svg") >= 2


def test_unwritable_page_does_not_change_the_verdict(
    evidence: Path, make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(losses=curve(1.3))
    (run / PAGE_FILE).mkdir()  # as a folder that is read-only does, for any user
    code, said = run_command(run)
    assert (code, "DIFFERS from cpu-1-try.json" in said) == (5, True)
    assert f"warning: {run / PAGE_FILE} cannot be written: Is a directory" in said
    code, _ = run_command(run, as_json=True)
    printed = capsys.readouterr()
    assert (code, json.loads(printed.out)["page"]) == (5, None)
    assert "cannot be written" in printed.err


def test_as_json_it_names_file_verdict_and_numbers(
    evidence: Path, make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = run_command(make_run(score=0.1), as_json=True)
    printed = json.loads(capsys.readouterr().out)
    assert (code, printed["agrees"], printed["claim"]) == (5, False, evidence.name)
    assert {row["name"]: row["verdict"] for row in printed["rows"]}["words"] == "DIFFERENT"


@pytest.mark.parametrize(
    "options", [{"record": True}, {"label": "x"}, {"record": True, "label": "x", "against": Path("y")}]
)
def test_invalid_combinations_of_record_against_and_label(make_run: MakeRun, options: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="--label"):
        run_command(make_run(), **options)
