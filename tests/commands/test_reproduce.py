"""Messages and refusals before a run is reproduced. The run itself is in the system tests."""

from __future__ import annotations

import json
import shlex
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import tunebook.commands.reproduce as reproducing
from tunebook.commands.record_evidence import record_evidence
from tunebook.commands.reproduce import (
    Original,
    describe_differences,
    find_original,
    reproduce_command,
    require_same_config,
    require_same_files,
    require_same_weights,
)
from tunebook.commands.typed_command import machine_of_manifest
from tunebook.config.compose import compose, parse_overrides
from tunebook.config.identity import config_hash
from tunebook.config.schema import ModelConfig
from tunebook.errors import DataError, RequestError, RulesError, StoppedError
from tunebook.evidence.gather import config_of, read_finished
from tunebook.model.weights_fingerprint import weights_fingerprint
from tunebook.plan.draft import draft_run

from ..evidence.conftest import H200, MakeRun


def test_typed_overrides_are_used_except_output_folders(make_run: MakeRun) -> None:
    run = make_run()
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["command"] = [
        *("tunebook", "train", "quickstart", "training.max_steps=4", "outputs=/x", "--run-folder", "/y"),
        *("training.resume=auto", "optimizer.learning_rate=1e-3", "tracking=none"),
    ]
    (run / "manifest.json").write_text(json.dumps(manifest))
    original = find_original(str(run), Path("outputs"))
    assert original.words == ["training.max_steps=4", "optimizer.learning_rate=1e-3"]
    assert original.run == run


def test_the_launcher_that_was_typed_is_taken_again(make_run: MakeRun) -> None:
    run = make_run("launcher=local", "launcher.timeout_s=60")
    assert find_original(str(run), Path("outputs")).words == ["launcher=local", "launcher.timeout_s=60"]


