"""The output head under FSDP with parameters on the host: FSDP gathers it for every pass, with and without adapters."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import GradScalerKwargs
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from trl.models.activation_offloading import OffloadActivations
from trl.trainer.utils import add_fused_lm_head

from tunebook.model.blocks import transformer_blocks
from tunebook.train.offloading import gather_head, keep_scale_on_host, keep_weights

ROW = {"input_ids": torch.arange(3, 12)[None], "position_ids": torch.arange(9)[None]}
HIDDEN, INNER = 256, 1024
WEIGHTS = {(HIDDEN, INNER), (INNER, HIDDEN)}
# Of gradients by products in bf16: a weight that was moved and is back may have other strides, for which another kernel
# sums in another order, and that changes less than one rounding of every number. A wrong weight changes all of it.
ROUNDING = torch.finfo(torch.bfloat16).eps / 2


@pytest.fixture
def gathered_elsewhere(monkeypatch):
    """The weights that were gathered on the host and not by FSDP on its device."""
    gathered: list[DTensor] = []
    usual = DTensor.full_tensor

    def noted(self, *args, **kwargs):
        gathered.append(self)
        return usual(self, *args, **kwargs)

    monkeypatch.setattr(DTensor, "full_tensor", noted)
    return gathered


def with_adapters(model):
    add_fused_lm_head(model)
    settings = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    return get_peft_model(model, settings).train()


def wrapped(model):
    """As accelerate wraps a model with adapters whose head is not its embeddings."""
    settings = {"mesh": init_device_mesh("cpu", (1,)), "offload_policy": CPUOffloadPolicy(pin_memory=False)}
    for block in transformer_blocks(model.get_base_model()).values():
        fully_shard(block, **settings)
    fully_shard(model.get_input_embeddings(), **settings)
    fully_shard([model.get_output_embeddings()], **settings, reshard_after_forward=False)
    return fully_shard(model, **settings)


def loss_of(model):
    return -model(**ROW, labels=ROW["input_ids"], use_cache=False, fused_lm_head=True).log_probs.sum()


def gradients_of(model):
    whole = ((name, one.grad) for name, one in model.named_parameters() if one.grad is not None)
    return {name: one._local_tensor if isinstance(one, DTensor) else one for name, one in whole}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # asked by peft
@pytest.mark.parametrize("is_mended", [True, False], ids=["gathered", "left"])
def test_every_pass_finds_the_head_where_fsdp_gathers(small_qwen2, one_gloo_rank, gathered_elsewhere, is_mended):
    alone = with_adapters(small_qwen2(tie_word_embeddings=False))
    expected = loss_of(alone)
    expected.backward()
    model = with_adapters(small_qwen2(tie_word_embeddings=False))
    model.load_state_dict(alone.state_dict())
    if is_mended:
        gather_head(model)
    wrapped(model)
    with torch.no_grad():
        model(**ROW, use_cache=False)  # as the leak probe does, which calls the head: it stays gathered
    places = []
    for _ in range(3):
        loss = loss_of(model)
        places.append(len(gathered_elsewhere))
        loss.backward()
        torch.testing.assert_close(loss, expected)
        assert isinstance(model.get_output_embeddings().weight, DTensor), "let go of after the backward pass"
        for name, gradient in gradients_of(model).items():
            torch.testing.assert_close(gradient, gradients_of(alone)[name], msg=name)
        model.zero_grad()
    with torch.no_grad():
        torch.testing.assert_close(loss_of(model), expected)
    places.append(len(gathered_elsewhere))
    assert places == ([0, 0, 0, 0] if is_mended else [0, 1, 2, 3]), "upstream: from the second pass on, on the host"


def test_without_adapters_and_without_fsdp_nothing_changes(small_qwen2):
    model = small_qwen2()
    add_fused_lm_head(model)
    expected = loss_of(model)
    gather_head(model)
    torch.testing.assert_close(loss_of(model), expected)  # two passes, whose sums may be in another order


class Block(nn.Module):
    """A feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, INNER, bias=False)
        self.down = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner: torch.Tensor = self.up(hidden)
        return hidden + self.down(nn.functional.silu(inner))


