"""The loss scale of fp16 where gradients are on the host."""

from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import GradScalerKwargs
from torch.amp.grad_scaler import GradScaler

from tunebook.train.trainer import keep_scale_on_host


def one_step(accelerator, gradient):
    """The gradient's norm as it is clipped, and the weight after a step down it of one."""
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


def test_what_is_set_of_it_stays_and_a_step_that_overflows_is_left_out():
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
