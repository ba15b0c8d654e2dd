"""MLPs in tiles: the same losses, logits and gradients, and of one tile at a time the inner numbers."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from tunebook.errors import RequestError
from tunebook.model.tiled_mlp import tile_mlps

from .conftest import SMALL, daily, small_config

# Older versions have no other.
pytestmark = pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable.:FutureWarning")
TOKENS, TILE = 41, 8  # the last of the six tiles is short
# With two norms around the MLP (gemma3_text, olmo3), one product for gate and up (phi3), biases and without a gate
# (gpt_neox, gpt2, starcoder2), and in parallel to the attention (cohere)
KINDS = ("qwen3", "llama", "gemma3_text", "phi3", "olmo3", "gpt_neox", "gpt2", "starcoder2", "cohere")


def model_of(kind, *, is_adapted=False):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SMALL)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32).train()
    if not is_adapted:
        return model, model
    return model, get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))


def passed(wrapped, *, accumulation=2):
    """Logits of the last pass, the losses, and the gradients of all passes together."""
    rows = torch.randint(0, SMALL["vocab_size"], (accumulation, 2, TOKENS), generator=torch.Generator().manual_seed(1))
    losses = []
    for row in rows:
        outputs = wrapped(input_ids=row, labels=row, use_cache=False)
        outputs.loss.backward()
        losses.append(outputs.loss.item())
    gradients = {name: weight.grad for name, weight in wrapped.named_parameters() if weight.requires_grad}
    return outputs.logits.detach(), losses, gradients


@pytest.mark.parametrize(("is_recomputed", "is_adapted"), [(True, False), (True, True), (False, False)])
@pytest.mark.parametrize("kind", daily(KINDS, "llama"))
def test_losses_logits_and_gradients_are_those_of_whole_rows(kind, is_recomputed, is_adapted):
    results = []
    for is_tiled in (False, True):
        model, wrapped = model_of(kind, is_adapted=is_adapted)
        if is_recomputed:
            wrapped.enable_input_require_grads()
            model.gradient_checkpointing_enable()
        if is_tiled:
            assert tile_mlps(model, TILE) == 2
        results.append(passed(wrapped))
    (logits, losses, gradients), (tiled_logits, tiled_losses, tiled_gradients) = results
    assert tiled_losses == pytest.approx(losses, rel=1e-6)
    torch.testing.assert_close(tiled_logits, logits, rtol=1e-5, atol=1e-5)
    assert {*tiled_gradients} == {*gradients} and None not in gradients.values()
    for name, gradient in gradients.items():
        torch.testing.assert_close(tiled_gradients[name], gradient, rtol=1e-4, atol=1e-6)


def test_a_weights_gradient_arrives_once_and_a_row_of_one_tile_is_left_alone():
    model, _ = model_of("llama")
    model.gradient_checkpointing_enable()
    tile_mlps(model, TILE)
    weight, arrived, computed = model.model.layers[0].mlp.gate_proj.weight, [], []
    weight.register_post_accumulate_grad_hook(lambda summed: arrived.append(summed.grad.norm().item()))
    model.model.layers[0].mlp.gate_proj.register_forward_hook(lambda *_: computed.append(1))
    passed(model, accumulation=1)
    tiles = -(-2 * TOKENS // TILE)  # of both rows together
    # all tiles, all but the last as the layer is recomputed, and all as the backward pass comes to them
    assert len(arrived) == 1 and len(computed) == 3 * tiles - 1
    computed.clear()
    model(input_ids=torch.ones(1, TILE, dtype=torch.long), use_cache=False)
    assert len(computed) == 1


def test_models_without_mlps_of_single_tokens_are_refused_and_image_towers_left_alone():
    sizes = SMALL | {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    with torch.device("meta"):
        tower, *refused = (
            AutoModelForCausalLM.from_config(config)
            for config in (
                small_config("Gemma3ForConditionalGeneration", **SMALL),
                AutoConfig.for_model("qwen3_moe", **sizes),
                AutoConfig.for_model("bloom", **sizes),
            )
        )
    assert tile_mlps(tower, TILE) == 2
    for model in refused:
        with pytest.raises(RequestError) as caught:
            tile_mlps(model, TILE)
        assert caught.value.problem_id == "mlp-not-tiled"