@pytest.fixture
def offloading(monkeypatch):
    """TRL's offloading with this CPU as the device from which activations are moved."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: torch.device("cpu"))
    return OffloadActivations(use_pin_memory=False, use_streams=False)


def blocks():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def sharded(model):
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32, cast_forward_inputs=False)
    for part in [*model, model]:
        fully_shard(part, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
    return model


def one_pass(model, offloading, dtype=torch.float32):
    """The shapes that were moved and those that were not, and the gradients."""
    if not offloading.param_storages:
        offloading.update_model_params(model)
    hidden = torch.randn(8, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False), offloading:
        loss = model(hidden).float().square().mean()
        saved = list(offloading.tracker.values())
        loss.backward()
    moved = {tuple(one.shape) for one, is_moved, *_ in saved if is_moved}
    stays = {tuple(one.shape) for one, is_moved, *_ in saved if not is_moved}
    assert not offloading.tracker, "the backward pass has asked for all of it"
    return moved, stays, [getattr(one.grad, "_local_tensor", one.grad) for one in model.parameters()]


def test_weights_gathered_by_fsdp_are_kept_with_equal_gradients(one_gloo_rank, offloading, relative_difference):
    moved, _, before = one_pass(sharded(blocks()), offloading)
    assert moved >= WEIGHTS, "what upstream does: once this fails, it is not needed any more"
    keep_weights(offloading)
    moved, stays, gradients = one_pass(sharded(blocks()), offloading)
    assert moved == {(8, HIDDEN), (8, INNER)} and stays >= WEIGHTS
    assert len(gradients) == len(before) == 4
    assert max(map(relative_difference, gradients, before)) < ROUNDING


def test_gathered_weight_is_released(one_gloo_rank, offloading):
    """FSDP releases it, and an activation may reuse its memory."""
    keep_weights(offloading)
    model = sharded(blocks())
    one_pass(model, offloading)
    known = set(offloading.param_storages)
    one_pass(model, offloading)
    assert offloading.param_storages == known


def test_adapters_over_frozen_weights_are_no_different(one_gloo_rank, offloading):
    model = blocks()
    for block in model:
        block.up.weight.requires_grad_(False)
    keep_weights(offloading)
    moved, _, gradients = one_pass(sharded(model), offloading)
    assert not moved & WEIGHTS
    assert [one is None for one in gradients] == [True, False, True, False]


def test_recast_weights_stay_on_the_device(offloading, relative_difference):
    """DeepSpeed casts a model into one flat buffer after TRL has looked up the addresses of its weights."""
    model = blocks()
    offloading.update_model_params(model)
    kept = [weight.data for weight in model.parameters()]  # else what is made next may lie where these did
    model.to(torch.bfloat16)
    model.register_buffer("flat", torch.cat([one.data.flatten() for one in model.parameters()]))
    for weight, part in zip(model.parameters(), model.flat.split(HIDDEN * INNER), strict=True):
        weight.data = part.view_as(weight)
    moved, _, before = one_pass(model, offloading, torch.bfloat16)
    assert moved >= WEIGHTS and kept, "what upstream does: once this fails, it is not needed any more"
    before = [one.clone() for one in before]
    model.zero_grad()
    keep_weights(offloading)
    moved, stays, gradients = one_pass(model, offloading, torch.bfloat16)
    assert moved == {(8, HIDDEN), (8, INNER)} and stays >= WEIGHTS
    assert max(map(relative_difference, gradients, before)) < ROUNDING


def test_copies_of_autocast_are_offloaded(offloading):
    keep_weights(offloading)
    moved, _, _ = one_pass(blocks(), offloading)
    assert moved >= WEIGHTS


def test_recorded_memory_and_speed_with_compiled_layers(project_root):
    """Qwen2.5-3B on two H100, which keeps all layers whole between the passes."""
    lines = (project_root / "benchmarks/results/h100x2_offloaded.jsonl").read_text().splitlines()
    runs = [json.loads(line) for line in lines]
    after, before = (run for run in runs if run["name"] == "fsdp_grad_op_away")
    assert before["offloading"] == "TRL's own" != after["offloading"]
    assert after["memory_gib"] == before["memory_gib"]
    assert after["seconds_per_step"] == pytest.approx(before["seconds_per_step"], rel=0.01)
    assert after["losses"] == pytest.approx(before["losses"], rel=2e-4)


def one_step(accelerator, gradient):
    """The norm of the gradient for clipping, and the weight after a step of size one."""
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    accelerator.scaler.scale((weight * gradient).sum()).backward()
    assert weight.grad[0] == gradient[0] * accelerator.scaler.get_scale() > gradient[0]
    accelerator.scaler.unscale_(optimizer)
    norm = weight.grad.norm()
    accelerator.scaler.step(optimizer)
    accelerator.scaler.update()
    return norm, weight.detach()


def test_gradients_on_the_host_are_divided_by_a_scale_on_the_host():
    accelerator = SimpleNamespace(scaler=GradScaler("cuda", enabled=False), scaler_handler=None)
    keep_scale_on_host(accelerator)
    assert accelerator.scaler.is_enabled()
    gradient = torch.tensor([3.0, 0.0, 4.0])
    norm, weight = one_step(accelerator, gradient)
    assert norm == pytest.approx(5.0) and weight.tolist() == [-3.0, 0.0, -4.0]
    assert accelerator.scaler._scale.device.type == "cpu"


def test_scale_settings_are_kept_and_overflow_skips_the_step():
    handler = GradScalerKwargs(init_scale=8.0)
    accelerator = SimpleNamespace(scaler=GradScaler("cuda", enabled=False), scaler_handler=handler)
    keep_scale_on_host(accelerator)
    assert accelerator.scaler.get_scale() == 8.0
    _, weight = one_step(accelerator, torch.tensor([1.0, torch.inf, 1.0]))
    assert weight.tolist() == [0.0, 0.0, 0.0]
    assert accelerator.scaler.get_scale() == 4.0


def test_other_formats_have_no_scale():
    accelerator = SimpleNamespace(scaler=None, scaler_handler=None)
    keep_scale_on_host(accelerator)
    assert accelerator.scaler is None
