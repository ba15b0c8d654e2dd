"""A frozen base in fp8 under adapters: its products, its gradients, and what a training gets from it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tunebook.errors import RequestError
from tunebook.model.fp8_base import Fp8Linear, convert_base_to_fp8, in_fp8

from .test_adapted_products import adapted, losses

FP8_ROUNDING = 2**-4  # e4m3 has 3 bits of mantissa


def test_a_row_is_scaled_to_the_largest_number_of_fp8() -> None:
    values, scale = in_fp8(torch.tensor([[1.0, -224.0, 896.0], [0.0, 0.0, 0.0]]))
    assert values.float().tolist() == [[0.5, -112.0, 448.0], [0.0, 0.0, 0.0]]
    assert scale[0].item() == 2.0


def test_products_and_gradients_are_those_of_the_layer_within_the_rounding_of_fp8() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(64, 48)
    hidden = torch.randn(5, 64, requires_grad=True)
    expected = layer(hidden)
    (gradient,) = torch.autograd.grad(expected.square().sum(), hidden)
    result = Fp8Linear(layer)(hidden)
    (computed,) = torch.autograd.grad(result.float().square().sum(), hidden)
    assert (result - expected).norm() < FP8_ROUNDING * expected.norm()
    assert (computed - gradient).norm() < 2 * FP8_ROUNDING * gradient.norm()


def test_a_token_does_not_change_the_products_of_others() -> None:
    layer = Fp8Linear(nn.Linear(32, 16))
    tokens = torch.randn(4, 32)
    changed = torch.cat([tokens[:3], tokens[3:] * 1000])
    assert torch.equal(layer(tokens)[:3], layer(changed)[:3])


def test_training_is_close_to_bf16_and_adapters_keep_their_names() -> None:
    def trained(*, is_fp8: bool) -> tuple[list[float], Any]:
        model = adapted(dtype=torch.bfloat16)
        if is_fp8:
            assert len(convert_base_to_fp8(model)) == 28  # 7 layers in each of 4 blocks
        return losses(model, steps=8, is_autocast=True), model

    expected, plain = trained(is_fp8=False)
    values, model = trained(is_fp8=True)
    assert values == pytest.approx(expected, rel=0.01)
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert names == {name for name, parameter in plain.named_parameters() if parameter.requires_grad}
    assert not [name for name in model.state_dict() if "turned" in name]


def test_a_model_with_odd_sizes_is_refused() -> None:
    model = adapted(target_modules=["q_proj"])
    for module in model.modules():
        if isinstance(getattr(module, "base_layer", None), nn.Linear):
            module.base_layer = nn.Linear(17, 33)
    with pytest.raises(RequestError) as refused:
        convert_base_to_fp8(model)
    assert refused.value.problem_id == "fp8-nothing-to-convert"
