"""Shards of ZeRO and FSDP as whole tensors; tests/system/test_export.py reads those of real runs."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from tunebook.checkpoint.export.stored_weights import Mapped, shapes_of, sharded_weights
from tunebook.checkpoint.export.zero_weights import partitioned_weights
from tunebook.errors import RequestError

# Sizes that leave a remainder for two and for three ranks, and a tensor that crosses subgroups and ranks.
WEIGHTS = {"a": (5, 7), "b": (3,), "c": (11, 2), "d": (1,)}


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in WEIGHTS.items()}


def partitions(folder: Path) -> Path:
    return folder / "global_step3"


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_tensor_is_put_together(
    layouts: Any, tmp_path: Path, weights: dict[str, torch.Tensor], stage: int, ranks: int
) -> None:
    layouts.write_zero(tmp_path, weights, stage=stage, ranks=ranks)
    found = partitioned_weights(partitions(tmp_path))
    assert shapes_of(found) == WEIGHTS
    assert all(torch.equal(found[name].load(), weights[name]) for name in ("c", "a", "d", "b"))


class ByName:
    """A member of an enum as Python 3.11.2 pickles it, which Debian 12 has and so the images."""

    def __init__(self, member: Any) -> None:
        self.member = member

    def __reduce__(self) -> Any:
        return getattr, (type(self.member), self.member.name)


@pytest.mark.parametrize("written", [lambda member: member, ByName])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_stage_is_deepspeeds_enum(
    layouts: Any, tmp_path: Path, weights: dict[str, torch.Tensor], stage: int, written: Any
) -> None:
    from deepspeed.runtime.zero.config import ZeroStageEnum

    layouts.write_zero(tmp_path, weights, stage=stage)
    for file in partitions(tmp_path).glob("*_optim_states.pt"):
        content = torch.load(file)
        content["optimizer_state_dict"]["zero_stage"] = written(ZeroStageEnum(stage))
        torch.save(content, file)
    found = partitioned_weights(partitions(tmp_path))
    assert all(torch.equal(found[name].load(), weights[name]) for name in WEIGHTS)


def test_paddings_between_parameters_are_left_out(tmp_path: Path) -> None:
    """As DeepSpeed aligns parameters for some optimizers: 2 numbers after the first, 3 after the second."""
    folder = tmp_path / "global_step3"
    folder.mkdir()
    flat = torch.tensor([1.0, 2, 0, 0, 3, 0, 0, 0])
    for rank in range(2):
        state = {
            "zero_stage": 2, "partition_count": 2, "single_partition_of_fp32_groups": [flat.chunk(2)[rank].clone()],
            "param_alignment_paddings": [[2, 3]],
        }  # fmt: skip
        torch.save({"optimizer_state_dict": state}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    model = {"param_shapes": [{"a": torch.Size([2]), "b": torch.Size([1])}], "shared_params": {"tied": "a"}}
    torch.save(model, folder / "mp_rank_00_model_states.pt")
    found = partitioned_weights(folder)
    assert {name: tensor.load().tolist() for name, tensor in found.items()} == {
        "a": [1.0, 2.0], "b": [3.0], "tied": [1.0, 2.0],
    }  # fmt: skip


@pytest.mark.parametrize("stage", [2, 3])
def test_partitions_that_are_too_short_are_refused(
    layouts: Any, tmp_path: Path, weights: dict[str, torch.Tensor], stage: int
) -> None:
    layouts.write_zero(tmp_path, weights, stage=stage)
    file = partitions(tmp_path) / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    content = torch.load(file)
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    content["optimizer_state_dict"][key][0] = torch.zeros(1)
    torch.save(content, file)
    with pytest.raises(RequestError, match=r"holds [\d,]+ numbers of (the )?parameters"):
        partitioned_weights(partitions(tmp_path))


def test_a_rank_whose_file_is_gone_is_counted(layouts: Any, tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    layouts.write_zero(tmp_path, weights, stage=3)
    (partitions(tmp_path) / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(RequestError, match="2 ranks wrote it and the files of 1 are there"):
        partitioned_weights(partitions(tmp_path))


class Evil:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("ran"),))


def test_a_pickle_that_would_run_code_does_not(
    layouts: Any, tmp_path: Path, weights: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    layouts.write_zero(tmp_path, weights, stage=3)
    file = partitions(tmp_path) / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    torch.save({"optimizer_state_dict": Evil()}, file)
    with pytest.raises(RequestError, match=r"optim_states\.pt .* cannot be read") as raised:
        partitioned_weights(partitions(tmp_path))
    assert raised.value.problem_id == "weights-file-damaged"
    assert not (tmp_path / "ran").exists()
    torch.load(file, weights_only=False)
    assert (tmp_path / "ran").exists()  # the file was dangerous


def test_a_file_that_was_cut_off_is_named(layouts: Any, tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    layouts.write_zero(tmp_path, weights, stage=2)
    file = partitions(tmp_path) / "mp_rank_00_model_states.pt"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(RequestError, match=r"mp_rank_00_model_states\.pt \([\d,]+ bytes\) cannot be read"):
        partitioned_weights(partitions(tmp_path))


SHARDED = {"a": torch.arange(6.0).reshape(2, 3), "model.b": torch.ones(4, dtype=torch.bfloat16)}


@pytest.fixture
def folder(layouts: Any, tmp_path: Path) -> Path:
    layouts.write_fsdp(tmp_path, SHARDED)
    return tmp_path / "pytorch_model_fsdp_0"


def test_tensors_by_name_with_shape_and_format(folder: Path) -> None:
    found = sharded_weights(folder)
    assert shapes_of(found) == {"a": (2, 3), "model.b": (4,)}
    assert {name: tensor.dtype for name, tensor in found.items()} == {"a": torch.float32, "model.b": torch.bfloat16}
    assert all(torch.equal(found[name].load(), SHARDED[name]) for name in ("model.b", "a"))


@pytest.mark.parametrize(
    "content",
    [pickle.dumps(Evil()), b"cos\nsystem\n(S'touch ran'\ntR.", b'cbuiltins\neval\n(S\'open("ran","w")\'\ntR.', b""],
    ids=["reduce", "system", "eval", "empty"],
)
def test_a_list_that_would_run_code_does_not(folder: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.chdir(folder)
    (folder / ".metadata").write_bytes(content)
    with pytest.raises(RequestError, match=r"\.metadata .* cannot be read") as raised:
        sharded_weights(folder)
    assert raised.value.problem_id == "weights-file-damaged"
    assert not (folder / "ran").exists()


def test_a_shard_that_was_cut_off_or_is_gone_is_named(folder: Path) -> None:
    (shard,) = folder.glob("*.distcp")
    shard.write_bytes(shard.read_bytes()[:200])
    found = sharded_weights(folder)
    with pytest.raises(RequestError, match=r"a: .*damaged, was cut off"):
        found["a"].load()
    shard.unlink()
    with pytest.raises(RequestError, match="No such file"):
        found["a"].load()


def test_a_list_without_a_model_is_refused(layouts: Any, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dist_cp

    with pytest.warns(UserWarning, match=r"torch\.distributed is"):
        dist_cp.save({"other": torch.ones(1)}, storage_writer=dist_cp.FileSystemWriter(tmp_path), no_dist=True)
    with pytest.raises(RequestError, match="lists no tensor of a model"):
        sharded_weights(tmp_path)


def test_mapped_files_are_opened_again_after_a_bounded_number_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read of a mapped file counts as memory until the file is closed."""
    monkeypatch.setattr("tunebook.checkpoint.export.stored_weights._MAPPED_BYTES", 10)
    opened: list[int] = []
    mapped = Mapped(lambda: opened.append(len(opened)) or len(opened))
    assert [mapped.for_reading(6) for _ in range(5)] == [1, 1, 2, 2, 3]
    mapped.close()
    assert mapped.for_reading(6) == 4
