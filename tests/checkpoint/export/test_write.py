"""Shards: each within the limit, an index that adds up, and the same tensors when read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file

from tunebook.checkpoint.export.stored_weights import FileWeights, HeldWeights
from tunebook.checkpoint.export.write import write_weights
from tunebook.errors import RequestError
from tunebook.files import sha256_file

WEIGHTS = {"a": torch.arange(6.0), "b": torch.full((4,), 2.5), "c": torch.tensor([1, 2]), "d": torch.ones(2, 3)}


def test_shards_are_cut_at_the_limit_of_what_is_written(tmp_path: Path) -> None:
    """In bf16 a takes 12 bytes, b 8 and d 12; c, whole numbers, is not cast and takes 16."""
    hashes = write_weights(
        HeldWeights(WEIGHTS), list(WEIGHTS), tmp_path, dtype=torch.bfloat16, place="x", shard_bytes=20
    )
    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert [sorted(load_file(tmp_path / name)) for name in names] == [["a", "b"], ["c"], ["d"]]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index == {
        "metadata": {"total_size": 48},
        "weight_map": {"a": names[0], "b": names[0], "c": names[1], "d": names[2]},
    }
    assert hashes == {name: sha256_file(tmp_path / name) for name in names}
    found = FileWeights([tmp_path / name for name in names])
    read = {name: tensor.clone() for name, tensor in found.read(["d", "a", "c", "b"])}
    assert {name: tensor.dtype for name, tensor in read.items()} == dict.fromkeys("abd", torch.bfloat16) | {
        "c": torch.int64
    }
    assert all(torch.equal(read[name].double(), WEIGHTS[name].double()) for name in WEIGHTS)


@pytest.mark.parametrize("is_in_memory", [True, False])
def test_only_weights_that_do_not_stay_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_in_memory: bool
) -> None:
    """A second copy of a merged model's weights would be as large as the model, or a shard of it."""
    written: dict[str, int] = {}
    save = safetensors.torch.save_file

    def note(tensors: dict[str, torch.Tensor], *words: Any, **settings: Any) -> None:
        written.update({name: tensor.data_ptr() for name, tensor in tensors.items()})
        save(tensors, *words, **settings)

    monkeypatch.setattr(safetensors.torch, "save_file", note)
    weights = HeldWeights(WEIGHTS)
    weights.is_in_memory = is_in_memory
    write_weights(weights, list(WEIGHTS), tmp_path, dtype=None, place="x")
    same = [name for name, tensor in WEIGHTS.items() if written[name] == tensor.data_ptr()]
    assert same == (list(WEIGHTS) if is_in_memory else [])
    found = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(found[name], WEIGHTS[name]) for name in WEIGHTS)


def test_one_shard_has_no_index_and_others_may_read_it(tmp_path: Path) -> None:
    write_weights(HeldWeights(WEIGHTS), ["a"], tmp_path, stem="adapter_model", dtype=None, place="x")
    (file,) = tmp_path.iterdir()
    assert file.name == "adapter_model.safetensors"
    (tmp_path / "plain").touch()
    assert file.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_every_tensor_that_is_not_finite_is_named_wherever_it_is(tmp_path: Path) -> None:
    broken = {f"n{number}": torch.tensor([1.0, float("nan") if number % 2 else 1.0]) for number in range(14)}
    with pytest.raises(RequestError, match=r"7 not finite: n1, n3, n5, n7, n9 and 2 more;"):
        write_weights(HeldWeights(broken), list(broken), tmp_path, dtype=None, place="x", shard_bytes=8)
