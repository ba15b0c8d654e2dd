"""Shards of ZeRO and FSDP as whole tensors; tests/system/test_export.py reads those of real runs."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tunebook.checkpoint.export.weights import Form, form_of, read_weights
from tunebook.errors import DataError

# Sizes that leave a remainder for two and for three ranks, and a tensor that crosses ranks.
WEIGHTS = {"a": (5, 7), "b": (3,), "c": (11, 2), "d": (1,)}


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in WEIGHTS.items()}


def partitions(folder: Path) -> Path:
    return folder / "global_step3"


@pytest.mark.parametrize(("stage", "ranks"), [(1, 1), (2, 3), (3, 2)])
def test_every_tensor_is_put_together(
    layouts: Any, tmp_path: Path, weights: dict[str, torch.Tensor], stage: int, ranks: int
) -> None:
    layouts.write_zero(tmp_path, weights, stage=stage, ranks=ranks)
    found = read_weights(tmp_path, Form.zero, is_adapter=False)
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == WEIGHTS
    assert all(torch.equal(found[name], weights[name]) for name in WEIGHTS)


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
    with pytest.raises(DataError) as raised:
        read_weights(tmp_path, Form.zero, is_adapter=False)
    assert raised.value.problem_id == "checkpoint-unsafe"
    assert not (tmp_path / "ran").exists()
    torch.load(file, weights_only=False)
    assert (tmp_path / "ran").exists()  # the file was dangerous


SHARDED = {"a": torch.arange(6.0).reshape(2, 3), "model.b": torch.ones(4, dtype=torch.bfloat16)}


@pytest.fixture
def folder(layouts: Any, tmp_path: Path) -> Path:
    layouts.write_fsdp(tmp_path, SHARDED)
    return tmp_path


def test_shards_of_fsdp_are_put_together(folder: Path) -> None:
    found = read_weights(folder, Form.fsdp, is_adapter=False)
    assert {name: tensor.dtype for name, tensor in found.items()} == {"a": torch.float32, "model.b": torch.bfloat16}
    assert all(torch.equal(found[name], SHARDED[name]) for name in SHARDED)


def test_a_list_that_would_run_code_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    (folder / "pytorch_model_fsdp_0" / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(DataError) as raised:
        read_weights(folder, Form.fsdp, is_adapter=False)
    assert raised.value.problem_id == "checkpoint-unsafe"
    assert not (folder / "ran").exists()


@pytest.mark.parametrize(("form", "expected"), [("whole", Form.whole), ("zero2", Form.zero), ("fsdp", Form.fsdp)])
def test_forms_by_what_a_strategy_leaves(layouts: Any, run: Path, form: str, expected: Form) -> None:
    assert form_of(layouts.write_checkpoint(run, form)) is expected


def test_an_adapter_file_without_a_tensor_gives_way_to_the_partitions(layouts: Any, lora_run: Path) -> None:
    """What transformers leaves of an adapter under ZeRO-3 that does not gather."""
    checkpoint = layouts.write_checkpoint(lora_run, "zero3_adapter")
    (checkpoint / "adapter_config.json").write_text("{}")
    save_file({}, checkpoint / "adapter_model.safetensors")
    assert form_of(checkpoint) is Form.zero
