"""Which earlier run is gone on with."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tunebook.checkpoint.record import Identity
from tunebook.checkpoint.verify import newest_checkpoint
from tunebook.config.choices import Checkpointing, ResumeAnyway
from tunebook.config.frozen import config_to_yaml
from tunebook.config.identity import config_hash, result_settings
from tunebook.config.schema import RunConfig, world_size
from tunebook.errors import DataError, RequestError
from tunebook.launch.resume import check_run_folder, unfinished_run
from tunebook.record.manifest import FORMAT
from tunebook.record.run_folder import working_in, write_outcome

from ..conftest import config_of


@pytest.fixture
def config(tmp_path):
    return config_of("quickstart", f"outputs={tmp_path}")


@pytest.fixture
def make_run(make_checkpoint):
    def make(config, tmp_path, name, state, steps=(), sha256=None):
        folder = tmp_path / "quickstart" / name
        folder.mkdir(parents=True)
        manifest = {"format": FORMAT, "config_sha256": sha256 or config_hash(config)}
        manifest["status"] = {"state": state}
        (folder / "manifest.json").write_text(json.dumps(manifest))
        for step in steps:
            make_checkpoint(folder, step)
        return folder

    return make


def test_a_stopped_run_of_the_same_configuration_is_gone_on_with(config, tmp_path, make_run):
    folder = make_run(config, tmp_path, "2026-01-01T00-00-00Z", "stopped", steps=(5, 10))
    assert unfinished_run(config) == folder
    assert newest_checkpoint(folder) == folder / "checkpoints" / "checkpoint-10"


@pytest.mark.parametrize("state", ["finished", "invalid", "running"])
def test_other_endings_start_anew(config, tmp_path, state, make_run):
    make_run(config, tmp_path, "2026-01-01T00-00-00Z", state, steps=(5,))
    assert unfinished_run(config) is None


def test_another_configuration_starts_anew(config, tmp_path, make_run):
    make_run(config, tmp_path, "2026-01-01T00-00-00Z", "stopped", steps=(5,), sha256="0" * 64)
    assert unfinished_run(config) is None


def test_a_run_that_differs_only_in_what_auto_decided_is_named_with_what_to_type(config, tmp_path, make_run):
    earlier = copy.deepcopy(config)
    earlier.activation.checkpointing, earlier.packing.row_length = Checkpointing.enabled, 2048
    folder = make_run(earlier, tmp_path, "2026-01-01T00-00-00Z", "stopped", steps=(5,))
    (folder / "run.yaml").write_text(config_to_yaml(earlier))
    said = []
    assert unfinished_run(config, said.append) is None
    assert said == [
        f"not resuming {folder}, which ended early: activation.checkpointing was enabled and is "
        f"{config.activation.checkpointing.name}, packing.row_length was 2048 and is {config.packing.row_length}; "
        f"to resume it: training.resume={folder}"
    ]
    with pytest.raises(RequestError, match=r"packing\.row_length was 2048"):
        check_run_folder(config, folder)
    assert unfinished_run(earlier, said.append) == folder
    earlier.training.seed += 1  # which nobody left open
    (folder / "run.yaml").write_text(config_to_yaml(earlier))
    (folder / "manifest.json").write_text(
        json.dumps(
            {
                "format": FORMAT,
                "config_sha256": config_hash(earlier),
                "status": {"state": "stopped"},
            }
        )
    )
    said.clear()
    assert unfinished_run(config, said.append) is None and said == []


def test_a_finished_run_after_the_stopped_one_settles_it(config, tmp_path, make_run):
    make_run(config, tmp_path, "2026-01-01T00-00-00Z", "stopped", steps=(5,))
    make_run(config, tmp_path, "2026-01-02T00-00-00Z", "finished", steps=(9,))
    assert unfinished_run(config) is None


@pytest.mark.parametrize("damaged", ['{"format": 1}', '{"format": 1, "config_sha256": "x", "status": {}}', "no JSON"])
def test_a_damaged_record_of_another_run_stops_nothing(config, tmp_path, make_run, damaged):
    folder = make_run(config, tmp_path, "2026-01-01T00-00-00Z", "stopped", steps=(5,))
    newer = make_run(config, tmp_path, "2026-01-02T00-00-00Z", "stopped", steps=(9,))
    (newer / "manifest.json").write_text(damaged)
    assert unfinished_run(config) == folder
    with pytest.raises(DataError, match="manifest"):
        check_run_folder(config, newer)


def test_without_a_checkpoint_there_is_nothing_to_go_on_with(config, tmp_path, make_run):
    make_run(config, tmp_path, "2026-01-01T00-00-00Z", "stopped")
    assert unfinished_run(config) is None


def test_never_starts_anew(config, tmp_path, make_run):
    make_run(config, tmp_path, "2026-01-01T00-00-00Z", "stopped", steps=(5, 10))
    config.training.resume = "never"
    assert unfinished_run(config) is None


@pytest.fixture
def begun_elsewhere(config, tmp_path):
    """The configuration of a run that is to begin from another's checkpoint, and that folder."""
    source = tmp_path / "source"
    source.mkdir()
    own = copy.deepcopy(config)
    own.training.resume = str(source)
    return own


