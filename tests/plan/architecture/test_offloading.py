"""Which saves of a pass stay on the device: by hand, and as TRL's own offloading decides."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM
from trl.models.activation_offloading import OffloadActivations

from tunebook.plan.architecture import saved
from tunebook.plan.architecture.saved import Offloading

LARGE, SMALL = 256, 255  # numbers in fp32: 1,024 bytes are enough to be sent, and a number less is not


def storage_of(tensor):
    return tensor.untyped_storage()._cdata


def left_of(*tensors, of_weights=()):
    """The places, of those given, of tensors whose storages stay."""
    offloading = Offloading({storage_of(weight) for weight in of_weights})
    for tensor in tensors:
        offloading.save(tensor)
    return {place for place, tensor in enumerate(tensors) if storage_of(tensor) in offloading.left}


def others(number):
    return [torch.empty(LARGE) for _ in range(number)]


def test_what_is_saved_once_is_sent():
    assert left_of(*others(20)) == set()


@pytest.mark.parametrize("between", range(5))
def test_what_is_saved_again_while_it_is_on_its_way_stays(between):
    tensor = torch.empty(LARGE)
    assert left_of(tensor, *others(between), tensor) == {0, 1 + between}


def test_what_is_saved_again_when_it_has_left_is_sent_again():
    """The fifth save after it waits for it to leave."""
    tensor = torch.empty(LARGE)
    assert left_of(tensor, *others(5), tensor) == set()
    assert left_of(tensor, *others(5), tensor, tensor) == {0, 6, 7}


def test_small_ones_and_weights_count_as_saves_but_nothing_waits_for_what_left():
    tensor, small, weight = torch.empty(LARGE), torch.empty(SMALL), torch.empty(LARGE)
    assert left_of(tensor, *[small] * 9, tensor) == {0, 10}, "nothing was sent since, and so nothing has left"
    assert left_of(tensor, *[weight] * 9, tensor, of_weights=[weight]) == {0, 10}
    assert left_of(tensor, *[small] * 4, *others(1), tensor) == set()


def test_small_ones_and_weights_never_are_what_offloading_leaves():
    small, weight = torch.empty(SMALL), torch.empty(LARGE)
    assert left_of(small, small, weight, weight, of_weights=[weight]) == set()


def test_what_stayed_once_stays_whenever_it_is_saved_again():
    """The second save was not sent, and so nothing ever says that it has left."""
    tensor = torch.empty(LARGE)
    offloading = Offloading(set())
    kept_alive = [tensor, tensor, *others(20)]
    for each in kept_alive:
        offloading.save(each)
    offloading.left.clear()
    offloading.save(tensor)
    assert offloading.left == {storage_of(tensor)}


def test_a_view_from_another_place_or_in_another_format_is_another_tensor():
    whole = torch.empty(2 * LARGE)
    assert left_of(whole, whole[LARGE:]) == set()
    assert left_of(whole, whole.view(torch.int32)) == set()
    assert left_of(whole, whole[:LARGE]) == {0, 1}, "from the same place"
    assert left_of(whole, whole[:1]) == {0, 1}, "however small"
    assert left_of(whole, whole.view(2, LARGE).t()) == {0, 1}, "in whatever order"


class Quiet:
    """A stream, or an event of one, that has nothing to wait for."""

    def __getattr__(self, _):
        return lambda *_: Quiet()


@pytest.fixture
def trl_offloading(monkeypatch):
    """TRL's, on a CPU as if that were a GPU."""
    device = SimpleNamespace(Stream=Quiet, current_stream=Quiet, stream=lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    return OffloadActivations(use_pin_memory=False)


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=["autocast", "bf16"])
@pytest.mark.parametrize(
    ("kind", "attention"),
    [("llama", "eager"), ("llama", "sdpa"), ("phi3", "eager"), ("phi3", "sdpa"), ("gemma2", "eager")],
)
def test_the_same_stays_as_with_trls_own(trl_offloading, config_of, kind, attention, weights):
    """Every save of a real pass is told to both."""
    model = AutoModelForCausalLM.from_config(config_of(kind), attn_implementation=attention, dtype=weights).train()
    trl_offloading.update_model_params(model)
    of_weights = {storage_of(weight) for weight in model.parameters()}
    offloading, stays, kept_alive = Offloading(of_weights), set(), []

    def save(tensor):
        kept_alive.append(tensor)
        offloading.save(tensor)
        is_sent = trl_offloading.tracker[trl_offloading.pack_hook(tensor)][1]
        if not is_sent and tensor.nbytes >= 1024 and storage_of(tensor) not in of_weights:
            stays.add(storage_of(tensor))
        return tensor

    row = saved._row(62, has_lengths=False)
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        model(**row, use_cache=False)
    assert offloading.left == stays
    assert 0 < len(stays) < len({storage_of(tensor) for tensor in kept_alive})
