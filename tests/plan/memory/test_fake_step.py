"""The fake step: bytes worked out by hand, the same bytes as real layers keep, and a few layers standing for all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3_next import modeling_qwen3_next

from tunebook.config.choices import PeftMethod
from tunebook.plan import answers
from tunebook.plan.memory import activations
from tunebook.plan.memory.activations import BY_LENGTHS, BY_MASK, Mode
from tunebook.plan.memory.fake_step import FakeStep
from tunebook.plan.memory.ledger import Moment

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's compiler
TOKENS, HIDDEN, INNER, HEADS, GROUPS, WORDS, LAYERS = 48, 64, 128, 4, 2, 512, 6
HEAD_SIZE = HIDDEN // HEADS
KEYS = GROUPS * HEAD_SIZE
FP32 = Mode(weights="float32", adapters="float32", autocast=False, attention=BY_LENGTHS, one_pass_head=False)
BF16 = replace(FP32, autocast=True)
# Numbers of a token that a layer of Llama keeps: a norm its normalized input and the factor; the linear layers their
# inputs, shared where they are the same; the attention query, key, value, output and a number per head; the MLP gate,
# its activation, up and their product; each residual sum is the input of the next norm.
KEPT = 2 * (HIDDEN + 1 + HIDDEN) + HIDDEN + 2 * KEYS + HIDDEN + HEADS + 4 * INNER + 2 * HIDDEN


def llama(**keys: Any) -> Any:
    """A small Llama."""
    sizes = {
        "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS, "vocab_size": WORDS, "tie_word_embeddings": False,
    }  # fmt: skip
    return AutoConfig.for_model(keys.pop("kind", "llama"), **sizes | keys)


def step(config: Any, mode: Mode = FP32, architecture: Any = None, tokens: int = TOKENS) -> Any:
    """What a step of so many tokens holds."""
    return FakeStep(config, architecture or llama(), mode).run(mode, 1, tokens)


def kept(config: Any, mode: Mode = FP32, architecture: Any = None) -> float:
    """Bytes per token and layer that the forward pass leaves."""
    at = step(config, mode, architecture).at
    return (at[Moment.gather].live - at[Moment.start].live) / TOKENS / LAYERS


@pytest.fixture
def full(sound):
    """Full training of nothing but the layers."""
    sound.model.facts, sound.peft.method = None, PeftMethod.full
    return sound


@pytest.fixture
def lora(full):
    full.peft = replace(full.peft, method=PeftMethod.lora, rank=8, dropout=0.0, target_modules=["q_proj", "v_proj"])
    return full


def test_a_layer_keeps_what_was_worked_out_by_hand(full):
    assert kept(full) == 4 * KEPT


def test_it_keeps_what_real_layers_keep(full):
    """Storages that autograd saves in a real forward pass, without parameters; eager attention runs on a CPU."""
    architecture, mode = llama(), replace(FP32, attention="eager")
    by_length = []
    for layers in (2, 3):
        architecture.num_hidden_layers = layers
        model = AutoModelForCausalLM.from_config(architecture, attn_implementation="eager").train()
        own, found = {each.untyped_storage().data_ptr() for each in model.parameters()}, dict[int, int]()

        def pack(tensor, own=own, found=found):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                found[storage.data_ptr()] = storage.nbytes()
            return tensor

        ids = torch.zeros(1, TOKENS, dtype=torch.long)
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        assert hidden.requires_grad
        by_length.append(sum(found.values()))
    # Besides what is saved, the layer's output is alive, which the next one saves.
    assert kept(full, mode) == (by_length[1] - by_length[0]) / TOKENS


@pytest.mark.parametrize("changes", [{}, {"recomputed": True, "accumulates": True}], ids=str)
def test_a_few_layers_stand_for_all(full, changes):
    """Three layers are all run. Each of those for which others stand adds what a fourth does."""
    lives = [
        [part.live for part in step(full, replace(BF16, **changes), llama(num_hidden_layers=layers)).at.values()]
        for layers in (3, 4, LAYERS)
    ]
    for three, four, all_layers in zip(*lives, strict=True):
        assert all_layers - three == (LAYERS - 3) * (four - three)


def test_recomputed_layers_keep_their_input(full):
    assert kept(full, replace(FP32, recomputed=True)) == 4 * HIDDEN
    stored, again = step(full).at, step(full, replace(FP32, recomputed=True)).at
    assert again[Moment.middle].live < stored[Moment.middle].live
    assert again[Moment.head].live < stored[Moment.head].live


def test_autocast_keeps_16_bit_inputs_and_the_weights_that_it_casts(full):
    weights = 2 * HIDDEN * HIDDEN + 2 * KEYS * HIDDEN + 3 * HIDDEN * INNER
    copies = 2 * weights / TOKENS
    assert 0.5 * 4 * KEPT + copies < kept(full, BF16) < 4 * KEPT + copies


def test_adapters_keep_the_inputs_that_they_read(lora):
    """Frozen weights need no inputs; q and v read one norm's output, and each adapter keeps its inner numbers."""
    frozen = HIDDEN + HIDDEN  # normalized inputs are for a norm's weight, and the inputs of k, o, gate, up and down
    inputs = HIDDEN + INNER  # of the second norm's readers, and of down
    assert kept(lora) == 4 * (KEPT - frozen - inputs + 2 * lora.peft.rank)