def freeze(folder, config):
    (folder / "run.yaml").write_text(config_to_yaml(config))


def test_a_run_that_began_from_a_named_folder_is_gone_on_with_by_the_same_words(
    config, begun_elsewhere, tmp_path, make_run
):
    folder = make_run(begun_elsewhere, tmp_path, "2026-01-01T00-00-00Z", "stopped", steps=(5, 10))
    freeze(folder, begun_elsewhere)
    assert unfinished_run(begun_elsewhere) == folder
    spelt = copy.deepcopy(begun_elsewhere)
    spelt.training.resume = f"{tmp_path}/source/../source"
    assert unfinished_run(spelt) == folder
    other = copy.deepcopy(begun_elsewhere)
    other.training.resume_anyway = [ResumeAnyway.best]  # which was there when it began
    assert unfinished_run(other) == folder
    other.training.resume_anyway = [ResumeAnyway.data]
    assert unfinished_run(other) is None
    assert unfinished_run(config) == folder  # auto: whatever it began from


def test_a_run_that_began_elsewhere_is_not_the_one_that_is_to_begin_from_a_named_folder(
    config, begun_elsewhere, tmp_path, make_run
):
    folder = make_run(config, tmp_path, "2026-01-01T00-00-00Z", "stopped", steps=(5,))
    freeze(folder, config)  # auto
    assert unfinished_run(begun_elsewhere) is None
    (tmp_path / "second").mkdir()
    second = copy.deepcopy(begun_elsewhere)
    second.training.resume = str(tmp_path / "second")
    newer = make_run(second, tmp_path, "2026-01-02T00-00-00Z", "stopped", steps=(5,))
    freeze(newer, second)
    assert unfinished_run(begun_elsewhere) is None
    assert unfinished_run(second) == newer
    finished = make_run(second, tmp_path, "2026-01-03T00-00-00Z", "finished")
    freeze(finished, second)
    assert unfinished_run(second) is None  # done: the same words begin again


def with_memory(config, gib):
    other = copy.deepcopy(config)
    other.hardware.memory_gib = gib
    return other


def test_the_memory_of_a_host_makes_no_other_run(config, tmp_path, make_run):
    earlier = with_memory(config, 11.5)
    folder = make_run(earlier, tmp_path, "2026-01-01T00-00-00Z", "stopped", steps=(5,))
    freeze(folder, earlier)
    assert unfinished_run(config) == folder
    check_run_folder(config, folder)


def test_what_a_host_with_other_memory_decides_otherwise_is_said(config, tmp_path, make_run):
    earlier = with_memory(config, 11.5)
    earlier.activation.checkpointing = Checkpointing.enabled
    folder = make_run(earlier, tmp_path, "2026-01-01T00-00-00Z", "stopped", steps=(5,))
    freeze(folder, earlier)
    said = []
    assert unfinished_run(config, said.append) is None
    assert "activation.checkpointing was enabled and is disabled; to resume it:" in said[0]


def test_a_run_with_checkpoints_of_an_older_version_only_is_not_gone_on_with_and_that_is_said(
    config, tmp_path, make_run
):
    folder = make_run(config, tmp_path, "2026-01-01T00-00-00Z", "stopped", steps=(5,))
    (folder / "checkpoints" / "checkpoint-5" / "complete.json").unlink()
    said = []
    assert unfinished_run(config, said.append) is None
    (told,) = said
    assert told.startswith(f"not resuming from {folder / 'checkpoints' / 'checkpoint-5'}: it has no complete.json")


def test_a_run_that_was_trained_and_not_evaluated_is_gone_on_with(config, tmp_path, make_run):
    folder = make_run(config, tmp_path, "2026-01-01T00-00-00Z", "stopped")
    (folder / "model").mkdir()
    assert unfinished_run(config) is None  # a model, but no rank that says it is the trained one
    write_outcome(folder, rank=0, exit_code=0, reason="finished")
    assert unfinished_run(config) == folder


def test_a_run_that_was_killed_is_gone_on_with_and_one_at_work_is_not(config, tmp_path, make_run):
    folder = make_run(config, tmp_path, "2026-01-01T00-00-00Z", "running", steps=(5,))
    with working_in(folder):
        assert unfinished_run(config) is None
    assert unfinished_run(config) == folder


def test_a_named_run_folder_may_be_new_empty_or_an_unfinished_run_of_the_same(config, tmp_path, make_run):
    check_run_folder(config, tmp_path / "new")
    (tmp_path / "empty").mkdir()
    check_run_folder(config, tmp_path / "empty")
    check_run_folder(config, make_run(config, tmp_path, "2026-01-01T00-00-00Z", "stopped", steps=(5,)))
    check_run_folder(config, make_run(config, tmp_path, "2026-01-02T00-00-00Z", "failed"))


