"""Entropy and accuracy between two logs, per token and not per micro-batch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from trl import SFTTrainer

from tunebook.train.methods.sft import RecipeTrainer, TokenTotals


def head(judged, entropy, right):
    """The outputs of TRL's fused head for a row."""
    return SimpleNamespace(
        label_mask=torch.tensor([judged], dtype=torch.bool),
        entropy=torch.tensor([entropy], requires_grad=True),
        is_top1=torch.tensor([right], dtype=torch.bool),
    )


def of_this_rank(values):
    return values


def test_two_micro_batches_by_hand():
    totals = TokenTotals()
    totals.add(head([1, 1, 0], [1.0, 2.0, 0.0], [1, 0, 0]))
    totals.add(head([1, 0, 0, 0], [6.0, 0.0, 0.0, 0.0], [1, 0, 0, 0]))
    means = totals.take(of_this_rank)
    assert means == {"entropy": 3.0, "mean_token_accuracy": pytest.approx(2 / 3)}  # the mean of means: 3.75 and 0.75


def test_routers_losses_are_averaged_over_the_micro_batches_with_a_document():
    totals = TokenTotals()
    for mask, loss in (([1, 1], 3.0), ([0, 0], 0.0), ([1, 0], 1.0)):
        totals.add(head(mask, [0.0, 0.0], [0, 0]), torch.tensor(loss))
    assert totals.take(of_this_rank)["aux_loss"] == 2.0


def test_of_all_ranks_and_then_anew():
    totals = TokenTotals()
    assert totals.take(of_this_rank) == {}
    totals.add(head([1], [2.0], [1]))
    other = torch.tensor([3.0, 2.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    assert totals.take(lambda mine: mine + other) == {"entropy": 1.0, "mean_token_accuracy": 0.25}
    assert totals.take(of_this_rank) == {}


def test_no_division_by_zero_without_trained_tokens():
    totals = TokenTotals()
    totals.add(head([0], [0.0], [0]))
    assert totals.take(of_this_rank) == {"entropy": 0.0, "mean_token_accuracy": 0.0}


def test_loss_is_upstreams_without_a_synchronization(config, run, changed, monkeypatch):
    ours, compared = RecipeTrainer.compute_loss, []

    def both(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        inputs["use_cache"] = False
        expected = SFTTrainer.compute_loss(self, model, dict(inputs), return_outputs, num_items_in_batch)
        theirs = {name: values[-1] for name, values in self._metrics["train"].items() if name != "num_tokens"}
        self._metrics["train"].clear()
        outputs = model(**inputs, fused_lm_head=True)  # which may ask, upstream as here
        with monkeypatch.context() as watched:
            for name in ("item", "tolist", "__bool__", "__float__", "cpu"):
                watched.setattr(torch.Tensor, name, refuse(name))
            watched.setattr(torch, "tensor", refuse("tensor"))  # made on the host, and copied
            found = ours(self, lambda **_: outputs, inputs, return_outputs, num_items_in_batch)
        mine, upstream = ({"loss": loss.item()} for loss in (found, expected))
        compared.append((mine | self._totals.take(of_this_rank), upstream | theirs))
        return found

    monkeypatch.setattr(RecipeTrainer, "compute_loss", both)
    _, code, _ = run(changed(config, training={"max_steps": 2}))
    assert (code, len(compared)) == (0, 4)  # two passes a step
    for mine, theirs in compared:  # of two passes, whose sums may be in another order
        assert mine == pytest.approx(theirs, rel=1e-6)


def refuse(name):
    def asked(*_, **__):
        raise AssertionError(f"{name} waits for the GPU")

    return asked
