"""The check of attention sinks, with torch's kernel written in plain torch: it tells right from wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "bench"), str(TESTS / "model")]

import sinks_gpu  # noqa: E402
from sinks_gpu import TINY, check_attention, check_model  # noqa: E402
from test_varlen_attention import KernelInPlainTorch, kernel  # noqa: E402

from tunebook.config.choices import Attention  # noqa: E402
from tunebook.model import varlen_attention  # noqa: E402

LENGTHS = (7, 1, 12)


class Rounded:
    """The plain kernel in fp32 between inputs and results in bf16, as the GPU's kernel computes."""

    @staticmethod
    def forward(*inputs):
        attended, sums = KernelInPlainTorch.forward(*(_wide(one) for one in inputs))
        return attended.to(inputs[0].dtype), sums

    @staticmethod
    def backward(*inputs):
        return tuple(one.to(inputs[1].dtype) for one in KernelInPlainTorch.backward(*(_wide(one) for one in inputs)))


def _wide(value):
    return value.float() if torch.is_tensor(value) and value.is_floating_point() else value


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(varlen_attention, "_varlen_forward", Rounded.forward)
    monkeypatch.setattr(varlen_attention, "_varlen_backward", Rounded.backward)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    monkeypatch.setattr(sinks_gpu, "LENGTHS", LENGTHS)
    varlen_attention.register(Attention.varlen_attention)


def test_the_attention_alone_is_right_in_both_directions(on_cpu):
    for verdict in check_attention("cpu").values():
        assert verdict["ok"], verdict
        assert set(verdict["errors"]) == {"attended", "query", "key", "value", "sinks"}


def test_a_model_is_right_and_one_without_the_sinks_gradient_is_not(on_cpu, monkeypatch):
    sizes = TINY | {"hidden_size": 64, "intermediate_size": 32, "sliding_window": 3}
    right = check_model(sizes, LENGTHS, "cpu", compiles=False, seeds=range(8))["uncompiled"]
    assert right["ok"], right
    assert {"logits", "sinks", "q_proj", "lm_head"} <= set(right["errors"])
    sums = Rounded.forward
    monkeypatch.setattr(varlen_attention, "_varlen_forward", lambda *inputs: (sums(*inputs)[0], sums(*inputs)[1] + 1))
    wrong = check_model(sizes, LENGTHS, "cpu", compiles=False, seeds=range(8))["uncompiled"]
    assert not wrong["ok"] and wrong["failed"]
