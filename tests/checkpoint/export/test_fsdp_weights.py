"""FSDP's sharded checkpoints without a process group; one of two ranks is read in tests/system/test_export.py."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from tunebook.checkpoint.export.fsdp_weights import ShardedWeights
from tunebook.errors import RequestError

WEIGHTS = {"a": torch.arange(6.0).reshape(2, 3), "model.b": torch.ones(4, dtype=torch.bfloat16)}


@pytest.fixture
def folder(layouts: Any, tmp_path: Path) -> Path:
    layouts.write_fsdp(tmp_path, WEIGHTS)
    return tmp_path / "pytorch_model_fsdp_0"


def test_tensors_by_name_with_shape_and_format(folder: Path) -> None:
    found = ShardedWeights(folder)
    assert found.shapes == {"a": (2, 3), "model.b": (4,)}
    assert found.dtypes == {"a": torch.float32, "model.b": torch.bfloat16}
    read = dict(found.read(["model.b", "a"]))
    assert list(read) == ["model.b", "a"]
    assert all(torch.equal(read[name], WEIGHTS[name]) for name in WEIGHTS)


class Evil:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("ran"),))


@pytest.mark.parametrize(
    "content",
    [pickle.dumps(Evil()), b"cos\nsystem\n(S'touch ran'\ntR.", b'cbuiltins\neval\n(S\'open("ran","w")\'\ntR.', b""],
    ids=["reduce", "system", "eval", "empty"],
)
def test_a_list_that_would_run_code_does_not(folder: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.chdir(folder)
    (folder / ".metadata").write_bytes(content)
    with pytest.raises(RequestError, match=r"\.metadata .* cannot be read") as raised:
        ShardedWeights(folder)
    assert raised.value.problem_id == "weights-file-damaged"
    assert not (folder / "ran").exists()


def test_a_shard_that_was_cut_off_or_is_gone_is_named(folder: Path) -> None:
    (shard,) = folder.glob("*.distcp")
    shard.write_bytes(shard.read_bytes()[:200])
    found = ShardedWeights(folder)
    with pytest.raises(RequestError, match=r"a: .*damaged, was cut off"):
        list(found.read(["a"]))
    shard.unlink()
    with pytest.raises(RequestError, match="No such file"):
        list(found.read(["a"]))


def test_a_list_without_a_model_is_refused(layouts: Any, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dist_cp

    with pytest.warns(UserWarning, match=r"torch\.distributed is"):
        dist_cp.save({"other": torch.ones(1)}, storage_writer=dist_cp.FileSystemWriter(tmp_path), no_dist=True)
    with pytest.raises(RequestError, match="lists no tensor of a model"):
        ShardedWeights(tmp_path)
