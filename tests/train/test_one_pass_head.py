"""The output head's gradients of the forward pass equal those of TRL's head in the backward pass."""

from __future__ import annotations

import pytest
import torch
from trl.kernels import ChunkedLogProbFunction
from trl.trainer import utils as upstream

from tunebook.train import one_pass_head as ours
from tunebook.train.one_pass_head import OnePassLogProbFunction

NUM_TOKENS, HIDDEN, WORDS = 21, 16, 50
ASKED = ("entropy", "is_top1")


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    monkeypatch.setattr(ours, "TILE_TOKENS", 8)  # three tiles, of which the last is not full


@pytest.fixture
def inputs():
    """Hidden states, weight, bias and targets."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((NUM_TOKENS, HIDDEN), (WORDS, HIDDEN), (WORDS,))
    hidden, weight, bias = (torch.randn(shape, generator=generator) for shape in shapes)
    return hidden, weight, bias, torch.randint(WORDS, (NUM_TOKENS,), generator=generator)


def passed(function, inputs, *, dtype=torch.float32, has_bias=True, frozen=(), softcap=None, scale=1.0, factor=-0.25):
    """A head's outputs, and the gradients of `factor` times the sum of all log probabilities."""
    copies = [one.to(dtype, copy=True) for one in inputs[:3]]
    hidden, weight, bias = (one.requires_grad_(i not in frozen) for i, one in enumerate(copies))
    bias = bias if has_bias else None
    found = function.apply(hidden, weight, bias, inputs[3], 0.8, 32, softcap, scale, ASKED)
    (found[0].sum() * factor).backward()
    return found, [one.grad if one is not None else None for one in (hidden, weight, bias)]


SETTINGS = {
    "plain": {},
    "without a bias": {"has_bias": False},
    "a scale and a cap of the logits": {"softcap": 2.0, "scale": 0.5},
    "a frozen head, as under an adapter": {"frozen": (1, 2)},
    "trained by itself": {"frozen": (0,)},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_as_upstream_in_fp32(inputs, settings):
    expected, gradients = passed(ChunkedLogProbFunction, inputs, **settings)
    found, made = passed(OnePassLogProbFunction, inputs, **settings)
    torch.testing.assert_close(found[0], expected[0])
    assert found[1:] == (None,) * 4
    for one, other in zip(made, gradients, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert other.abs().max() > 0.1
            torch.testing.assert_close(one, other)


def test_as_near_to_exact_gradients_as_upstream_in_bf16(inputs):
    rounded = [one.bfloat16().float() for one in inputs[:3]] + [inputs[3]]
    _, exact = passed(ChunkedLogProbFunction, rounded)
    _, upstreams = passed(ChunkedLogProbFunction, inputs, dtype=torch.bfloat16)
    _, made = passed(OnePassLogProbFunction, inputs, dtype=torch.bfloat16)
    for one, other, third in zip(made, upstreams, exact, strict=True):
        assert one.dtype is torch.bfloat16
        error, upstreams_error = (one - third).norm() / third.norm(), (other - third).norm() / third.norm()
        assert 0 < error < 1.25 * upstreams_error


def test_under_autocast_weights_and_gradients_stay_in_fp32(inputs):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, upstreams = passed(ChunkedLogProbFunction, inputs)
        _, made = passed(OnePassLogProbFunction, inputs)
    for one, other in zip(made, upstreams, strict=True):
        assert one.dtype is torch.float32
        assert (one - other).norm() < 0.01 * other.norm()


def test_tokens_that_count_differently_are_refused(inputs):
    hidden, weight, bias, targets = inputs
    weight.requires_grad_()
    found = OnePassLogProbFunction.apply(hidden, weight, bias, targets, 1.0, 32, None, 1.0, ASKED)
    with pytest.raises(RuntimeError, match="weigh all tokens alike"):
        (found[0] * torch.arange(NUM_TOKENS)).sum().backward()


def test_a_runs_losses_and_gradients_are_those_of_two_passes(whole, config, changed, run, monkeypatch):
    """On a CPU, where upstream is set to skip masked tokens, as it does on a GPU."""
    monkeypatch.setattr(upstream, "_use_triton", lambda device: True)
    calls = []
    apply = OnePassLogProbFunction.apply
    monkeypatch.setattr(OnePassLogProbFunction, "apply", lambda *args: calls.append(len(args[0])) or apply(*args))
    _, code, one = run(changed(config, model={"one_pass_head": True}, training={"max_steps": 3}))
    assert (code, len(calls)) == (0, 6)  # two passes a step
    for key in ("loss", "grad_norm"):
        assert [line[key] for line in one] == pytest.approx([line[key] for line in whole[1][:3]], rel=2e-5)
