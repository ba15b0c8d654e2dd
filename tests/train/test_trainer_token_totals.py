"""Entropy, accuracy and tokens between two logs, per token and not per micro-batch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from trl import SFTTrainer

from tunebook.train.trainer import RecipeTrainer, TokenTotals


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
    totals.add(head([1, 1, 0], [1.0, 2.0, 0.0], [1, 0, 0]), {"input_ids": torch.zeros(1, 3)})
    totals.add(head([1, 0, 0, 0], [6.0, 0.0, 0.0, 0.0], [1, 0, 0, 0]), {"input_ids": torch.zeros(1, 4)})
    means, seen = totals.take(of_this_rank)
    assert means == {"entropy": 3.0, "mean_token_accuracy": pytest.approx(2 / 3)}  # the mean of means: 3.75 and 0.75
    assert seen == 7


def test_padding_is_not_seen():
    totals = TokenTotals()
    mask = torch.tensor([[1, 1, 0, 0]])
    totals.add(head([1, 1, 0, 0], [1.0, 1.0, 0.0, 0.0], [0, 0, 0, 0]), {"input_ids": mask, "attention_mask": mask})
    assert totals.take(of_this_rank) == ({"entropy": 1.0, "mean_token_accuracy": 0.0}, 2)


def test_routers_losses_are_averaged_over_the_micro_batches_with_a_document():
    totals = TokenTotals()
    row = {"input_ids": torch.zeros(1, 2)}
    for mask, loss in (([1, 1], 3.0), ([0, 0], 0.0), ([1, 0], 1.0)):
        totals.add(head(mask, [0.0, 0.0], [0, 0]), row, torch.tensor(loss))
    assert totals.take(of_this_rank)[0]["aux_loss"] == 2.0


def test_of_all_ranks_and_then_anew():
    totals = TokenTotals()
    assert totals.take(of_this_rank) is None
    totals.add(head([1], [2.0], [1]), {"input_ids": torch.zeros(1, 1)})
    other = torch.tensor([3.0, 2.0, 0.0, 3.0, 0.0, 0.0], dtype=torch.float64)
    assert totals.take(lambda mine: mine + other) == ({"entropy": 1.0, "mean_token_accuracy": 0.25}, 4)
    assert totals.take(of_this_rank) is None


def test_no_division_by_zero_without_trained_tokens():
    totals = TokenTotals()
    totals.add(head([0], [0.0], [0]), {"input_ids": torch.zeros(1, 1)})
    assert totals.take(of_this_rank) == ({"entropy": 0.0, "mean_token_accuracy": 0.0}, 1)


def test_loss_is_upstreams_without_a_synchronisation(config, run, monkeypatch):
    ours, compared = RecipeTrainer.compute_loss, []

    def both(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        inputs["use_cache"] = False
        expected = SFTTrainer.compute_loss(self, model, dict(inputs), return_outputs, num_items_in_batch)
        tokens, self._total_train_tokens = self._total_train_tokens, 0
        theirs = {name: values[-1] for name, values in self._metrics["train"].items()}
        self._metrics["train"].clear()
        outputs = model(**inputs, fused_lm_head=True)  # which may ask, upstream as here
        with monkeypatch.context() as watched:
            for name in ("item", "tolist", "__bool__", "__float__", "cpu"):
                watched.setattr(torch.Tensor, name, refuse(name))
            watched.setattr(torch, "tensor", refuse("tensor"))  # made on the host, and copied
            found = ours(self, lambda **_: outputs, inputs, return_outputs, num_items_in_batch)
        means, seen = self._totals.take(of_this_rank)
        mine, upstream = ({"loss": loss.item()} for loss in (found, expected))
        compared.append((mine | means | {"num_tokens": seen}, upstream | theirs | {"num_tokens": tokens}))
        return found

    monkeypatch.setattr(RecipeTrainer, "compute_loss", both)
    _, code, _ = run(config)
    assert code == 0
    assert len(compared) >= 6
    for mine, theirs in compared:  # of two passes, whose sums may be in another order
        assert mine == pytest.approx(theirs, rel=1e-6)


def refuse(name):
    def asked(*_, **__):
        raise AssertionError(f"{name} waits for the GPU")

    return asked


def test_trackers_are_told_by_upstreams_names(config, run, monkeypatch):
    logged = []
    log = SFTTrainer.log

    def kept(self, logs, start_time=None):
        log(self, logs, start_time)
        logged.append(dict(logs))

    monkeypatch.setattr(SFTTrainer, "log", kept)
    _, code, lines = run(config)
    assert code == 0
    steps = [logs for logs in logged if "loss" in logs]
    assert len(steps) == 6
    assert all(0 < logs["entropy"] < 10 and 0 <= logs["mean_token_accuracy"] <= 1 for logs in steps)
    assert [logs["num_tokens"] for logs in steps] == [line["tokens_seen"] for line in lines if "loss" in line]
