"""What a model's folder holds, by its headers: found as transformers finds it, and never trusted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tunebook.errors import RequestError
from tunebook.model.weight_files import find_weight_files, read_shapes

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Two files with an index: a (2, 3) and b (4,) in the first, c (5, 1) in the second."""
    save_file({"a": torch.zeros(2, 3), "b": torch.zeros(4)}, tmp_path / FIRST)
    save_file({"c": torch.zeros(5, 1)}, tmp_path / SECOND)
    index = {"metadata": {}, "weight_map": {"a": FIRST, "b": FIRST, "c": SECOND}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def test_names_and_shapes_of_all_files(sharded: Path) -> None:
    files = find_weight_files(sharded)
    assert [file.name for file in files] == [FIRST, SECOND]
    assert read_shapes(files) == {"a": (2, 3), "b": (4,), "c": (5, 1)}


def test_pickles_are_read_without_their_weights(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(2, 3)}, tmp_path / "pytorch_model.bin")
    assert read_shapes(find_weight_files(tmp_path)) == {"a": (2, 3)}


def test_files_are_looked_for_in_the_order_of_transformers(sharded: Path) -> None:
    torch.save({}, sharded / "pytorch_model.bin")
    assert [file.name for file in find_weight_files(sharded)] == [FIRST, SECOND]
    save_file({}, sharded / "model.safetensors")
    assert [file.name for file in find_weight_files(sharded)] == ["model.safetensors"]
    save_file({}, sharded / "consolidated.safetensors")  # another library's name: transformers does not read it
    assert [file.name for file in find_weight_files(sharded)] == ["model.safetensors"]


def test_a_folder_without_weights_has_none(tmp_path: Path) -> None:
    assert find_weight_files(tmp_path) == []


def test_a_file_that_only_the_index_knows_is_missing(sharded: Path) -> None:
    (sharded / FIRST).unlink()
    expected = rf"names 2 files and 1 of them is not there: \S*{FIRST} should hold 2 weights.*random.*copy the missing"
    with pytest.raises(RequestError, match=expected) as raised:
        find_weight_files(sharded)
    assert (raised.value.exit_code, raised.value.problem_id) == (2, "weights-file-missing")


@pytest.mark.parametrize("text", ["{", "[]", '{"metadata": {}}', '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}'])
def test_an_index_that_is_none(sharded: Path, text: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(text)
    with pytest.raises(RequestError, match=r"index\.json \(\d+ bytes\) cannot be read") as raised:
        find_weight_files(sharded)
    assert raised.value.problem_id == "weights-file-damaged"


@pytest.mark.parametrize("kept", [0, 7, 40, -1], ids=["empty", "in the length", "in the header", "one byte short"])
def test_a_file_that_was_cut_off(sharded: Path, kept: int) -> None:
    whole = (sharded / SECOND).read_bytes()
    (sharded / SECOND).write_bytes(whole[:kept])
    expected = rf"{SECOND} \({len(whole[:kept])} bytes\) cannot be read: .+; it is damaged or was cut off"
    with pytest.raises(RequestError, match=expected) as raised:
        read_shapes(find_weight_files(sharded))
    assert (raised.value.exit_code, raised.value.problem_id) == (2, "weights-file-damaged")


def test_a_pointer_of_git_lfs_is_no_file_with_weights(sharded: Path) -> None:
    (sharded / SECOND).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n")
    with pytest.raises(RequestError, match="cannot be read"):
        read_shapes(find_weight_files(sharded))


def test_a_pickle_that_was_cut_off(tmp_path: Path) -> None:
    file = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.zeros(2, 3)}, file)
    file.write_bytes(file.read_bytes()[:-30])
    with pytest.raises(RequestError, match=r"pytorch_model\.bin .*cut off"):
        read_shapes([file])
