from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tunebook.errors import DoesNotFitError
from tunebook.evaluate import on_gpu
from tunebook.evaluate.on_gpu import choose_copies, load_on_gpu, refuse_offloading

GIB = 2**30


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of 80 GiB that is not there; 1 GiB is free, 9 GiB are ours."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 9 * GIB)


class Moved(torch.nn.Linear):
    """Weights on the CPU, which say where they are to be moved."""

    def to(self, device: torch.device) -> Any:  # type: ignore[override]
        return f"moved to {device}"


@pytest.mark.usefixtures("card")
def test_a_model_is_read_onto_the_gpu_or_moved_there() -> None:
    asked: list[torch.device] = []

    def load(device: torch.device) -> Any:
        asked.append(device)
        return Moved(1, 1)

    assert load_on_gpu(load) == "moved to cuda:0"
    assert asked == [torch.device("cuda", 0)]
    there = SimpleNamespace(parameters=lambda: [SimpleNamespace(device=torch.device("cuda", 0))])
    assert load_on_gpu(lambda device: there) is there


@pytest.mark.usefixtures("card")
def test_a_model_that_does_not_fit_into_what_is_left_is_refused_in_words() -> None:
    def fail(error: Exception) -> Any:
        def load(device: torch.device) -> Any:
            raise error

        return load_on_gpu(load)

    with pytest.raises(
        DoesNotFitError, match=r"into a GPU of 80\.0 GiB, 70\.0 GiB of which are not to be had"
    ) as caught:
        fail(torch.OutOfMemoryError("CUDA out of memory."))
    assert caught.value.problem_id == "model-does-not-fit"
    with pytest.raises(RuntimeError, match="no kernel image"):
        fail(RuntimeError("CUDA error: no kernel image is available"))


def test_a_part_that_stays_on_the_host_is_refused() -> None:
    refuse_offloading(SimpleNamespace(hf_device_map={"": 0, "lm_head": 1}))
    refuse_offloading(SimpleNamespace())
    for place in ("cpu", "disk"):
        with pytest.raises(DoesNotFitError, match="too little free memory for the model"):
            refuse_offloading(SimpleNamespace(hf_device_map={"embed": 0, "lm_head": place}))


def two_formats() -> torch.nn.Module:
    """1,000 numbers in fp32, as of a merged adapter's base, and 10 in bf16."""
    wide = torch.nn.Parameter(torch.zeros(1000), requires_grad=False)
    narrow = torch.nn.Parameter(torch.zeros(10, dtype=torch.bfloat16), requires_grad=False)
    return torch.nn.ParameterList([wide, narrow])


@pytest.mark.parametrize(("free_bytes", "is_kept"), [(4000, True), (3999, False)])
def test_converted_weights_are_kept_where_they_take_half_of_what_is_free(
    free_bytes: int, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_gpu, "_free_bytes", lambda device: float(free_bytes))
    model = two_formats()  # 1,000 x 2 bytes
    said = choose_copies(model, torch.bfloat16)
    assert [parameter.requires_grad for parameter in model.parameters()] == [is_kept, False]
    assert (said is None) == is_kept
    if said is not None:
        assert said.startswith("0.0 GiB for its weights in bfloat16 are not to be had beside it")


def test_weights_are_left_alone_where_nothing_is_converted() -> None:
    model = two_formats()
    assert choose_copies(model, None) is None
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_logits_are_the_same_whether_converted_weights_are_kept_or_not(
    monkeypatch: pytest.MonkeyPatch,
    small_qwen2: Callable[..., PreTrainedModel],
    relative_difference: Callable[[torch.Tensor, torch.Tensor], float],
) -> None:
    model = small_qwen2(vocab_size=64, num_key_value_heads=2)
    found = []
    for free_bytes in (1e12, 0.0):
        monkeypatch.setattr(on_gpu, "_free_bytes", lambda device, free=free_bytes: free)
        choose_copies(model, torch.bfloat16)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            found.append(model(torch.arange(12)[None]).logits)
    assert found[0].dtype is torch.bfloat16
    assert relative_difference(*found) < torch.finfo(torch.bfloat16).eps / 2  # of one number; two passes differ less
