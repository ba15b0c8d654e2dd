"""Which folder is taken, what --checkpoint may name, the form of its weights, and the pickles and links refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tunebook.checkpoint.export.source import Form, choose_source, find_stored
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
    for named in (None, str(run / "model")):
        source = choose_source(read_run(run), named)
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
    for named in (None, str(run / "model")):
        with pytest.raises(DataError, match="is not what was written"):
            choose_source(read_run(run), named)


def test_a_step_a_name_and_a_path_mean_the_same(layouts: Any, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = layouts.write_checkpoint(run, "whole")
    layouts.write_checkpoint(run, "whole", step=5)
    monkeypatch.chdir(checkpoint.parent)
    for text in ("3", "checkpoint-3", str(checkpoint), "./checkpoint-3"):
        assert choose_source(read_run(run), text).folder == checkpoint


def test_a_run_without_anything_says_why(layouts: Any, run: Path) -> None:
    with pytest.raises(RequestError, match=r"neither a model/ folder nor a complete checkpoint, so there") as raised:
        choose_source(read_run(run), None)
    assert raised.value.problem_id == "export-no-checkpoint"
    (layouts.write_checkpoint(run, "whole") / "complete.json").unlink()
    with pytest.raises(RequestError, match=r"checkpoint-3: it has no complete\.json"):
        choose_source(read_run(run), None)


@pytest.mark.parametrize(
    ("text", "says"),
    [("4", "there is no .*checkpoint-4; its checkpoints are of the steps 3. Name a step, such as --checkpoint 3"),
     ("last", "--checkpoint last is neither a step nor a folder")],
)  # fmt: skip
def test_what_names_nothing_lists_the_steps(layouts: Any, run: Path, text: str, says: str) -> None:
    layouts.write_checkpoint(run, "whole")
    with pytest.raises(RequestError, match=says):
        choose_source(read_run(run), text)


def test_a_run_without_checkpoints_advises_none(run: Path) -> None:
    (run / "model").mkdir()
    with pytest.raises(RequestError, match=r"has no checkpoints; leave --checkpoint out for the trained model$"):
        choose_source(read_run(run), "4")


def test_another_runs_checkpoint_is_refused(layouts: Any, run: Path, base: Path) -> None:
    other = layouts.write_checkpoint(layouts.write_run(run.parent / "other", base), "whole")
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "checkpoint-3").symlink_to(other)
    for text in (str(other), str(run), "3"):
        if text == "3":
            with pytest.raises((RequestError, DataError)):
                choose_source(read_run(run), str(run / "checkpoints" / "checkpoint-3"))
            continue
        with pytest.raises(RequestError, match="is no checkpoint of"):
            choose_source(read_run(run), text)


def test_a_checkpoint_that_changed_is_refused_before_it_is_read(layouts: Any, run: Path) -> None:
    checkpoint = layouts.write_checkpoint(run, "zero2")
    (file,) = checkpoint.glob("*/zero_pp_rank_1_*")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(DataError, match="is not what was written: its SHA-256") as raised:
        choose_source(read_run(run), "3")
    assert raised.value.problem_id == "checkpoint-damaged"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "checkpoint").mkdir()
    return tmp_path / "checkpoint"


def weights(file: Path) -> None:
    save_file({"a": torch.ones(2)}, file)


@pytest.mark.parametrize(
    ("form", "expected"),
    [("whole", Form.whole), ("zero2", Form.zero), ("fsdp", Form.fsdp)],
)
def test_forms_by_what_a_strategy_leaves(layouts: Any, run: Path, form: str, expected: Form) -> None:
    assert find_stored(layouts.write_checkpoint(run, form)).form is expected


def test_an_adapter_file_without_a_tensor_gives_way_to_the_partitions(layouts: Any, lora_run: Path) -> None:
    """What transformers leaves of an adapter under ZeRO-3 that does not gather."""
    checkpoint = layouts.write_checkpoint(lora_run, "zero3_adapter")
    (checkpoint / "adapter_config.json").write_text("{}")
    save_file({}, checkpoint / "adapter_model.safetensors")
    assert find_stored(checkpoint).form is Form.zero
    weights(checkpoint / "adapter_model.safetensors")
    assert find_stored(checkpoint).form is Form.adapter


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "pytorch_model_fsdp.bin", "adapter_model.bin"])
def test_pickled_weights_are_refused_with_the_reason(folder: Path, name: str) -> None:
    (folder / name).write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(RequestError, match=f"pickled weights \\({name}\\).*can run any code.*safetensors") as raised:
        find_stored(folder)
    assert raised.value.problem_id == "export-pickled"


def test_a_folder_of_other_files_says_what_it_holds(folder: Path) -> None:
    (folder / "notes.txt").write_text("x")
    (folder / "optimizer.pt").write_bytes(b"x")  # state, and no weights
    with pytest.raises(RequestError, match=r"holds no weights .*: it holds notes\.txt, optimizer\.pt;") as raised:
        find_stored(folder)
    assert raised.value.problem_id == "export-no-weights"
    for file in folder.iterdir():
        file.unlink()
    with pytest.raises(RequestError, match="it is empty"):
        find_stored(folder)


def test_a_link_out_of_the_folder_is_refused_and_one_inside_is_not(folder: Path) -> None:
    weights(folder.parent / "other.safetensors")
    (folder / "model.safetensors").symlink_to(folder.parent / "other.safetensors")
    with pytest.raises(RequestError, match=r"model\.safetensors leads out of .*other\.safetensors") as raised:
        find_stored(folder)
    assert raised.value.problem_id == "export-link"
    (folder / "model.safetensors").unlink()
    weights(folder / "real.safetensors")
    (folder / "model.safetensors").symlink_to("real.safetensors")
    assert find_stored(folder).form is Form.whole


def test_an_index_that_leads_out_is_refused(folder: Path) -> None:
    weights(folder.parent / "other.safetensors")
    index = {"weight_map": {"a": "../other.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(RequestError, match="leads out of"):
        find_stored(folder)


@pytest.mark.parametrize("tag", ["../other", "", "..", "global_step9"])
def test_a_tag_that_names_no_folder_beside_it_is_refused(folder: Path, tag: str) -> None:
    (folder.parent / "other").mkdir()
    (folder / "latest").write_text(tag)
    with pytest.raises(RequestError, match="there is no such folder next to it"):
        find_stored(folder)