@pytest.mark.parametrize(
    ("state", "sha256", "message"),
    [
        ("finished", None, "its run has finished"),
        ("invalid", None, "a loss that is not finite, and would again"),
        ("running", None, "a run is active in it"),
        ("stopped", "0" * 64, r"holds a run \(stopped\) of another configuration"),
    ],
)
def test_any_other_run_in_a_named_folder_is_left_alone(config, tmp_path, state, sha256, message, make_run):
    folder = make_run(config, tmp_path, "2026-01-01T00-00-00Z", state, steps=(5,), sha256=sha256)
    with pytest.raises(RequestError, match=f"{message}.*name a folder that is new or empty"):
        check_run_folder(config, folder)


def test_a_named_folder_with_other_files_or_with_resume_never_is_refused(config, tmp_path, make_run):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(RequestError, match="it holds other files and no run"):
        check_run_folder(config, tmp_path)
    with pytest.raises(RequestError, match="this is a file"):
        check_run_folder(config, tmp_path / "thesis.tex")
    folder = make_run(config, tmp_path, "2026-01-01T00-00-00Z", "stopped", steps=(5,))
    config.training.resume = "never"
    with pytest.raises(RequestError, match=r"training\.resume=never forbids"):
        check_run_folder(config, folder)


NAME = "2026-01-01T00-00-00Z"

Stop = Callable[..., Path]


def resolved(outputs: Path, *words: str) -> RunConfig:
    return config_of("quickstart", f"outputs={outputs}", "hardware=cpu", *words)


@pytest.fixture
def stop(tmp_path: Path, make_checkpoint: Callable[..., Path]) -> Stop:
    """Leave a stopped run of a configuration, with a checkpoint."""

    def make(config: RunConfig, name: str = NAME) -> Path:
        folder = tmp_path / "quickstart" / name
        folder.mkdir(parents=True)
        manifest = {"format": FORMAT, "config_sha256": config_hash(config)}
        manifest["status"] = {"state": "stopped"}
        (folder / "manifest.json").write_text(json.dumps(manifest))
        (folder / "run.yaml").write_text(config_to_yaml(config))
        identity = Identity(
            strategy=config.parallelism.strategy.name,
            peft=config.peft.method.name,
            world_size=world_size(config),
            model={"name": "m", "revision": None, "config_sha256": None, "weights": "pretrained"},
            config_sha256=config_hash(config),
            settings=result_settings(config),
            data_sha256="0" * 64,
            tokenizer_sha256=None,
            chat_template_sha256=None,
        )
        make_checkpoint(folder, 5, identity=identity)
        return folder

    return make


def test_fewer_ranks_are_named_with_what_goes_on(tmp_path: Path, stop: Stop) -> None:
    folder = stop(resolved(tmp_path, "hardware.gpus_per_node=2"))
    said: list[str] = []
    assert unfinished_run(resolved(tmp_path, "hardware.gpus_per_node=1"), said.append) is None
    assert said == [
        f"not resuming {folder}, which ended early: hardware.gpus_per_node was 2 and is 1; to resume it: "
        f"training.resume={folder}"
    ]


def test_another_strategy_on_another_machine_is_named_too(tmp_path: Path, stop: Stop) -> None:
    folder = stop(resolved(tmp_path, "hardware.gpus_per_node=2", "parallelism=ddp"))
    said: list[str] = []
    assert unfinished_run(resolved(tmp_path, "parallelism=single"), said.append) is None
    assert said == [
        f"not resuming {folder}, which ended early: hardware.gpus_per_node was 2 and is 1, parallelism.strategy "
        f"was ddp and is single; to resume it: training.resume={folder}"
    ]


def test_another_strategy_alone_is_another_run(tmp_path: Path, stop: Stop) -> None:
    stop(resolved(tmp_path, "hardware.gpus_per_node=2", "parallelism=ddp"))
    said: list[str] = []
    assert unfinished_run(resolved(tmp_path, "hardware.gpus_per_node=2", "parallelism=zero1"), said.append) is None
    assert said == []


def test_only_the_newest_is_named(tmp_path: Path, stop: Stop) -> None:
    stop(resolved(tmp_path, "hardware.gpus_per_node=2"))
    newer = stop(resolved(tmp_path, "hardware.gpus_per_node=2"), "2026-01-02T00-00-00Z")
    said: list[str] = []
    unfinished_run(resolved(tmp_path, "hardware.gpus_per_node=1"), said.append)
    assert [line.partition(",")[0] for line in said] == [f"not resuming {newer}"]


def test_a_run_of_another_seed_is_not_named(tmp_path: Path, stop: Stop) -> None:
    stop(resolved(tmp_path, "hardware.gpus_per_node=2", "training.seed=7"))
    said: list[str] = []
    assert unfinished_run(resolved(tmp_path, "hardware.gpus_per_node=1"), said.append) is None
    assert said == []
