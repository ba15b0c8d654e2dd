"""The output head under FSDP with parameters on the host: FSDP gathers it for every pass, with and without adapters."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import GradScalerKwargs
from peft import LoraConfig, get_peft_model
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from trl.trainer.utils import add_fused_lm_head

from tunebook.model.blocks import transformer_blocks
from tunebook.train.offloading import gather_head, keep_scale_on_host

ROW = {"input_ids": torch.arange(3, 12)[None], "position_ids": torch.arange(9)[None]}


@pytest.fixture
def gathered_elsewhere(monkeypatch):
    """The weights that were gathered on the host and not by FSDP on its device."""
    gathered: list[DTensor] = []
    usual = DTensor.full_tensor

    def note(self, *args, **kwargs):
        gathered.append(self)
        return usual(self, *args, **kwargs)

    monkeypatch.setattr(DTensor, "full_tensor", note)
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
@pytest.mark.parametrize("is_corrected", [True, False], ids=["gathered", "left"])
def test_every_pass_finds_the_head_where_fsdp_gathers(small_qwen2, one_gloo_rank, gathered_elsewhere, is_corrected):
    alone = with_adapters(small_qwen2(tie_word_embeddings=False))
    expected = loss_of(alone)
    expected.backward()
    model = with_adapters(small_qwen2(tie_word_embeddings=False))
    model.load_state_dict(alone.state_dict())
    if is_corrected:
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
    assert places == ([0, 0, 0, 0] if is_corrected else [0, 1, 2, 3]), "upstream: from the second pass on, on the host"


def test_without_adapters_and_without_fsdp_nothing_changes(small_qwen2):
    model = small_qwen2()
    add_fused_lm_head(model)
    expected = loss_of(model)
    gather_head(model)
    torch.testing.assert_close(loss_of(model), expected)  # two passes, whose sums may be in another order


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
