"""The room that a checkpoint takes, worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tunebook.checkpoint.room import estimate_bytes, require_room
from tunebook.errors import DoesNotFitError


@pytest.fixture
def model() -> torch.nn.Module:
    """Sixty numbers in fp32, ten of them frozen and in bf16."""
    layer = torch.nn.Linear(10, 5)  # 55
    layer.extra = torch.nn.Parameter(torch.zeros(5))
    layer.frozen = torch.nn.Parameter(torch.zeros(10, dtype=torch.bfloat16), requires_grad=False)
    return layer


def test_weights_and_an_adams_state(model: torch.nn.Module) -> None:
    assert estimate_bytes(model, is_deepspeed=False) == 60 * (4 + 8) + 10 * 2


def test_deepspeed_writes_the_weights_twice_and_its_own_copy(model: torch.nn.Module) -> None:
    assert estimate_bytes(model, is_deepspeed=True) == 60 * (2 * 4 + 8 + 4) + 2 * 10 * 2


def test_of_an_adapter_only_what_is_trained(model: torch.nn.Module) -> None:
    model.peft_config = {}
    assert estimate_bytes(model, is_deepspeed=False) == 60 * (4 + 8)


def test_a_rank_of_zero3_holds_a_part_only(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.ds_numel = 2 * parameter.numel()
    assert estimate_bytes(model, is_deepspeed=False) == 2 * (60 * (4 + 8) + 10 * 2)


def test_room_is_asked_of_a_real_disk(tmp_path: Path) -> None:
    require_room(tmp_path, 1, 1, last=None)
    with pytest.raises(DoesNotFitError, match=r"another/disk\. Nothing was saved before"):
        require_room(tmp_path, 1, 2**62, last=None)
    with pytest.raises(DoesNotFitError, match=r"another/disk\. The last good checkpoint is /runs/checkpoint-4"):
        require_room(tmp_path, 1, 2**62, last=Path("/runs/checkpoint-4"))
