"""Which checkpoint the launcher expects, and which verified one the ranks load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

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


@pytest.fixture
def expected(config: RunConfig, run: Path, identity: Identity) -> Callable[..., Path | None]:
    """The launcher's choice for a run folder, with `training.resume` set."""

    def choose(folder: Path | None = run, resume: Path | None = None) -> Path | None:
        config.training.resume = str(resume) if resume is not None else "auto"
        return expected_checkpoint(config, folder, identity)

    return choose


@pytest.fixture
def chosen(config: RunConfig, run: Path, identity: Identity) -> Callable[..., tuple[Path | None, list[str]]]:
    """The ranks' choice, and what they report."""

    def choose(folder: Path = run, resume: Path | None = None) -> tuple[Path | None, list[str]]:
        config.training.resume = str(resume) if resume is not None else "auto"
        reported: list[str] = []
        return choose_checkpoint(config, folder, identity, reported.append), reported

    return choose


def flip(checkpoint: Path) -> Path:
    """Change a byte without changing the size."""
    (checkpoint / "optimizer.pt").write_bytes(b"stAte")
    return checkpoint


def test_the_runs_newest_complete_one(expected: Callable[..., Path | None], save: MakeCheckpoint) -> None:
    assert expected(None) is None
    assert expected() is None
    oldest = save(2)
    (save(4) / "optimizer.pt").unlink()
    assert expected() == oldest


@pytest.mark.parametrize("place", ["run", "run/checkpoints", "run/checkpoints/checkpoint-2", "link"])
def test_a_run_or_a_checkpoint_is_named(
    expected: Callable[..., Path | None], run: Path, save: MakeCheckpoint, place: str
) -> None:
    checkpoint = save(2)
    (run.parent / "link").symlink_to("run")
    assert expected(None, run.parent / place) == checkpoint
    assert expected(run.parent / "new", run.parent / place) == checkpoint


def test_a_runs_own_come_before_the_named_ones(
    expected: Callable[..., Path | None],
    run: Path,
    save: MakeCheckpoint,
    identity: Identity,
    make_checkpoint: MakeCheckpoint,
) -> None:
    own = make_checkpoint(run.parent / "own", 1, identity=identity)
    assert expected(run.parent / "own", save(2)) == own


def test_another_runs_is_refused_or_allowed(
    expected: Callable[..., Path | None], config: RunConfig, save: MakeCheckpoint
) -> None:
    checkpoint = save(2, data_sha256="1" * 64)
    with pytest.raises(RequestError) as raised:
        expected()
    assert raised.value.problem_id == "checkpoint-differs"
    config.training.resume_anyway = [ResumeAnyway.data]
    assert expected() == checkpoint


def test_a_named_one_that_is_damaged_or_renamed_says_how(
    expected: Callable[..., Path | None], run: Path, save: MakeCheckpoint
) -> None:
    kept = save(2).rename(run / "kept")
    assert expected(None, kept) == kept
    kept.rename(run / "checkpoints" / "checkpoint-7")
    (save(4) / "optimizer.pt").write_bytes(b"")
    with pytest.raises(DataError, match=r"its record is of step 2; .*optimizer.pt has 0 bytes") as raised:
        expected(None, run)
    assert raised.value.problem_id == "checkpoint-damaged"


@pytest.mark.parametrize("files", [["model.safetensors", "optimizer.pt"], []])
def test_a_folder_without_a_record_is_refused(
    expected: Callable[..., Path | None], tmp_path: Path, files: list[str]
) -> None:
    folder = tmp_path / "some" / "checkpoint-2"
    folder.mkdir(parents=True)
    for name in files:
        (folder / name).touch()
    for place in (folder, tmp_path / "gone"):
        with pytest.raises(RequestError) as raised:
            expected(None, place)
        assert raised.value.problem_id == "checkpoint-not-usable"
        with pytest.raises(RequestError):
            named_candidates(place)


def test_the_command_that_resumes_a_run_has_no_never(config: RunConfig) -> None:
    assert same_command(config) == "the same command"
    config.training.resume = "never"
    assert same_command(config) == "the same command without training.resume=never"


def test_damaged_ones_are_passed_over_and_reported(
    chosen: Callable[..., tuple[Path | None, list[str]]], run: Path, save: MakeCheckpoint
) -> None:
    sound = save(2)
    flip(save(4))
    (save(6) / "optimizer.pt").unlink()
    (save(8) / "complete.json").unlink()
    checkpoint, reported = chosen()
    assert checkpoint == sound
    folder = run / "checkpoints"
    names = [line.split(" is passed over: ")[0] for line in reported]
    assert names == [str(folder / f"checkpoint-{step}") for step in (8, 6, 4)]
    assert (folder / "damaged-checkpoint-4" / "optimizer.pt").read_bytes() == b"stAte"


def test_without_a_sound_one_it_starts_at_the_beginning(
    chosen: Callable[..., tuple[Path | None, list[str]]], save: MakeCheckpoint
) -> None:
    assert chosen() == (None, [])
    flip(save(4))
    checkpoint, reported = chosen()
    assert (checkpoint, len(reported)) == (None, 1)


def test_an_older_one_of_a_named_run_is_taken_but_none_for_a_named_checkpoint(
    chosen: Callable[..., tuple[Path | None, list[str]]], run: Path, save: MakeCheckpoint, tmp_path: Path
) -> None:
    sound, damaged = save(2), flip(save(4))
    assert chosen(tmp_path / "new", run)[0] == sound
    assert damaged.exists()  # of another run, which stays as it is
    with pytest.raises(DataError) as raised:
        chosen(tmp_path / "new", damaged)
    assert raised.value.problem_id == "checkpoint-damaged"


def test_no_older_one_is_taken_if_the_newest_is_of_another_run(
    chosen: Callable[..., tuple[Path | None, list[str]]], save: MakeCheckpoint
) -> None:
    save(2)
    save(4, strategy="zero1")
    with pytest.raises(RequestError) as raised:
        chosen()
    assert raised.value.problem_id == "checkpoint-of-another-run"


def test_what_an_interrupted_save_left_is_cleared_and_not_reported(
    chosen: Callable[..., tuple[Path | None, list[str]]], run: Path, save: MakeCheckpoint
) -> None:
    sound = save(2)
    (save(4) / "complete.json").rename(run / "checkpoints" / "checkpoint-4" / ".complete.json")
    (run / "checkpoints" / "_unfinished" / "checkpoint-6").mkdir(parents=True)
    assert chosen() == (sound, [])
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["checkpoint-2"]


def test_the_best_is_loaded_only_if_it_is_what_was_written(save: MakeCheckpoint) -> None:
    checkpoint = save(2)
    require_verified(checkpoint)
    flip(checkpoint)
    for _ in ("another byte", "missing"):
        with pytest.raises(DataError) as raised:
            require_verified(checkpoint)
        assert raised.value.problem_id == "checkpoint-damaged"
        (checkpoint / "optimizer.pt").unlink(missing_ok=True)