def test_manifest_is_enough_to_reproduce_a_run(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    alone = tmp_path / "sent.json"
    alone.write_bytes((run / "manifest.json").read_bytes())
    assert find_original(str(alone), Path("outputs")).run is None
    assert find_original(str(run / "manifest.json"), Path("outputs")).run == run


@pytest.mark.parametrize(
    ("content", "said"), [("{}", "it has no format"), ('{"format": 99}', "has format 99"), ("[1]", "it has no format")]
)
def test_what_is_no_manifest_or_too_new_is_refused(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "manifest.json"
    file.write_text(content)
    with pytest.raises(DataError, match=said):
        find_original(str(file), Path("outputs"))


def test_a_book_that_was_changed_since_is_named_by_its_keys(make_run: MakeRun) -> None:
    run = make_run()
    config = config_of(run)
    original = find_original(str(run), Path("outputs"))
    require_same_config(original, config, [])
    config.training.micro_batch_size = 4  # another split of the same step
    require_same_config(original, config, [])
    config.optimizer.weight_decay = 0.5
    with pytest.raises(RequestError, match=r"optimizer.weight_decay is 0.5, recorded with 0.1.*commit aaaaaaaaaaaa"):
        require_same_config(original, config, [])


def test_changes_are_printed_with_the_recorded_value(make_run: MakeRun) -> None:
    run = make_run(gpus=2, manifest={"environment": {"python": "3.9.0"}})
    original = find_original(str(run), Path("outputs"))
    told = list(describe_differences(original.manifest, config_of(run)))
    assert any("environment.python: 3." in line and line.endswith("then 3.9.0") for line in told)
    assert "  hardware.driver: none, then 580.1" in told
    assert not any("host" in line or "topology" in line for line in told)


def test_changed_package_is_printed_once(make_run: MakeRun) -> None:
    packages = {"torch": "2.11.0"}
    lock = {"name": "cpu", "sha256": "2" * 64, "differences": {"torch": {"installed": "2.11.0", "locked": "2.13.0"}},
            "reason": None}  # fmt: skip
    run = make_run(manifest={"environment": {"packages": packages, "lock": lock, "lock_sha256": None}})
    told = list(describe_differences(find_original(str(run), Path("outputs")).manifest, config_of(run)))
    assert [line for line in told if "torch" in line] == [
        f"  environment.packages.torch: {version('torch')}, then 2.11.0"
    ]
    assert not any("environment.lock." in line for line in told)


def test_no_changes_are_printed_too(make_run: MakeRun) -> None:
    run = make_run()
    original = find_original(str(run), Path("outputs"))
    manifest = original.manifest
    lines = list(describe_differences(manifest, config_of(run)))
    same = {key: manifest[key] for key in ("code", "environment", "hardware")}
    assert lines[0].startswith("different here")  # the made-up commit and machine
    assert {line.split(":")[0].strip() for line in lines[1:]} <= {
        "code.git_commit", "code.git_diff_sha256", "code.is_clean", "hardware.cpus", "hardware.memory_gib",
    } | {f"hardware.{key}" for key in same["hardware"]}  # fmt: skip


def test_changed_variable_of_a_library_is_printed(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(manifest={"environment": {"variables": {"NCCL_P2P_DISABLE": "1"}}})
    original = find_original(str(run), Path("outputs"))
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    told = list(describe_differences(original.manifest, config_of(run)))
    assert "  environment.variables.NCCL_P2P_DISABLE: none, then 1" in told
    assert "  environment.variables.NCCL_ALGO: Ring, then none" in told
    original.manifest["environment"]["variables"] = {}
    told = [line for line in describe_differences(original.manifest, config_of(run)) if "variables" in line]
    assert "  environment.variables.NCCL_ALGO: Ring, then none" in told
    assert all(line.startswith("  environment.variables.") for line in told), "no line that says {}"
    del original.manifest["environment"]["variables"]  # as in a manifest from before they were recorded
    assert not any("variables" in line for line in describe_differences(original.manifest, config_of(run)))


# --- a manifest alone


def manifest_of(run: Path, file: Path, **changes: Any) -> Path:
    """A manifest without its run, with changes."""
    file.write_text(json.dumps(json.loads((run / "manifest.json").read_text()) | changes))
    return file


def test_seed_and_hash_of_a_manifest_are_compared(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    config = config_of(run)
    same = find_original(str(manifest_of(run, tmp_path / "same.json")), Path("outputs"))
    assert require_same_config(same, config, []) == []
    seed = find_original(str(manifest_of(run, tmp_path / "seed.json", seed=3)), Path("outputs"))
    with pytest.raises(RequestError, match=r"training\.seed is 0, recorded with 3"):
        require_same_config(seed, config, [])
    other = find_original(str(manifest_of(run, tmp_path / "other.json", config_sha256="f" * 64)), Path("outputs"))
    with pytest.raises(
        RequestError, match=r"configuration's hash is .*, recorded with ffffffffffff, and is another for"
    ):
        require_same_config(other, config, [])


def test_difference_due_to_the_machine_is_a_warning(make_run: MakeRun, tmp_path: Path) -> None:
    words = ["precision=fp32", "precision.tf32=disabled"]
    run = make_run(*words, gpus=1)
    machine = machine_of_manifest(json.loads((run / "manifest.json").read_text())["hardware"])

    def sent(*words: str) -> Original:
        """A run of a machine with an H200, where `auto` decides otherwise."""
        there = draft_run("quickstart", list(words), [], machine).resolution
        assert there is not None
        assert there.config.hardware.generation.name == H200["generation"]
        command, hashed = ["tunebook", "train", "quickstart", *words], config_hash(there.config)
        file = manifest_of(run, tmp_path / "there.json", config_sha256=hashed, command=command)
        return find_original(str(file), Path("outputs"))

    (line,) = require_same_config(sent(*words), config_of(run), [])
    assert line.startswith("WARNING: this machine is another than the run's")
    assert "hardware.generation is cpu, recorded with hopper" in line
    with pytest.raises(RequestError, match=r"precision\.compute is fp32, recorded with bf16"):
        require_same_config(sent(), config_of(run), [])


def test_edited_seed_is_noticed(make_run: MakeRun) -> None:
    run = make_run()
    manifest_of(run, run / "manifest.json", seed=3)
    with pytest.raises(RequestError, match=r"the manifest has seed 3, and run\.yaml 0"):
        require_same_config(find_original(str(run), Path("outputs")), config_of(run), [])


@pytest.mark.parametrize("section", ["hardware", "command"])
def test_half_a_manifest_is_none(make_run: MakeRun, tmp_path: Path, section: str) -> None:
    file = tmp_path / "half.json"
    content = json.loads((make_run() / "manifest.json").read_text())
    file.write_text(json.dumps({key: value for key, value in content.items() if key != section}))
    with pytest.raises(DataError, match=rf"half\.json is no whole manifest: {section}: Field required"):
        find_original(str(file), Path("outputs"))


# --- the data's files


def test_a_file_that_lies_elsewhere_or_was_changed_is_named_without_preparing(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = json.loads((make_run() / "manifest.json").read_text())
    config = compose("quickstart", ["dataset.path=chats.jsonl"]).config
    record = {"location": str(tmp_path / "chats.jsonl"), "revision": None, "sha256": "0" * 64, "format": "sharegpt"}
    manifest["dataset"]["records"] = [record]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"dataset\.path.*chats\.jsonl"):
        require_same_files(manifest, config)
    (tmp_path / "chats.jsonl").write_text("{}\n")
    with pytest.raises(RequestError, match=r"chats\.jsonl, which the run read, is not here as it was"):
        require_same_files(manifest, config)
    record["sha256"] = "ca3d163bab055381827226140568f3bef7eaac187cebd76878e0b63e9e442356"  # of "{}\n"
    require_same_files(manifest, config)


# --- the model's weights


def test_other_weights_than_the_run_started_from_are_named(make_run: MakeRun, tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "pytorch_model.bin").write_bytes(b"weights")
    config = config_of(make_run())
    config.model = ModelConfig(path=str(base))
    now = weights_fingerprint(config.model)
    for then in (now, None):
        require_same_weights({"model": {"weights_fingerprint": then}}, config)
    require_same_weights({"model": {"name": "of an older run"}}, config)
    with pytest.raises(
        RequestError, match=rf"{base} have the fingerprint .*, and the run's had 111111111111"
    ) as raised:
        require_same_weights({"model": {"weights_fingerprint": "1" * 64}}, config)
    assert raised.value.problem_id == "reproduces-otherwise"
    (base / "pytorch_model.bin").unlink()
    with pytest.raises(RequestError, match="are not there"):
        require_same_weights({"model": {"weights_fingerprint": now}}, config)


# --- the command


@pytest.fixture
def untrained(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collects the jobs that would be run, and stops them."""
    jobs: list[Any] = []

    def stop(job: Any, console: Console, *, folder: Path) -> int:
        jobs.append(job)
        raise StoppedError("stopped by SIGINT after step 2; the same command goes on from there")

    monkeypatch.setattr(reproducing, "run_job", stop)
    monkeypatch.setattr(reproducing, "require_same_data", lambda *_: None)
    return jobs


def run_reproduce(target: Path, outputs: Path) -> str:
    out = StringIO()
    with pytest.raises(StoppedError):
        reproduce_command(str(target), outputs, [], Console(file=out, width=200))
    return out.getvalue()


def test_stopped_run_prints_the_command_to_resume(make_run: MakeRun, untrained: list[Any], tmp_path: Path) -> None:
    original, outputs = make_run(), tmp_path / "my [new], 'runs'"
    said = run_reproduce(original, outputs)
    (folder,) = [path for path in (outputs / "quickstart").iterdir() if not path.is_symlink()]
    assert f"to be compared with quickstart/{original.name}" in said
    train, diff = map(shlex.split, said.splitlines()[-2:])
    assert train[:3] == ["tunebook", "train", "quickstart"]
    assert train[-2:] == ["--run-folder", str(folder)]
    (outputs_word,) = train[3:-2]  # and no training.resume=never
    assert parse_overrides([outputs_word])[0].value() == str(outputs)
    assert diff == ["tunebook", "diff", str(original), str(folder)]
    assert untrained[0].config.outputs == str(outputs)


def test_failed_start_leaves_no_folder(
    make_run: MakeRun, untrained: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(job: Any, console: Console, *, folder: Path) -> int:
        raise RequestError("sbatch is not here")

    monkeypatch.setattr(reproducing, "run_job", refuse)
    original = make_run()
    recipe = original.parent
    (recipe / "latest").symlink_to(original.name)
    with pytest.raises(RequestError, match="sbatch is not here"):
        reproduce_command(str(original), recipe.parent, [], Console(file=StringIO()))
    assert sorted(path.name for path in recipe.iterdir()) == [original.name, "latest"]
    assert (recipe / "latest").resolve() == original


def test_a_job_that_is_not_waited_for_is_told_how_to_compare(
    make_run: MakeRun, untrained: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reproducing, "run_job", lambda *_, folder: 0)
    original, out = make_run("launcher=slurm"), StringIO()
    assert reproduce_command(str(original), tmp_path / "new", [], Console(file=out, width=200)) == 0
    (folder,) = [path for path in (tmp_path / "new" / "quickstart").iterdir() if not path.is_symlink()]
    assert f"to compare it when the job has ended: tunebook diff {original} {folder}" in out.getvalue()


def test_evidence_is_chosen_before_training(
    make_run: MakeRun, untrained: list[Any], tmp_path: Path, recipes_dir: Path
) -> None:
    alone = manifest_of(make_run(), tmp_path / "alone.json")
    with pytest.raises(RequestError, match="nothing is recorded for quickstart"):
        reproduce_command(str(alone), tmp_path / "new", [], Console(file=StringIO()))
    assert (untrained, (tmp_path / "new").exists()) == ([], False)
    record_evidence([read_finished(make_run()), read_finished(make_run())], "try", [])
    assert "to be compared with cpu-1-try.json" in run_reproduce(alone, tmp_path / "new")
    assert len(untrained) == 1


def dry_run(target: Path, outputs: Path) -> tuple[int, list[str]]:
    out = StringIO()
    code = reproduce_command(str(target), outputs, [], Console(file=out, width=200), dry_run=True)
    return code, out.getvalue().splitlines()


def test_a_dry_run_tells_what_it_would_run_and_with_what_it_would_compare(
    make_run: MakeRun, untrained: list[Any], tmp_path: Path
) -> None:
    original, new = make_run("training.max_steps=60"), tmp_path / "new"
    code, (*_, run, compared) = dry_run(original, new)
    words = ["training.max_steps=60", "training.resume=never", f'outputs="{new}"']
    assert (code, run) == (0, f"to be run: {shlex.join(['tunebook', 'train', 'quickstart', *words])}")
    assert compared == f"to be compared with quickstart/{original.name}"
    assert (untrained, new.exists()) == ([], False)


def test_a_dry_run_without_evidence_tells_the_same_and_that_there_is_nothing_to_verify_against(
    make_run: MakeRun, untrained: list[Any], tmp_path: Path, recipes_dir: Path
) -> None:
    unfinished = make_run(manifest={"status": {"state": "stopped", "reason": "stopped by SIGTERM"}})
    for target in (manifest_of(make_run(), tmp_path / "alone.json"), unfinished):
        code, (*_, run, warning) = dry_run(target, tmp_path / "new")
        assert (code, run.startswith("to be run: tunebook train quickstart ")) == (0, True)
        assert warning.startswith("WARNING: there is nothing to verify it against")
        assert "nothing is recorded for quickstart" in warning
    record_evidence([read_finished(make_run()), read_finished(make_run())], "try", [])
    other = make_run("training.seed=7")
    code, (*_, warning) = dry_run(manifest_of(other, tmp_path / "other.json"), tmp_path / "new")
    assert (code, "seed is 7, recorded with 0" in warning) == (0, True)


def test_evidence_that_is_damaged_ends_a_dry_run(
    make_run: MakeRun, untrained: list[Any], tmp_path: Path, recipes_dir: Path
) -> None:
    file = record_evidence([read_finished(make_run()), read_finished(make_run())], "try", [])
    file.write_text("{}")
    with pytest.raises(DataError, match="it has no format"):
        dry_run(manifest_of(make_run(), tmp_path / "alone.json"), tmp_path / "new")


@pytest.fixture
def relative_run(make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose chat template is a relative path, from a folder `work` that is not the working directory."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "my.jinja").write_text("{{ messages }}")
    monkeypatch.chdir(tmp_path / "work")
    run = make_run("model.chat_template=my.jinja")
    manifest_of(run, run / "manifest.json", command=["tunebook", "train", "quickstart", "model.chat_template=my.jinja"])
    monkeypatch.chdir(tmp_path)
    return run


def test_overrides_are_read_in_the_folder_where_they_were_typed(
    relative_run: Path, untrained: list[Any], tmp_path: Path
) -> None:
    said = run_reproduce(relative_run, Path("new"))
    assert f"relative paths start at {tmp_path / 'work'}, where the run was started" in said
    assert Path.cwd() == tmp_path, "the folder is left again"
    (train,) = [line for line in said.splitlines() if "tunebook train" in line]
    assert train.split(" && ")[0].strip() == f"cd {tmp_path / 'work'}"
    assert untrained[0].config.outputs == str(tmp_path / "new"), "where the command was typed"


def test_missing_working_folder_is_reported(relative_run: Path, untrained: list[Any], tmp_path: Path) -> None:
    (tmp_path / "work").rename(tmp_path / "moved")
    out = StringIO()
    with pytest.raises(RulesError, match=r"there is no file .*my\.jinja"):
        reproduce_command(str(relative_run), tmp_path / "new", [], Console(file=out, width=200))
    assert f"{tmp_path / 'work'}, where the run was started, is missing: relative paths start at {tmp_path}" in (
        out.getvalue().replace("\n", "")
    )
