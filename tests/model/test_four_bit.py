"""Linear layers in 4 bits: dequantized by hand, with gradients, in one graph."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from peft.tuners.lora import LoraLayer

from tunebook.model.four_bit import FourBitLinear, replace_four_bit


class Linear4bit(torch.nn.Module):
    """What bitsandbytes' layer has: random bytes for a weight of (out_features, in_features)."""

    def __init__(self, out_features: int, in_features: int, *, quant_type: str = "nf4", has_bias: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        num_scales = out_features * in_features // 64

        def some(*shape: int) -> torch.Tensor:
            return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)

        self.in_features, self.out_features, self.compute_dtype = in_features, out_features, torch.float32
        self.bias = torch.nn.Parameter(torch.randn(out_features)) if has_bias else None
        self.weight = torch.nn.Parameter(some(out_features * in_features // 2, 1), requires_grad=False)
        outer = SimpleNamespace(
            code=torch.linspace(-1, 1, 256),
            absmax=torch.rand(-(-num_scales // 256), generator=generator),
            blocksize=256,
        )
        self.weight.quant_state = SimpleNamespace(
            code=torch.linspace(-1, 1, 16), absmax=some(num_scales), state2=outer, offset=torch.tensor(0.5),
            nested=True, blocksize=64, quant_type=quant_type,
        )  # fmt: skip


def by_hand(layer: Linear4bit) -> torch.Tensor:
    """The weight, number by number."""
    state, count = layer.weight.quant_state, layer.in_features * layer.out_features
    numbers = []
    for place in range(count):
        byte = int(layer.weight[place // 2])
        value = state.code[byte % 16 if place % 2 else byte // 16]
        scale = place // 64
        outer = state.state2.absmax[scale // 256]
        numbers.append(value * (state.state2.code[int(state.absmax[scale])] * outer + state.offset))
    return torch.stack(numbers).reshape(layer.out_features, layer.in_features)


def test_a_weight_is_what_its_bytes_say() -> None:
    layer = Linear4bit(264, 64)  # 264 scales: the last 8 have an outer scale of their own
    torch.testing.assert_close(FourBitLinear(layer).dequantized(), by_hand(layer))


def test_products_gradients_and_the_compiled_layer_are_those_of_the_weight() -> None:
    quantized = Linear4bit(6, 64, has_bias=True)
    weight = by_hand(quantized)
    layer = FourBitLinear(quantized)
    hidden = torch.randn(3, 64, requires_grad=True)
    graphs = []
    compiled = torch.compile(layer, backend=lambda graph, _: graphs.append(graph) or graph.forward, fullgraph=True)
    for forward in (layer, compiled):
        hidden.grad = None
        product = forward(hidden)
        torch.testing.assert_close(product, hidden @ weight.t() + quantized.bias)
        product.sum().backward()
        torch.testing.assert_close(hidden.grad, weight.sum(dim=0).expand(3, 64))
    assert len(graphs) == 1
    assert [name for name, each in layer.named_parameters() if each.requires_grad] == ["bias"]


class AdaptedLinear4bit(torch.nn.Module, LoraLayer):
    """PEFT's layer with adapters, which has the name of the layer that it contains."""

    def __init__(self, base_layer: Linear4bit) -> None:
        torch.nn.Module.__init__(self)
        self.base_layer = base_layer


AdaptedLinear4bit.__name__ = "Linear4bit"


@pytest.mark.parametrize(("quant_type", "is_replaced"), [("nf4", True), ("fp4", False)])
def test_layers_of_other_formats_stay_bitsandbytes(quant_type: str, is_replaced: bool) -> None:
    adapted = AdaptedLinear4bit(Linear4bit(2, 64, quant_type=quant_type))
    block = torch.nn.ModuleDict({"adapted": adapted, "alone": Linear4bit(2, 64, quant_type=quant_type)})
    replace_four_bit([block])
    assert [isinstance(layer, FourBitLinear) for layer in (adapted.base_layer, block["alone"])] == [is_replaced] * 2
    assert block["adapted"] is adapted
