"""Adapted layers that share an input compute what PEFT computes, from one product of their A matrices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from tunebook.model.adapted_products import share_inputs
from tunebook.model.blocks import compile_layers

from .conftest import SMALL

pytestmark = [
    pytest.mark.usefixtures("own_compiler"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # the compiler reads it
    pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable.:FutureWarning"),  # older versions have no other
]


def adapted(*, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """A small Llama with adapters whose B is not zero."""
    torch.manual_seed(0)
    architecture = AutoConfig.for_model("llama", **SMALL | {"num_hidden_layers": 4})
    model = AutoModelForCausalLM.from_config(architecture, dtype=dtype)
    defaults = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear"}
    config = LoraConfig(task_type="CAUSAL_LM", **defaults | settings)
    model = get_peft_model(model, config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn_like(parameter, dtype=torch.float32) * 0.2
    return model


def losses(model: Any, *, steps: int = 5, is_autocast: bool = False) -> list[float]:
    """Losses of a short training on random tokens.

    By plain descent: Adam hides a wrong factor of a gradient, and turns the rounding of one near zero into a step.
    """
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.03)
    tokens = torch.randint(0, SMALL["vocab_size"], (2, 16), generator=torch.Generator().manual_seed(1))
    model.train()
    values = []
    for _ in range(steps):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(loss.item())
    return values


@pytest.mark.parametrize(
    "settings",
    [{}, {"use_rslora": True}, {"rank_pattern": {"k_proj": 2}, "alpha_pattern": {"up_proj": 16}},
     {"target_modules": ["q_proj", "v_proj", "up_proj"]}],
    ids=["all", "rslora", "patterns", "some"],
)  # fmt: skip
def test_losses_are_pefts_in_fp32(settings: dict[str, Any]) -> None:
    expected = losses(adapted(**settings))
    model = adapted(**settings)
    assert share_inputs(model) > 0
    assert losses(model) == pytest.approx(expected, rel=1e-6)
    assert expected[-1] < expected[0]


def test_losses_are_pefts_in_bf16_within_its_rounding() -> None:
    expected = losses(adapted(dtype=torch.bfloat16), is_autocast=True)
    model = adapted(dtype=torch.bfloat16)
    share_inputs(model)
    assert losses(model, is_autocast=True) == pytest.approx(expected, rel=2**-8)


@pytest.mark.parametrize("settings", [{"use_dora": True}, {"lora_dropout": 0.1}], ids=["dora", "dropout"])
def test_layers_with_own_inputs_stay_as_they_are(settings: dict[str, Any]) -> None:
    assert share_inputs(adapted(**settings)) == 0


def test_adapters_that_are_off_or_merged_compute_the_base() -> None:
    model = adapted()
    tokens = torch.arange(8)[None]
    with model.disable_adapter():
        expected = model(tokens).logits
    share_inputs(model)
    with model.disable_adapter():
        torch.testing.assert_close(model(tokens).logits, expected)
    unmerged = model(tokens).logits
    model.merge_adapter()
    torch.testing.assert_close(model(tokens).logits, unmerged, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_recomputed", [False, True])
def test_compiled_blocks_are_one_graph_with_the_same_losses(is_recomputed: bool) -> None:
    expected = losses(adapted())
    model = adapted()
    share_inputs(model)
    model.enable_input_require_grads()
    if is_recomputed:
        model.gradient_checkpointing_enable()
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compile_layers(model.get_base_model(), backend=backend)
    assert losses(model) == pytest.approx(expected, rel=1e-6)
    assert len(graphs) == 1


def test_the_input_of_a_group_is_saved_once() -> None:
    """PEFT keeps a bf16 copy of the input for each of them."""
    saved = {False: 0, True: 0}
    for is_shared in saved:
        model = adapted(dtype=torch.bfloat16)
        if is_shared:
            share_inputs(model)
        storages: dict[int, torch.Tensor] = {}

        def pack(tensor: torch.Tensor, storages: dict[int, torch.Tensor] = storages) -> torch.Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with (
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
            torch.autocast("cpu", torch.bfloat16),
        ):
            model.train()(input_ids=torch.arange(16)[None]).logits.sum()
        saved[is_shared] = sum(each.untyped_storage().nbytes() for each in storages.values())
    assert saved[True] < saved[False]
