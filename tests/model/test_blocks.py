"""Blocks are compiled one by one. These tests replace the compiler's back end."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import transformers
from functorch.compile import make_boxed_func
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tunebook.config.choices import Attention
from tunebook.errors import RequestError
from tunebook.facts.architectures import COMPILED_ARCHITECTURES
from tunebook.model.blocks import compile_layers, transformer_blocks
from tunebook.model.varlen_attention import register

from .conftest import SMALL, daily, small_config

pytestmark = [
    pytest.mark.usefixtures("own_compiler"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # the compiler reads it
    pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable.:FutureWarning"),  # older versions have no other
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a .functools.lru_cache."),  # in transformers' experts
]
# Compiled and plain layers may sum in another order, a few roundings of fp32; another dropout or weight changes much.
ROUNDING = 32 * torch.finfo(torch.float32).eps
INPUTS = {"input_ids": torch.arange(3, 12)[None], "position_ids": torch.arange(9)[None]}


@pytest.fixture
def model(small_qwen2):
    return small_qwen2(num_hidden_layers=3)


def recording_backend():
    """The graphs that are compiled, and a back end that compiles nothing."""
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    return graphs, backend


def gradients(model):
    model.zero_grad()
    model(**INPUTS, use_cache=False).logits.logsumexp(-1).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def test_every_block_is_compiled_once_for_all_lengths_and_computes_the_same(model):
    names = list(model.state_dict())
    expected = gradients(model)
    first, *_ = transformer_blocks(model).values()
    usual = first.forward

    def replaced(*args, **kwargs):  # as kernels of another library do
        return usual(*args, **kwargs)

    first.forward = replaced
    graphs, backend = recording_backend()
    assert compile_layers(model, backend=backend) == 3
    assert torch._dynamo.config.optimize_ddp is False, "DDP would split a block at the ends of its buckets"
    compiled = gradients(model)
    for name, gradient in compiled.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-6)
    assert len(graphs) == 2, "blocks of one kind share one compilation, without the replaced one"
    assert list(model.state_dict()) == names, "a checkpoint's names stay as they are"
    model(input_ids=torch.arange(3, 20)[None], position_ids=torch.arange(17)[None], use_cache=False)
    assert len(graphs) == 2


def test_activations_are_recomputed_in_blocks_of_fsdp(model, one_gloo_rank):
    called: list[str] = []

    def backend(graph, _inputs):
        called.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    compile_layers(model, backend=backend)
    classes = {type(block) for block in transformer_blocks(model).values()}
    for block in transformer_blocks(model).values():
        fully_shard(block, mesh=init_device_mesh("cpu", (1,)))
    assert not classes & {type(block) for block in transformer_blocks(model).values()}
    model.gradient_checkpointing_enable()
    gradients(model)
    assert "tag_activation_checkpoint" in called


@pytest.mark.parametrize("is_sharded", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["whole", "sharded"])
def test_blocks_with_adapters_are_recomputed_outside_their_graph_with_the_same_dropout(
    small_qwen2, one_gloo_rank, relative_difference, is_sharded
):
    called: list[str] = []

    def backend(graph, _inputs):
        called.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    def trained(*, is_compiled):
        torch.manual_seed(0)
        settings = LoraConfig(r=4, lora_dropout=0.5, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        model = get_peft_model(small_qwen2(num_hidden_layers=1), settings).train()
        base = model.get_base_model()
        if is_compiled:
            compile_layers(base, backend=backend)
        for block in transformer_blocks(base).values():
            if is_sharded:
                fully_shard(block, mesh=init_device_mesh("cpu", (1,)))
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
        torch.manual_seed(1)
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor
        ):
            loss = model(**INPUTS, use_cache=False).logits.logsumexp(-1).sum()
        loss.backward()
        gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
        assert all(block.gradient_checkpointing for block in transformer_blocks(base).values())
        return loss, gradients, len(kept)

    (expected_loss, expected, num_kept), (loss, computed, num_kept_compiled) = (
        trained(is_compiled=is_compiled) for is_compiled in (False, True)
    )
    assert relative_difference(loss, expected_loss) < ROUNDING
    assert computed
    assert list(computed) == list(expected)
    for name, gradient in computed.items():
        assert relative_difference(gradient, expected[name]) < ROUNDING, name
    assert called
    assert "tag_activation_checkpoint" not in called, "no compiler divides what is recomputed"
    assert num_kept_compiled == num_kept, "nothing of a block is kept"


PARTITIONED = "aot_eager_decomp_partition"  # decides what is kept as the compiler does, and compiles nothing


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_less_is_kept_with_a_budget_and_gradients_are_the_same(small_qwen2, relative_difference):
    def trained(memory_budget):
        torch._dynamo.reset()
        model = small_qwen2(num_hidden_layers=1, intermediate_size=48)
        compile_layers(model, memory_budget=memory_budget, backend=PARTITIONED)
        kept = {}

        def keep(tensor):
            kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(**INPUTS, use_cache=False).logits.logsumexp(-1).sum()
        shapes = [tuple(tensor.shape) for tensor in kept.values()]
        loss.backward()
        return shapes, {name: parameter.grad for name, parameter in model.named_parameters()}, model.config

    (stored, expected, config), *others = map(trained, (1, 0.8, 0))
    inner = (INPUTS["input_ids"].numel(), config.intermediate_size)
    # Gate, up and what the last product reads of both; without the last; nothing.
    counts = [[shape[-2:] for shape in shapes].count(inner) for shapes in (stored, *(each[0] for each in others))]
    assert counts == [3, 2, 0]
    for _, computed, _ in others:
        for name, gradient in computed.items():
            assert relative_difference(gradient, expected[name]) < ROUNDING, name


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("memory_budget", [0.3, 0])
def test_the_backward_pass_draws_no_other_numbers_for_dropout(small_qwen2, memory_budget):
    """torch would draw the seeds again, and drop other inputs than the forward pass did."""
    from torch._inductor.compile_fx import compile_fx

    graphs: list[list[str]] = []

    def record(graph, inputs, **_):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return make_boxed_func(graph.forward)

    settings = LoraConfig(r=4, lora_dropout=0.5, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = get_peft_model(small_qwen2(num_hidden_layers=1), settings).train()
    inductor = partial(compile_fx, inner_compile=record)
    compile_layers(model.get_base_model(), memory_budget=memory_budget, backend=inductor)
    model(**INPUTS, use_cache=False).logits.logsumexp(-1).sum().backward()
    forward, backward = graphs
    assert "prims.inductor_seeds.default" in forward
    assert "prims.inductor_random.default" in backward
    assert "prims.inductor_seeds.default" not in backward


class Traced(Exception):  # noqa: N818 - the end of a trace, no error
    """Raised by the back end, since torch's kernel for packed rows needs a GPU."""


