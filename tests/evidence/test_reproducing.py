"""What is told and refused before a run is made again; the run itself is a system test's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tunebook.errors import DataError, RequestError
from tunebook.evidence.gather import config_of
from tunebook.evidence.reproducing import find_original, require_same_config, told_differences

from .conftest import MakeRun


def test_the_words_that_were_typed_are_taken_again_but_for_where_results_go(make_run: MakeRun) -> None:
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


def test_a_manifest_alone_will_do_and_one_beside_its_run_brings_the_run(make_run: MakeRun, tmp_path: Path) -> None:
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
    require_same_config(original, config)
    config.training.micro_batch_size = 4  # another split of the same step
    require_same_config(original, config)
    config.optimizer.weight_decay = 0.5
    with pytest.raises(RequestError, match=r"optimizer.weight_decay is 0.5, recorded with 0.1.*commit aaaaaaaaaaaa"):
        require_same_config(original, config)


def test_what_is_different_here_is_told_with_what_it_was(make_run: MakeRun) -> None:
    run = make_run(gpus=2, manifest={"environment": {"python": "3.9.0"}})
    original = find_original(str(run), Path("outputs"))
    told = list(told_differences(original.manifest, config_of(run)))
    assert any("environment.python: 3." in line and line.endswith("then 3.9.0") for line in told)
    assert "  hardware.driver: none, then 580.1" in told
    assert not any("host" in line or "topology" in line for line in told)


def test_where_nothing_differs_that_is_told_too(make_run: MakeRun) -> None:
    run = make_run()
    original = find_original(str(run), Path("outputs"))
    manifest = original.manifest
    lines = list(told_differences(manifest, config_of(run)))
    same = {key: manifest[key] for key in ("code", "environment", "hardware")}
    assert lines[0].startswith("different here")  # the made-up commit and machine
    assert {line.split(":")[0].strip() for line in lines[1:]} <= {
        "code.git_commit", "code.git_diff_sha256", "code.is_clean", "hardware.cpus", "hardware.memory_gib",
    } | {f"hardware.{key}" for key in same["hardware"]}  # fmt: skip
