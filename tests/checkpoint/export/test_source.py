"""Which folder is taken, what --checkpoint may name, and the damaged ones that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tunebook.checkpoint.export.source import choose_source
from tunebook.errors import DataError, RequestError
from tunebook.files import sha256_file
from tunebook.record.run_record import read_run


def test_the_newest_complete_checkpoint_is_taken_where_there_is_no_model(layouts: Any, run: Path) -> None:
    for step in (2, 10, 9):
        layouts.write_checkpoint(run, "whole", step=step)
    source = choose_source(read_run(run), None)
    assert (source.folder.name, source.step) == ("checkpoint-10", 10)
    assert source.record is not None and source.record.identity.config_sha256 == layouts.CONFIG_SHA256
    (run / "checkpoints" / "checkpoint-10" / "complete.json").unlink()
    assert choose_source(read_run(run), None).step == 9


@pytest.mark.parametrize(
    ("loads_best", "status", "step"),
    [(False, {}, 3), (True, {"best_step": None}, 3), (True, {"best_step": 2}, 2)],
    ids=["last", "none_better", "best"],
)
def test_the_model_is_of_the_step_that_was_loaded_at_the_end(
    layouts: Any, run: Path, loads_best: bool, status: dict[str, Any], step: int
) -> None:
    file = run / "run.yaml"
    file.write_text(file.read_text().replace("load_best_at_end: false", f"load_best_at_end: {loads_best}".lower()))
    layouts.change_manifest(run, status=status)
    layouts.write_checkpoint(run, "whole", step=2).rename(run / "model")
    source = choose_source(read_run(run), None)
    assert (source.name_in(run), source.step) == ("model", step)


def test_a_model_with_other_weights_than_its_run_wrote_is_not_exported(layouts: Any, run: Path) -> None:
    layouts.write_checkpoint(run, "whole", step=2).rename(run / "model")
    (weights,) = (run / "model").glob("*.safetensors")
    entry = {"size": weights.stat().st_size, "sha256": sha256_file(weights)}
    layouts.change_manifest(run, model_files={weights.name: entry})
    assert choose_source(read_run(run), None).name_in(run) == "model"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(DataError) as raised:
        choose_source(read_run(run), None)
    assert raised.value.problem_id == "model-changed"


def test_a_step_and_a_name_mean_the_same(layouts: Any, run: Path) -> None:
    checkpoint = layouts.write_checkpoint(run, "whole")
    layouts.write_checkpoint(run, "whole", step=5)
    for text in ("3", "checkpoint-3"):
        assert choose_source(read_run(run), text).folder == checkpoint


def test_a_run_without_anything_is_refused(layouts: Any, run: Path) -> None:
    with pytest.raises(RequestError) as raised:
        choose_source(read_run(run), None)
    assert raised.value.problem_id == "export-no-checkpoint"
    (layouts.write_checkpoint(run, "whole") / "complete.json").unlink()
    with pytest.raises(RequestError, match=r"checkpoint-3: it has no complete\.json"):
        choose_source(read_run(run), None)


@pytest.mark.parametrize("text", ["4", "last"])
def test_what_names_nothing_lists_the_steps(layouts: Any, run: Path, text: str) -> None:
    layouts.write_checkpoint(run, "whole")
    with pytest.raises(RequestError, match="its checkpoints: 3") as raised:
        choose_source(read_run(run), text)
    assert raised.value.problem_id == "export-no-checkpoint"


def test_another_runs_checkpoint_is_refused(layouts: Any, run: Path, base: Path) -> None:
    other = layouts.write_checkpoint(layouts.write_run(run.parent / "other", base), "whole")
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "checkpoint-3").symlink_to(other)
    for text in (str(other), "3", "checkpoint-3"):
        with pytest.raises(RequestError) as raised:
            choose_source(read_run(run), text)
        assert raised.value.problem_id == "export-no-checkpoint"


def test_a_checkpoint_that_changed_is_refused_before_it_is_read(layouts: Any, run: Path) -> None:
    checkpoint = layouts.write_checkpoint(run, "zero2")
    (file,) = checkpoint.glob("*/zero_pp_rank_1_*")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(DataError) as raised:
        choose_source(read_run(run), "3")
    assert raised.value.problem_id == "checkpoint-damaged"
