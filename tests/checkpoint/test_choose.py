"""Which checkpoint the launcher expects, and which verified one the ranks load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from socket import gethostname

import pytest

from tunebook.checkpoint.choose import (
    choose_checkpoint,
    expected_checkpoint,
    named_candidates,
    require_verified,
    same_command,
)
from tunebook.checkpoint.record import Identity
from tunebook.config.choices import ResumeAnyway
from tunebook.config.schema import RunConfig
from tunebook.errors import DataError, RequestError

MakeCheckpoint = Callable[..., Path]


def test_the_runs_newest_complete_one(config: RunConfig, run: Path, save: MakeCheckpoint, identity: Identity) -> None:
    assert expected_checkpoint(config, None, identity) is None
    assert expected_checkpoint(config, run, identity) is None
    save(2)
    (save(4) / "optimizer.pt").unlink()
    assert expected_checkpoint(config, run, identity) == run / "checkpoints" / "checkpoint-2"


@pytest.mark.parametrize("where", ["run", "run/checkpoints", "run/checkpoints/checkpoint-2", "link"])
def test_a_run_or_a_checkpoint_is_named(
    config: RunConfig, run: Path, save: MakeCheckpoint, identity: Identity, where: str
) -> None:
    save(2)
    (run.parent / "link").symlink_to("run")
    config.training.resume = str(run.parent / where)
    assert expected_checkpoint(config, None, identity) == run / "checkpoints" / "checkpoint-2"
    assert expected_checkpoint(config, run.parent / "new", identity) == run / "checkpoints" / "checkpoint-2"


def test_a_runs_own_come_before_the_named_ones(
    config: RunConfig, run: Path, save: MakeCheckpoint, identity: Identity, make_checkpoint: MakeCheckpoint
) -> None:
    own = make_checkpoint(run.parent / "own", 1, identity=identity)
    config.training.resume = str(save(2))
    assert expected_checkpoint(config, run.parent / "own", identity) == own


def test_another_runs_is_refused_or_allowed(
    config: RunConfig, run: Path, save: MakeCheckpoint, identity: Identity
) -> None:
    checkpoint = save(2, data_sha256="1" * 64)
    with pytest.raises(RequestError, match=r"its data have the hash 1.*resume_anyway=\[data\]"):
        expected_checkpoint(config, run, identity)
    config.training.resume_anyway = [ResumeAnyway.data]
    assert expected_checkpoint(config, run, identity) == checkpoint


@pytest.mark.parametrize("names", [("checkpoint-2",), ("checkpoint-2", "checkpoint-4")])
def test_a_named_one_that_is_damaged_says_how(
    config: RunConfig, run: Path, save: MakeCheckpoint, identity: Identity, names: tuple[str, ...]
) -> None:
    for name in names:
        (save(int(name[-1])) / "optimizer.pt").write_bytes(b"")
    config.training.resume = str(run)
    with pytest.raises(DataError, match=r"checkpoint-2 is passed over: optimizer.pt has 0 bytes .*; name another"):
        expected_checkpoint(config, None, identity)


@pytest.mark.parametrize("files", [["model.safetensors", "optimizer.pt"], ["pytorch_model.bin"], []])
def test_a_folder_without_a_record_is_refused(
    config: RunConfig, tmp_path: Path, identity: Identity, files: list[str]
) -> None:
    folder = tmp_path / "some" / "checkpoint-2"
    folder.mkdir(parents=True)
    for name in files:
        (folder / name).touch()
    config.training.resume = str(folder)
    with pytest.raises(RequestError) as raised:
        expected_checkpoint(config, None, identity)
    assert raised.value.problem_id == "checkpoint-not-usable"


def test_a_renamed_checkpoint_is_told_by_its_record(
    config: RunConfig, run: Path, save: MakeCheckpoint, identity: Identity
) -> None:
    config.training.resume = str(save(2).rename(run / "kept"))
    assert expected_checkpoint(config, None, identity) == run / "kept"
    (run / "kept").rename(run / "checkpoints" / "checkpoint-7")
    config.training.resume = str(run)
    with pytest.raises(DataError, match="its record is of step 2"):
        expected_checkpoint(config, None, identity)


def test_a_named_folder_that_this_host_does_not_see_is_no_crash(run: Path) -> None:
    """A rank in a container may see less than the launcher did."""
    gone = run.parent / "gone"
    with pytest.raises(RequestError, match=rf"training.resume={gone} .*: there is no such folder on {gethostname()}"):
        named_candidates(gone)


def test_what_goes_on_with_a_run_that_is_to_start_anew_is_not_the_same_command(config: RunConfig) -> None:
    assert same_command(config) == "the same command"
    config.training.resume = "never"
    assert same_command(config) == "the same command without training.resume=never"


def flip(checkpoint: Path) -> Path:
    """Change a byte without changing the size."""
    (checkpoint / "optimizer.pt").write_bytes(b"stAte")
    return checkpoint


def test_damaged_ones_are_passed_over_and_said(
    config: RunConfig, run: Path, save: MakeCheckpoint, identity: Identity
) -> None:
    sound = save(2)
    flip(save(4))
    (save(6) / "optimizer.pt").unlink()
    (save(8) / "complete.json").unlink()
    said: list[str] = []
    assert choose_checkpoint(config, run, identity, said.append) == sound
    folder = run / "checkpoints"
    assert [line.split(" is passed over: ")[0] for line in said] == [str(folder / f"checkpoint-{n}") for n in (8, 6, 4)]
    assert "it has no complete.json" in said[0]
    assert said[1].endswith("optimizer.pt is missing")
    assert "optimizer.pt is not what was written: its SHA-256 is " in said[2]
    assert (folder / "damaged-checkpoint-4" / "optimizer.pt").read_bytes() == b"stAte"


def test_without_a_sound_one_it_starts_at_the_beginning(
    config: RunConfig, run: Path, save: MakeCheckpoint, identity: Identity
) -> None:
    said: list[str] = []
    assert choose_checkpoint(config, run, identity, said.append) is None
    assert said == []
    flip(save(4))
    assert choose_checkpoint(config, run, identity, said.append) is None
    assert len(said) == 1


def test_a_named_run_is_gone_back_in_and_a_named_checkpoint_is_not(
    config: RunConfig, run: Path, save: MakeCheckpoint, identity: Identity, tmp_path: Path
) -> None:
    sound, damaged = save(2), flip(save(4))
    said: list[str] = []
    config.training.resume = str(run)
    assert choose_checkpoint(config, tmp_path / "new", identity, said.append) == sound
    assert len(said) == 1
    config.training.resume = str(damaged)
    with pytest.raises(DataError, match=r"holds no complete checkpoint: .*name another checkpoint"):
        choose_checkpoint(config, tmp_path / "new", identity, said.append)


def test_one_of_another_run_is_refused_and_not_gone_back_behind(
    config: RunConfig, run: Path, save: MakeCheckpoint, identity: Identity
) -> None:
    save(2)
    save(4, strategy="zero1")
    with pytest.raises(RequestError, match="checkpoint-4 cannot be resumed from: parallelism was zero1"):
        choose_checkpoint(config, run, identity, print)


def test_what_an_interrupted_save_left_is_cleared_and_not_said(
    config: RunConfig, run: Path, save: MakeCheckpoint, identity: Identity
) -> None:
    sound = save(2)
    (save(4) / "complete.json").rename(run / "checkpoints" / "checkpoint-4" / ".complete.json")
    (run / "checkpoints" / "_unfinished" / "checkpoint-6").mkdir(parents=True)
    said: list[str] = []
    assert choose_checkpoint(config, run, identity, said.append) == sound
    assert said == []
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["checkpoint-2"]


def test_the_best_is_loaded_only_if_it_is_what_was_written(save: MakeCheckpoint) -> None:
    checkpoint = save(2)
    require_verified(checkpoint)
    with pytest.raises(DataError, match=r"cannot be loaded: optimizer\.pt is not what was written"):
        require_verified(flip(checkpoint))
    (checkpoint / "optimizer.pt").unlink()
    with pytest.raises(DataError, match=r"cannot be loaded: optimizer\.pt is missing"):
        require_verified(checkpoint)
