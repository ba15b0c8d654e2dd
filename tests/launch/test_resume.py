"""Which earlier run is resumed."""

from __future__ import annotations

import copy
import json

import pytest

from tunebook.checkpoint.verify import newest_checkpoint
from tunebook.config.choices import ResumeAnyway
from tunebook.config.frozen import config_to_yaml
from tunebook.errors import DataError, RequestError
from tunebook.launch.resume import check_run_folder, unfinished_run
from tunebook.record.manifest import FORMAT
from tunebook.record.run_folder import working_in, write_outcome

FIRST, SECOND, THIRD = (f"2026-01-0{day}T00-00-00Z" for day in (1, 2, 3))


@pytest.fixture
def config(small, tmp_path):
    return small(sections={"outputs": str(tmp_path)})


@pytest.fixture
def make_run(tmp_path, make_checkpoint):
    """Leave a run of a configuration in some state, with a checkpoint or without."""

    def make(config, name=FIRST, state="stopped", steps=(5,)):
        folder = tmp_path / "small" / name
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(json.dumps({"format": FORMAT, "status": {"state": state}}))
        (folder / "run.yaml").write_text(config_to_yaml(config))
        for step in steps:
            make_checkpoint(folder, step)
        return folder

    return make


def changed(config, **settings):
    """A copy of a configuration with other settings: `training__seed=1`."""
    other = copy.deepcopy(config)
    for key, value in settings.items():
        section, _, name = key.partition("__")
        setattr(getattr(other, section), name, value)
    return other


def test_a_stopped_run_of_the_same_configuration_is_resumed(config, make_run):
    folder = make_run(config, steps=(5, 10))
    assert unfinished_run(config) == folder
    assert newest_checkpoint(folder) == folder / "checkpoints" / "checkpoint-10"
    assert unfinished_run(changed(config, training__resume="never")) is None
    assert unfinished_run(changed(config, training__seed=7)) is None


@pytest.mark.parametrize("state", ["finished", "invalid"])
def test_after_other_endings_the_same_command_starts_anew(config, state, make_run):
    make_run(config)
    make_run(config, SECOND, state)
    assert unfinished_run(config) is None


def test_a_damaged_record_of_another_run_stops_nothing(config, make_run):
    folder, newer = make_run(config), make_run(config, SECOND)
    (newer / "manifest.json").write_text("no JSON")
    assert unfinished_run(config) == folder
    with pytest.raises(DataError, match="manifest"):
        check_run_folder(config, newer)


def test_without_a_complete_checkpoint_there_is_nothing_to_resume_and_that_is_said(config, make_run):
    folder = make_run(config, steps=())
    said = []
    assert unfinished_run(config, said.append) is None and said == []
    newer = make_run(config, SECOND)
    (newer / "checkpoints" / "checkpoint-5" / "complete.json").unlink()
    assert unfinished_run(config, said.append) is None
    assert said[0].startswith(f"not resuming from {newer / 'checkpoints' / 'checkpoint-5'}: it has no complete.json")
    assert folder.exists()


def test_a_run_that_was_trained_and_not_evaluated_is_resumed(config, make_run):
    folder = make_run(config, steps=())
    (folder / "model").mkdir()
    assert unfinished_run(config) is None  # a model, but no rank that says it is the trained one
    write_outcome(folder, rank=0, exit_code=0, reason="finished")
    assert unfinished_run(config) == folder


def test_a_run_that_was_killed_is_resumed_and_one_at_work_is_not(config, make_run):
    folder = make_run(config, state="running")
    with working_in(folder):
        assert unfinished_run(config) is None
    assert unfinished_run(config) == folder


def test_a_run_that_began_from_a_named_folder_is_resumed_by_the_same_words(config, tmp_path, make_run):
    (tmp_path / "source").mkdir()
    begun = changed(config, training__resume=str(tmp_path / "source"))
    folder = make_run(begun)
    assert unfinished_run(begun) == folder
    assert unfinished_run(changed(begun, training__resume=f"{tmp_path}/source/../source")) == folder
    # `best` was there when it began
    assert unfinished_run(changed(begun, training__resume_anyway=[ResumeAnyway.best])) == folder
    assert unfinished_run(changed(begun, training__resume_anyway=[ResumeAnyway.data])) is None
    assert unfinished_run(config) == folder  # auto: whatever it began from


def test_a_run_that_began_elsewhere_does_not_begin_from_a_named_folder(config, tmp_path, make_run):
    for name in ("source", "second"):
        (tmp_path / name).mkdir()
    begun, second = (changed(config, training__resume=str(tmp_path / name)) for name in ("source", "second"))
    make_run(config)  # auto
    assert unfinished_run(begun) is None
    newer = make_run(second, SECOND)
    assert unfinished_run(begun) is None
    assert unfinished_run(second) == newer
    make_run(second, THIRD, "finished")
    assert unfinished_run(second) is None  # done: the same words begin again


def test_the_memory_found_on_a_host_makes_no_other_run(config, make_run):
    folder = make_run(changed(config, hardware__memory_gib=11.5))
    said = []
    assert unfinished_run(config, said.append) == folder and said == []
    check_run_folder(config, folder)
    make_run(changed(config, hardware__memory_gib=12.5), SECOND, "finished")
    assert unfinished_run(config) is None  # that one settles it


def test_the_newest_unfinished_run_is_named_with_what_differs(config, make_run):
    earlier = changed(config, hardware__gpus_per_node=4, training__seed=7)
    make_run(earlier)
    newer = make_run(earlier, SECOND)
    said = []
    assert unfinished_run(config, said.append) is None
    assert said == [
        f"not resuming {newer}, which ended early: hardware.gpus_per_node was 4 and is 1, training.seed was 7 and is "
        f"{config.training.seed}; to resume it: training.resume={newer}"
    ]


def test_a_run_from_an_earlier_parent_is_resumed_by_naming_that(config, make_run):
    first, second = ({"model__run": f"/parent/{name}", "model__path": f"/parent/{name}/model"} for name in "12")
    folder, said = make_run(changed(config, **first)), []
    assert unfinished_run(changed(config, **second), said.append) is None
    assert said[0].endswith(f"to resume it: model.run=/parent/1 training.resume={folder}")
    assert unfinished_run(changed(config, **first)) == folder


def test_a_named_run_folder_may_be_new_empty_or_an_unfinished_run_of_the_same(config, tmp_path, make_run):
    check_run_folder(config, tmp_path / "new")
    (tmp_path / "empty").mkdir()
    check_run_folder(config, tmp_path / "empty")
    check_run_folder(config, make_run(config))
    check_run_folder(config, make_run(config, SECOND, "failed", steps=()))


@pytest.mark.parametrize(
    ("state", "settings", "message"),
    [
        ("finished", {}, "its run is finished"),
        ("invalid", {}, "its run is invalid"),
        ("stopped", {"training__seed": 7}, r"holds a run \(stopped\) of another configuration"),
        ("stopped", {"training__resume": "never"}, r"training\.resume=never forbids"),
    ],
)
def test_any_other_run_in_a_named_folder_is_left_alone(config, state, settings, message, make_run):
    folder = make_run(config, state=state)
    with pytest.raises(RequestError, match=message) as caught:
        check_run_folder(changed(config, **settings), folder)
    assert caught.value.problem_id == "run-folder-taken"


def test_a_named_folder_with_other_files_is_refused(config, tmp_path):
    (tmp_path / "thesis.tex").touch()
    for place in (tmp_path, tmp_path / "thesis.tex"):
        with pytest.raises(RequestError) as caught:
            check_run_folder(config, place)
        assert caught.value.problem_id == "run-folder-taken"
