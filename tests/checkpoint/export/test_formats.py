"""Which weights a folder holds, and what is refused before anything is read: pickles, links, nothing at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tunebook.checkpoint.export.formats import Form, find_stored
from tunebook.errors import RequestError


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
    with pytest.raises(RequestError, match="there is no such folder beside it"):
        find_stored(folder)
