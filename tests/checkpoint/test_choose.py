"""The ranks load the newest checkpoint of which every byte is what was written, and say what they passed over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tunebook.checkpoint.choose import choose_checkpoint, require_verified
from tunebook.checkpoint.record import Identity
from tunebook.config.schema import RunConfig
from tunebook.errors import DataError, RequestError

MakeCheckpoint = Callable[..., Path]


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
    with pytest.raises(DataError, match=r"its checkpoint is damaged: .*name another checkpoint"):
        choose_checkpoint(config, tmp_path / "new", identity, said.append)


def test_one_of_another_run_is_refused_and_not_gone_back_behind(
    config: RunConfig, run: Path, save: MakeCheckpoint, identity: Identity
) -> None:
    save(2)
    save(4, strategy="zero1")
    with pytest.raises(RequestError, match="checkpoint-4 cannot be gone on from: it was saved by parallelism=zero1"):
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
