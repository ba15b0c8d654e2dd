"""What a block keeps is on the host while other blocks run, and back for its backward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tunebook.model import offloading
from tunebook.model.blocks import compile_layers, transformer_blocks

INPUTS = {"input_ids": torch.arange(3, 12)[None], "use_cache": False}
pytestmark = [
    pytest.mark.usefixtures("own_compiler"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # the compiler reads it
    pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable.:FutureWarning"),  # older versions have no other
]


class HostCopies:
    """Copies without a GPU; `order` has what happened, with the number of tensors."""

    def __init__(self) -> None:
        self.order: list[tuple[str, int]] = []

    def to_host(self, tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], str]:
        self.order.append(("to host", len(tensors)))
        return [tensor.detach().clone() for tensor in tensors], "sent"

    def to_gpu(self, copies: list[torch.Tensor]) -> tuple[list[torch.Tensor], str]:
        self.order.append(("to GPU", len(copies)))
        return [copy.clone() for copy in copies], "fetched"

    def wait(self, event: str) -> None:
        assert event in ("sent", "fetched")


def gradients(model: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(**INPUTS).logits.logsumexp(-1).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("way", ["kept", "recomputed", "compiled"])
def test_gradients_are_the_same_from_tensors_that_were_on_the_host(small_qwen2, monkeypatch, way):
    monkeypatch.setattr(offloading, "SMALLEST_BYTES", 64)
    model = small_qwen2(num_hidden_layers=4).train()
    expected = gradients(model)
    if way == "recomputed":
        model.gradient_checkpointing_enable()
    if way == "compiled":
        compile_layers(model, backend=lambda graph, _: graph.forward)
    copies = HostCopies()
    offloading.offload_activations(transformer_blocks(model).values(), copies)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-6)
    moves = [move for move, _ in copies.order]
    assert moves == ["to host"] * 3 + ["to GPU"] * 3, "the last block's tensors stay"
    sizes = [size for _, size in copies.order]
    assert sizes[3:] == sizes[2::-1]
    if way == "recomputed":
        assert sizes[0] == 1, "the input of the block"


def test_a_pass_without_gradients_moves_nothing(small_qwen2, monkeypatch):
    monkeypatch.setattr(offloading, "SMALLEST_BYTES", 64)
    model, copies = small_qwen2(num_hidden_layers=2), HostCopies()
    offloading.offload_activations(transformer_blocks(model).values(), copies)
    with torch.no_grad():
        model(**INPUTS)
    assert copies.order == []


def test_two_passes_may_be_under_way(small_qwen2, monkeypatch):
    monkeypatch.setattr(offloading, "SMALLEST_BYTES", 64)
    model = small_qwen2(num_hidden_layers=3).train()
    expected = gradients(model)
    offloading.offload_activations(transformer_blocks(model).values(), HostCopies())
    model.zero_grad()
    losses = [model(**INPUTS).logits.logsumexp(-1).sum() for _ in range(2)]
    losses[0].backward()
    losses[1].backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, 2 * expected[name], rtol=1e-5, atol=1e-6)


def test_weights_and_what_all_blocks_get_stay(small_qwen2, monkeypatch):
    monkeypatch.setattr(offloading, "SMALLEST_BYTES", 0)
    model, sent = small_qwen2(num_hidden_layers=2).train(), []
    copies = HostCopies()
    keep = copies.to_host
    copies.to_host = lambda tensors: (
        sent.extend(each.untyped_storage().data_ptr() for each in tensors),
        keep(tensors),
    )[1]
    offloading.offload_activations(transformer_blocks(model).values(), copies)
    cos_and_sin = []
    layer = next(iter(transformer_blocks(model).values()))
    layer.register_forward_pre_hook(
        lambda _, __, kwargs: cos_and_sin.extend(kwargs["position_embeddings"]), with_kwargs=True
    )
    model(**INPUTS).logits.sum().backward()
    staying = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *cos_and_sin)}
    assert sent
    assert staying.isdisjoint(sent)