@pytest.mark.parametrize("is_recomputed", [False, True], ids=["stored", "recomputed"])
@pytest.mark.parametrize("architecture", daily(sorted(COMPILED_ARCHITECTURES), "LlamaForCausalLM"))
def test_a_block_that_auto_compiles_is_one_graph_with_the_attention_that_it_takes(architecture, is_recomputed):
    register(Attention.varlen_attention)
    made = getattr(transformers, architecture)
    config = small_config(architecture, **SMALL | {"num_hidden_layers": 1})
    config._attn_implementation = Attention.varlen_attention.value
    model = made(config).to(torch.bfloat16).train()
    if is_recomputed:
        model.gradient_checkpointing_enable()
    called: list[str] = []

    def backend(graph, _inputs):
        parts = [part for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]
        called.extend(str(node.target) for part in parts for node in part.graph.nodes)
        raise Traced

    (block,) = (block for name, block in transformer_blocks(model).items() if "vision_tower" not in name)
    block.forward = torch.compile(block.forward, backend=backend, fullgraph=True)  # no cuts allowed
    places = torch.tensor([0, 4, 9], dtype=torch.int32)
    row = {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]), "cu_seq_lens_q": places, "max_length_q": 5}
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="Traced"):
        model(input_ids=INPUTS["input_ids"], use_cache=False, **row)
    assert "torch_attn._varlen_attn" in called
    assert ("tag_activation_checkpoint" in called) is is_recomputed


@pytest.mark.parametrize(
    ("form", "has_router_loss", "is_recomputed"),
    [
        (torch.float32, True, True),
        pytest.param(torch.float32, False, False, marks=pytest.mark.nightly),
        pytest.param(torch.bfloat16, False, True, marks=pytest.mark.nightly),
        pytest.param(torch.bfloat16, True, False, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_blocks_with_experts_are_one_graph_and_compute_the_same(form, has_router_loss, is_recomputed):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = transformers.Qwen3MoeConfig(**SMALL | experts)
    torch.manual_seed(0)
    plain = transformers.Qwen3MoeForCausalLM._from_config(config, attn_implementation="eager", dtype=form).train()
    compiled = copy.deepcopy(plain)
    assert plain.config._experts_implementation == "grouped_mm"
    if is_recomputed:
        plain.gradient_checkpointing_enable()
        compiled.gradient_checkpointing_enable()
    graphs, backend = recording_backend()
    torch._dynamo.utils.counters.clear()
    compile_layers(compiled, backend=backend)

    def measured(model, num_tokens):
        ids = torch.randint(
            3, SMALL["vocab_size"], (1, num_tokens), generator=torch.Generator().manual_seed(num_tokens)
        )
        positions = torch.cat([torch.arange(9), torch.arange(num_tokens - 9)])[None]
        model.zero_grad()
        output = model(input_ids=ids, position_ids=positions, use_cache=False, output_router_logits=has_router_loss)
        loss = output.logits.float().pow(2).mean()
        (loss + 0.01 * output.aux_loss if has_router_loss else loss).backward()
        return output.logits, output.router_logits, {name: weight.grad for name, weight in model.named_parameters()}

    for num_tokens in (24, 17):
        logits, routed, expected = measured(plain, num_tokens)
        found_logits, found_routed, computed = measured(compiled, num_tokens)
        assert torch.equal(found_logits, logits)
        assert len(routed or ()) == len(found_routed or ()) == (2 if has_router_loss else 0)
        assert all(map(torch.equal, found_routed or (), routed or ()))
        for name, gradient in computed.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-6)
    assert len(graphs) == 1
    assert not torch._dynamo.utils.counters["graph_break"]


def test_a_tower_for_images_is_not_compiled():
    made = transformers.Gemma3ForConditionalGeneration
    model = made(small_config(made.__name__, **SMALL | {"num_hidden_layers": 1}))
    assert len(transformer_blocks(model)) > compile_layers(model) == 1


def test_a_model_that_names_no_blocks_is_refused(model):
    model._no_split_modules = None
    with pytest.raises(RequestError) as caught:
        compile_layers(model)
    assert caught.value.problem_id == "no-layers-to-compile"