def test_an_adapter_on_one_layer_is_planned_as_on_all(lora):
    lora.peft.target_modules = ["layers.4.self_attn.q_proj"]
    of_one = kept(lora)
    lora.peft.target_modules = ["q_proj"]
    assert of_one == kept(lora)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_frozen_base_in_fp8_keeps_what_one_in_bf16_keeps(lora, is_compiled):
    in_bf16 = replace(BF16, weights="bfloat16", adapters="float32", compiled=is_compiled)
    assert kept(lora, replace(in_bf16, fp8=True)) == kept(lora, in_bf16)


def test_the_kernels_of_liger_keep_less(full):
    """Its norms compute their normalized inputs again, and its MLPs what the activation returns."""
    assert kept(full, replace(FP32, liger=True)) == 4 * (KEPT - 2 * HIDDEN - INNER)


def test_kernels_of_states_are_put_back(full):
    """The leak probe of the same process computes with them."""
    before = dict(vars(modeling_qwen3_next))
    sizes = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32, "linear_key_head_dim": 16}
    step(full, FP32, llama(kind="qwen3_next", **sizes, linear_value_head_dim=16, head_dim=HEAD_SIZE))
    assert vars(modeling_qwen3_next) == before


def test_dropout_keeps_a_mask_of_bytes(lora):
    before = kept(lora)
    lora.peft.dropout = 0.05
    # Each of two adapters gets an input of its own and a mask; the shared one is kept by neither.
    assert kept(lora) == before + 2 * 4 * HIDDEN + 2 * HIDDEN - 4 * HIDDEN


def test_compiled_layers_keep_less_the_lower_their_budget_is(full):
    """One trace serves all budgets, in any order. At 0 only a layer's input is left."""
    compiled, budgets = replace(BF16, compiled=True), (1.0, 0.6, 0.3, 0.0)
    traced = FakeStep(full, llama(), compiled)
    found = [traced.run(replace(compiled, memory_budget=budget), 1, TOKENS) for budget in budgets * 2]
    assert found[:4] == found[4:]
    left = [each.at[Moment.gather].live - each.at[Moment.start].live for each in found[:4]]
    assert left[0] < TOKENS * LAYERS * kept(full, BF16)
    assert left[3] == TOKENS * LAYERS * 4 * HIDDEN
    spent = [(each - left[3]) / (left[0] - left[3]) for each in left]
    assert spent[1] <= 0.6
    assert spent[2] <= 0.3
    assert spent == sorted(spent, reverse=True)


@pytest.mark.parametrize("compiled", [False, True])
def test_activations_of_two_blocks_are_on_the_gpu_and_all_others_on_the_host(full, compiled):
    """What blocks keep grows by nothing with their number, but for parts of less than a MiB, such as a norm's."""
    mode = replace(BF16, compiled=compiled)
    tokens = 12_000

    def left(mode: Mode, layers: int) -> float:
        at = step(full, mode, llama(num_hidden_layers=layers), tokens=tokens).at
        return at[Moment.gather].live - at[Moment.start].live

    stored, offloaded = [[left(each, layers) for layers in (4, 8)] for each in (mode, replace(mode, offloaded=True))]
    per_block = (stored[1] - stored[0]) / 4
    assert offloaded[0] < 2.2 * per_block
    assert offloaded[1] - offloaded[0] < 0.35 * (stored[1] - stored[0])
    assert step(full, mode).offloaded == 0 < step(full, replace(mode, offloaded=True), tokens=tokens).offloaded


def test_recomputed_inputs_leave_the_gpu_but_for_the_last_two(full):
    deep, tokens = llama(num_hidden_layers=40), 4800
    at = step(full, replace(FP32, recomputed=True, offloaded=True), deep, tokens=tokens).at
    left = (at[Moment.gather].live - at[Moment.start].live) / tokens / (4 * HIDDEN)
    assert 1 <= left <= 3


def test_a_mask_holds_every_pair_of_tokens_once(full):
    once = step(full, replace(FP32, attention=BY_MASK)).at[Moment.gather].live
    assert once - step(full).at[Moment.gather].live >= TOKENS * TOKENS


def test_tiles_of_an_mlp_keep_their_input_only(full):
    """The MLP of one row in tiles of a quarter: gate, its activation, up and product are dropped."""
    assert kept(full, replace(FP32, tile_tokens=TOKENS // 4)) == pytest.approx(4 * (KEPT - 4 * INNER), rel=0.02)


@pytest.mark.parametrize(("gradients", "stay"), [("held", True), ("sent", False), ("unit", False)])
def test_gradients_stay_where_no_rank_takes_them(full, gradients, stay):
    found = step(full, replace(FP32, gradients=gradients)).at[Moment.sent]
    layers = LAYERS * (2 * HIDDEN * HIDDEN + 2 * KEYS * HIDDEN + 3 * HIDDEN * INNER + 2 * HIDDEN)
    assert found.gradients == stay * 4 * (layers + 2 * WORDS * HIDDEN + HIDDEN)


def test_an_answer_is_taken_from_the_cache(sound, monkeypatch, tmp_path):
    monkeypatch.setenv("TUNEBOOK_CACHE", str(tmp_path))
    monkeypatch.setattr(answers, "_known", {})
    found = activations.activations_of(sound, accumulates=False)
    monkeypatch.setattr(answers, "_known", {})
    monkeypatch.setattr(activations, "_fake_step", None)
    assert activations.activations_of(sound, accumulates=False) == found
    sound.activation.offload = True
    with pytest.raises(TypeError):  # another question
        activations.activations_of(sound, accumulates=False)
