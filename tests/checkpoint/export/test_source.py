"""Which folder is taken, what --checkpoint may name, and the damaged ones that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tunebook.checkpoint.export.run import choose_source
from tunebook.errors import DataError, RequestError
from tunebook.files import sha256_file
from tunebook.record.run_record import read_run


def flip_last_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def refusal(run: Path, checkpoint: str | None) -> str | None:
    with pytest.raises((DataError, RequestError)) as raised:
        choose_source(read_run(run), checkpoint)
    return raised.value.problem_id


def test_the_newest_complete_checkpoint_is_taken_without_a_model(layouts: Any, run: Path) -> None:
    assert refusal(run, None) == "export-no-checkpoint"
    for step in (2, 10, 9):
        layouts.write_checkpoint(run, "whole", step=step)
    newest = run / "checkpoints" / "checkpoint-10"
    assert choose_source(read_run(run), None) == (newest, 10)
    assert choose_source(read_run(run), "2") == choose_source(read_run(run), "checkpoint-2")
    (newest / "complete.json").unlink()
    assert choose_source(read_run(run), None)[1] == 9
    (file,) = (run / "checkpoints" / "checkpoint-2").glob("*.safetensors")
    flip_last_bit(file)
    assert refusal(run, "2") == "checkpoint-damaged"


@pytest.mark.parametrize(("best", "step"), [(None, 3), (2, 2)])
def test_the_model_is_of_the_step_that_was_loaded_at_the_end(
    layouts: Any, run: Path, best: int | None, step: int
) -> None:
    layouts.change_manifest(run, status={"best_step": best})
    layouts.write_checkpoint(run, "whole", step=2).rename(run / "model")
    assert choose_source(read_run(run), None) == (run / "model", step)


def test_a_model_that_was_changed_after_its_run_is_refused(layouts: Any, run: Path) -> None:
    layouts.write_checkpoint(run, "whole", step=2).rename(run / "model")
    (weights,) = (run / "model").glob("*.safetensors")
    entry = {"size": weights.stat().st_size, "sha256": sha256_file(weights)}
    layouts.change_manifest(run, model_files={weights.name: entry})
    assert choose_source(read_run(run), None)[0] == run / "model"
    flip_last_bit(weights)
    assert refusal(run, None) == "model-changed"


def test_only_checkpoints_of_the_run_may_be_named(layouts: Any, run: Path, base: Path) -> None:
    other = layouts.write_checkpoint(layouts.write_run(run.parent / "other", base), "whole")
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "checkpoint-3").symlink_to(other)
    for name in ("4", "last", str(other), "3", "checkpoint-3"):
        assert refusal(run, name) == "export-no-checkpoint"
