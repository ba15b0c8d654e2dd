"""A checkpoint is complete by record and sizes, and whole by every hash; anything else is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tunebook.checkpoint.record import UnreadableRecordError, read_record
from tunebook.checkpoint.verify import (
    complete_checkpoints,
    examine,
    newest_checkpoint,
    require_unchanged_model,
    skipped_checkpoints,
    verified_record,
    wrong_hash,
)
from tunebook.errors import DataError
from tunebook.files import sha256_text

MakeCheckpoint = Callable[..., Path]
FILES = {"trainer_state.json": b"{}", "global_step4/bf16_optim.pt": b"0123456789", ".metadata": b"m", "empty": b""}


@pytest.fixture
def checkpoint(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path, 4, files=FILES)


def test_a_whole_one_has_its_record(checkpoint: Path) -> None:
    record = verified_record(checkpoint)
    assert {name: entry.size for name, entry in record.files.items()} == {n: len(c) for n, c in FILES.items()}
    assert record.num_bytes == 13
    assert record.step == 4
    assert record == read_record(checkpoint)


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[5] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda file: file.unlink(), "global_step4/bf16_optim.pt is missing"),
        (lambda file: file.write_bytes(b"01234"), "bf16_optim.pt has 5 bytes and was written with 10"),
        (lambda file: file.with_name("more.pt").touch(), "global_step4/more.pt in it is not listed in its complete"),
        (lambda file: (file.unlink(), file.symlink_to("/etc/hostname")), "bf16_optim.pt in it is a link"),
        (lambda file: (file.parent / "sub").symlink_to("/etc"), "global_step4/sub in it is a link"),
    ],
    ids=["deleted", "truncated", "added", "a link for a file", "a linked folder"],
)
def test_damage_that_names_and_sizes_show(checkpoint: Path, damage: Callable[[Path], object], problem: str) -> None:
    damage(checkpoint / "global_step4" / "bf16_optim.pt")
    assert problem in str(examine(checkpoint).problem)
    assert newest_checkpoint(checkpoint.parent.parent) is None
    with pytest.raises(DataError) as raised:
        verified_record(checkpoint)
    assert raised.value.problem_id == "checkpoint-damaged"


def test_a_flipped_bit_is_found_by_its_hash_alone(checkpoint: Path) -> None:
    flip_a_bit(checkpoint / "global_step4" / "bf16_optim.pt")
    assert examine(checkpoint).problem is None
    record = read_record(checkpoint)
    assert str(wrong_hash(checkpoint, record.files.items())).startswith("global_step4/bf16_optim.pt is not what was")
    others = [(name, entry) for name, entry in record.files.items() if not name.endswith("optim.pt")]
    assert wrong_hash(checkpoint, others) is None
    with pytest.raises(DataError):
        verified_record(checkpoint)


@pytest.mark.parametrize("content", ["", "[]", '{"format": 1}'], ids=["empty", "no object", "without keys"])
def test_a_damaged_record_is_no_record(checkpoint: Path, content: str) -> None:
    (checkpoint / "complete.json").write_text(content)
    with pytest.raises(UnreadableRecordError):
        read_record(checkpoint)
    assert examine(checkpoint).record is None


@pytest.mark.parametrize("change", [{"format": 2}, {"files": {}}], ids=["another format", "no files"])
def test_a_record_that_cannot_be_relied_on(checkpoint: Path, change: dict[str, object]) -> None:
    content = json.loads((checkpoint / "complete.json").read_text())
    (checkpoint / "complete.json").write_text(json.dumps(content | change))
    assert examine(checkpoint).record is None


def test_paths_that_lead_out_of_the_folder_are_files_that_are_missing(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").write_bytes(b"")
    content = json.loads((checkpoint / "complete.json").read_text())
    content["files"]["../../outside"] = content["files"]["empty"]
    (checkpoint / "complete.json").write_text(json.dumps(content))
    assert examine(checkpoint).problem == "../../outside is missing"


def test_without_a_record_it_is_not_there(checkpoint: Path) -> None:
    (checkpoint / "complete.json").unlink()
    assert "it has no complete.json: " in str(examine(checkpoint).problem)
    (checkpoint / ".complete.json").touch()
    assert examine(checkpoint).problem == "it was not written completely"


def test_the_newest_complete_one_and_what_is_newer(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    made = [make_checkpoint(tmp_path, step) for step in (2, 10, 9, 12)]
    (made[3] / "optimizer.pt").unlink()
    (tmp_path / "checkpoints" / "checkpoint-20").mkdir()
    (tmp_path / "checkpoints" / "checkpoint-30x").mkdir()
    assert newest_checkpoint(tmp_path) == made[1]  # by number, not by letters
    assert complete_checkpoints(tmp_path / "checkpoints") == [made[1], made[2], made[0]]
    assert [path.name for path in skipped_checkpoints(tmp_path)] == ["checkpoint-20", "checkpoint-12"]
    assert skipped_checkpoints(tmp_path)[made[3]] == "optimizer.pt is missing"


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A run whose manifest records its model."""
    (tmp_path / "model").mkdir()
    recorded = {}
    for name, text in (("model.safetensors", "weights"), ("config.json", "{}")):
        (tmp_path / "model" / name).write_text(text)
        recorded[name] = {"size": len(text), "sha256": sha256_text(text)}
    (tmp_path / "manifest.json").write_text(json.dumps({"format": 1, "model_files": recorded}))
    return tmp_path


def test_a_model_is_compared_with_what_its_run_recorded(trained: Path) -> None:
    require_unchanged_model(trained, by_hash=True)
    weights = trained / "model" / "model.safetensors"
    weights.write_text("others.")  # of the same size
    require_unchanged_model(trained)
    for content in ("others.", "cut", None):
        if content is None:
            weights.unlink()
        else:
            weights.write_text(content)
        with pytest.raises(DataError) as raised:
            require_unchanged_model(trained, by_hash=True)
        assert raised.value.problem_id == "model-changed"


def test_settings_of_a_model_may_change_and_a_run_without_a_record_is_not_compared(trained: Path) -> None:
    (trained / "model" / "config.json").write_text('{"pad_token_id": 0}')
    require_unchanged_model(trained, by_hash=True)
    (trained / "model" / "model.safetensors").write_text("cut")
    (trained / "manifest.json").unlink()
    require_unchanged_model(trained, by_hash=True)
