"""Which layers multiply in fp8, and that they keep their weights; the products are emulated on the CPU."""

from __future__ import annotations

import pytest
import torch

from tunebook.config.choices import Fp8Scaling
from tunebook.model.blocks import compile_layers
from tunebook.model.fp8 import (
    convert_to_fp8,
    count_fp8_layers,
    layers_for_fp8,
    pays,
    plain_products,
)

# Of two passes in fp32, whose sums may be in another order.
ROUNDING = 32 * torch.finfo(torch.float32).eps
INPUTS = {"input_ids": torch.arange(3, 19)[None], "position_ids": torch.arange(16)[None]}
CONVERTED = [f"model.layers.{layer}.mlp.{name}_proj" for layer in range(2) for name in ("gate", "up")]


@pytest.fixture
def model(small_qwen2):
    """Make a model in which only the feed-forward network is large enough for fp8."""
    return lambda **sizes: small_qwen2(**({"vocab_size": 2064, "intermediate_size": 2048} | sizes))


def logits(of):
    return of(**INPUTS, use_cache=False).logits


@pytest.mark.parametrize(
    ("scaling", "in_features", "out_features", "expected"),
    [
        (Fp8Scaling.tensorwise, 4864, 896, True),  # down_proj of Qwen2.5-0.5B
        (Fp8Scaling.tensorwise, 896, 896, False),
        (Fp8Scaling.rowwise, 2048, 11008, True),
        (Fp8Scaling.rowwise, 11008, 2048, False),
    ],
)
def test_small_layers_would_lose_more_than_they_gain(scaling, in_features, out_features, expected):
    assert pays(scaling, in_features, out_features) is expected


def test_only_large_layers_of_the_blocks_are_chosen(model):
    """The head is 16 x 2,064, which is large enough, but it is never converted."""
    assert layers_for_fp8(model(), Fp8Scaling.tensorwise) == CONVERTED
    assert layers_for_fp8(model(intermediate_size=2056), Fp8Scaling.tensorwise) == []  # which no kernel takes


def test_without_torchao_no_layer_is_in_fp8():
    assert count_fp8_layers(torch.nn.Linear(16, 16)) == 0


class TestConverted:
    """The tests that need torchao, which only the images of GPUs with fp8 have."""

    @pytest.fixture(autouse=True)
    def _needs_torchao(self):
        pytest.importorskip("torchao", reason="torchao is in the images of GPUs with fp8 only")

    @pytest.mark.parametrize("scaling", Fp8Scaling)
    def test_layers_keep_the_parameters_they_had(self, model, scaling):
        sizes = {"hidden_size": 2064} if scaling is Fp8Scaling.rowwise else {}
        converted = model(**sizes, intermediate_size=4112, num_hidden_layers=1)
        before = dict(converted.named_parameters())
        names = convert_to_fp8(converted, scaling, emulate=True)
        layers = {name for name, layer in converted.named_modules() if type(layer).__name__ == "Float8Linear"}
        assert layers == set(names) != set()
        assert count_fp8_layers(converted) == len(names)
        assert all(before[name] is parameter for name, parameter in converted.named_parameters())
        assert list(before) == [name for name, _ in converted.named_parameters()]
        assert type(converted.lm_head) is torch.nn.Linear

    def test_products_and_gradients_are_rounded_to_fp8_and_no_further(self, model, relative_difference):
        converted, plain = model(), model()
        convert_to_fp8(converted, Fp8Scaling.tensorwise, emulate=True)
        results = [logits(converted), logits(plain)]
        # The rounding of one e4m3 number, in two of the layers on the way.
        assert 1e-3 < relative_difference(*results) < 2**-4
        for result in results:
            result.logsumexp(-1).sum().backward()
        expected = dict(plain.named_parameters())
        for name, parameter in converted.named_parameters():
            other = expected[name].grad
            assert parameter.grad.dtype == torch.float32
            assert float((parameter.grad - other).norm()) < 0.2 * float(other.norm()), name

    @pytest.mark.usefixtures("own_compiler")
    @pytest.mark.parametrize("is_compiled", [False, True], ids=["plain", "compiled"])
    def test_plain_products_are_those_of_the_model_that_was_converted(self, model, relative_difference, is_compiled):
        converted, plain = model(), logits(model())
        convert_to_fp8(converted, Fp8Scaling.tensorwise, emulate=True)
        in_fp8 = logits(converted)
        if is_compiled:
            compile_layers(converted, backend="eager")
        with torch.no_grad():
            for _ in range(2):  # what was compiled inside is not used outside, nor the other way round
                with plain_products(converted):
                    assert relative_difference(logits(converted), plain) < ROUNDING
                    assert count_fp8_layers(converted) == 0
                # Where a sum's last bit decides how a number is rounded to fp8; without fp8 it is more.
                assert relative_difference(logits(converted), in_fp8) < 1e-3
        assert count_fp8_layers(converted) == 4
