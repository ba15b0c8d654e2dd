"""A frozen base in fp8 under adapters: its products and gradients, and that nothing else of the model changes."""

from __future__ import annotations

import weakref

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM

from tunebook.errors import RequestError
from tunebook.model.blocks import compile_layers
from tunebook.model.fp8 import FrozenFp8Linear, convert_frozen_to_fp8, count_fp8_layers, in_fp8

from .conftest import SMALL, small_config

ROUNDING = 2**-4  # of one e4m3 number
TOKENS = torch.arange(3, 35)[None]


@pytest.fixture
def adapted():
    """Make a small Llama in bf16 with adapters in fp32."""

    def make(**sizes):
        torch.manual_seed(0)
        architecture = AutoConfig.for_model("llama", **SMALL | sizes)
        base = AutoModelForCausalLM.from_config(architecture, dtype=torch.bfloat16)
        settings = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "down_proj"])
        model = get_peft_model(base, settings)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = torch.randn_like(parameter, dtype=torch.float32) * 0.1
        return base, model

    return make


def test_a_row_is_scaled_to_the_largest_number_of_fp8():
    values, scale = in_fp8(torch.tensor([[1.0, -224.0, 896.0], [0.0, 0.0, 0.0]]))
    assert values.float().tolist() == [[0.5, -112.0, 448.0], [0.0, 0.0, 0.0]]
    assert scale[0].item() == 2.0


def test_products_and_gradients_are_those_of_the_layer_within_rounding():
    torch.manual_seed(0)
    layer = nn.Linear(64, 48)
    hidden = torch.randn(5, 64, requires_grad=True)
    results = [layer(hidden), FrozenFp8Linear(layer)(hidden).float()]
    gradients = [torch.autograd.grad(result.square().sum(), hidden)[0] for result in results]
    for (plain, in_8_bits), allowed in ((results, ROUNDING), (gradients, 2 * ROUNDING)):
        assert 0 < (in_8_bits - plain).norm() < allowed * plain.norm()


def test_a_token_does_not_change_the_products_of_others():
    layer, tokens = FrozenFp8Linear(nn.Linear(32, 16)), torch.randn(4, 32)
    changed = torch.cat([tokens[:3], tokens[3:] * 1000])
    assert torch.equal(layer(tokens)[:3], layer(changed)[:3])


def test_every_frozen_layer_is_converted_and_takes_the_bytes_it_had(adapted):
    base, model = adapted()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    before = {name: layer for name, layer in base.named_modules() if type(layer) is nn.Linear}
    freed = [weakref.ref(layer.weight) for name, layer in before.items() if name != "lm_head" and "lora" not in name]
    num_bytes = sum(weight().nbytes for weight in freed)
    del before
    names = convert_frozen_to_fp8(base)
    assert len(names) == len(freed) == count_fp8_layers(model) == 14  # seven of each block, adapted or not
    assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == trained
    assert not any(weight() is not None for weight in freed)
    layers = [layer for layer in model.modules() if isinstance(layer, FrozenFp8Linear)]
    assert sum(layer.forward_weight.nbytes + layer.backward_weight.nbytes for layer in layers) == num_bytes
    assert not any(parameter.requires_grad for layer in layers for parameter in layer.parameters())
    assert not [name for layer in layers for name, _ in layer.named_buffers()]


def test_a_tower_for_images_stays_as_it_is():
    made = transformers.Gemma3ForConditionalGeneration
    model = made(small_config(made.__name__, **SMALL)).requires_grad_(False)
    assert all(name.startswith("model.language_model.layers.") for name in convert_frozen_to_fp8(model))


def test_layers_of_sizes_that_fp8_does_not_support_stay(adapted):
    base, _ = adapted(intermediate_size=72)
    assert {name.rpartition(".")[2] for name in convert_frozen_to_fp8(base)} & {
        "gate_proj",
        "up_proj",
        "down_proj",
    } == set()


def test_a_model_without_linear_layers_is_refused():
    architecture = AutoConfig.for_model("gpt2", n_embd=32, n_layer=1, n_head=2, vocab_size=64)  # transposed weights
    with pytest.raises(RequestError) as refused:
        convert_frozen_to_fp8(AutoModelForCausalLM.from_config(architecture).requires_grad_(False))
    assert refused.value.problem_id == "fp8-nothing-to-convert"


def test_the_last_layer_of_a_mamba_block_stays():
    """transformers hands its weight to a kernel."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 64, "num_heads": 16, "head_dim": 4,
             "state_size": 8, "n_groups": 1, "chunk_size": 4}  # fmt: skip
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model("mamba2", **sizes)).requires_grad_(False)
    assert [name.rpartition(".")[2] for name in convert_frozen_to_fp8(base)] == ["in_proj"]


@pytest.mark.usefixtures("own_compiler")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # the compiler of torch 2.13 does
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler reads it
def test_compiled_blocks_are_one_graph_with_the_same_gradients(adapted):
    found, graphs = [], []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    for is_compiled in (False, True):
        base, model = adapted()
        convert_frozen_to_fp8(base)
        model.enable_input_require_grads()
        if is_compiled:
            compile_layers(base, backend=backend)
        with torch.autocast("cpu", torch.bfloat16):
            model(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss.backward()
        found.append([parameter.grad for parameter in model.parameters() if parameter.requires_grad])
    assert len(graphs) == 1
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.usefixtures("one_gloo_rank")
def test_ddp_sends_the_base_and_averages_the_adapters(adapted):
    base, model = adapted()
    convert_frozen_to_fp8(base)
    wrapped = DistributedDataParallel(model)
    wrapped(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss.backward()
    assert count_fp8_layers(wrapped) == 14
    assert all((parameter.grad is not None) == parameter.requires_grad for parameter in model.parameters())
