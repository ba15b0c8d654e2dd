"""The loss of a micro-batch: upstream's without a synchronization, and with that of a mixture's routers."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig
from trl import SFTTrainer

from tunebook.model.blocks import name_experts
from tunebook.train.methods.sft import RecipeTrainer

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16,
           "tie_word_embeddings": False, "output_router_logits": False}  # fmt: skip


def test_loss_is_upstreams_without_a_synchronization(config, run, changed, monkeypatch):
    ours, compared = RecipeTrainer.compute_loss, []

    def both(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        inputs["use_cache"] = False
        expected = SFTTrainer.compute_loss(self, model, dict(inputs), return_outputs, num_items_in_batch)
        self._metrics["train"].clear()
        outputs = model(**inputs, fused_lm_head=True)  # which may wait, upstream as here
        with monkeypatch.context() as watched:
            for name in ("item", "tolist", "__bool__", "__float__", "cpu"):
                watched.setattr(torch.Tensor, name, refuse(name))
            watched.setattr(torch, "tensor", refuse("tensor"))  # made on the host, and copied
            found = ours(self, lambda **_: outputs, inputs, return_outputs, num_items_in_batch)
        compared.append((found.item(), expected.item()))
        return found

    monkeypatch.setattr(RecipeTrainer, "compute_loss", both)
    _, code, _ = run(changed(config, training={"max_steps": 2}))
    assert (code, len(compared)) == (0, 4)  # two passes a step
    for found, expected in compared:  # of two passes, whose sums may be in another order
        assert found == pytest.approx(expected, rel=1e-6)


def refuse(name):
    def fail(*_, **__):
        raise AssertionError(f"{name} waits for the GPU")

    return fail


@pytest.fixture
def routed(config, run, changed, tiny_model, tmp_path, monkeypatch):
    """`routed(coefficient, name, ...)` trains a small Qwen3-MoE: its metrics and the routers' losses by micro-batch."""

    def train(coefficient, name, **groups):
        folder = tmp_path / f"{name}-model"
        shutil.copytree(tiny_model, folder)
        kind = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
        settings = json.loads((folder / "config.json").read_text()) | kind | EXPERTS
        settings |= {"router_aux_loss_coef": coefficient}
        (folder / "config.json").write_text(json.dumps(settings))
        seen = []
        compute = RecipeTrainer.compute_loss

        def remember(self, model, inputs, *args, **kwargs):
            forward = model.forward
            monkeypatch.setattr(model, "forward", lambda **words: seen.append(forward(**words)) or seen[-1])
            try:
                return compute(self, model, inputs, *args, **kwargs)
            finally:
                monkeypatch.setattr(model, "forward", forward)

        monkeypatch.setattr(RecipeTrainer, "compute_loss", remember)
        _, code, lines = run(changed(config, model={"path": str(folder)}, **groups), name)
        monkeypatch.setattr(RecipeTrainer, "compute_loss", compute)
        assert code == 0
        return lines, seen

    return train


def test_the_first_step_adds_the_mean_of_its_micro_batches_times_the_coefficient(routed):
    """Though the model's config asks for no logits of the routers."""
    groups = {"training": {"max_steps": 1}, "packing": {"row_length": 256}}
    without, outputs = routed(0.0, "without", **groups)
    assert all(output.aux_loss is None for output in outputs)
    ours, outputs = routed(0.5, "with", **groups)
    losses = [float(output.aux_loss.detach()) for output in outputs if output.label_mask.any()]
    assert len(losses) == len(outputs) > 1
    expected = without[0]["loss"] + 0.5 * sum(losses) / len(losses)
    assert ours[0]["loss"] == pytest.approx(expected, rel=2e-6)


def test_the_loss_of_a_micro_batch_by_hand():
    """A sum of 6 over 12 trained tokens of the step, times 2 ranks; the routers' 2.0 in one of 4 micro-batches."""
    trainer = SimpleNamespace(
        model=None, has_one_pass_head=False, aux_loss_enabled=True, router_aux_loss_coef=0.5,
        accelerator=SimpleNamespace(num_processes=2), current_gradient_accumulation_steps=4,
    )  # fmt: skip

    def loss_of(trained):
        received = {}

        def model(**inputs):
            received.update(inputs)
            mask = torch.tensor([trained])
            return SimpleNamespace(log_probs=-2.0 * mask, label_mask=mask, aux_loss=torch.tensor(2.0))

        inputs = {"input_ids": torch.zeros(1, len(trained))}
        loss = RecipeTrainer.compute_loss(trainer, model, inputs, num_items_in_batch=torch.tensor(12))
        assert received["output_router_logits"] is True
        return float(loss)

    assert loss_of([True, True, True]) == 6 / 12 * 2 + 0.5 * 2.0 / 4
    assert loss_of([False, False]) == 0  # a row without a document


@pytest.mark.parametrize(
    ("kind", "sizes", "numbers"),
    [
        ("granitemoehybrid", {"num_local_experts": 6, "num_experts_per_tok": 2}, (6, 2)),
        ("ernie4_5_moe", {"moe_num_experts": 6, "moe_k": 3}, (6, 3)),
        ("granitemoehybrid", {"num_local_experts": 0, "num_experts_per_tok": 0}, None),  # a dense Granite 4
    ],
)
def test_upstreams_loss_finds_the_numbers_of_experts_by_other_keys(kind, sizes, numbers):
    config = AutoConfig.for_model(kind, **sizes)
    before = config.to_dict()
    assert name_experts(config) == (numbers is not None)
    if numbers is not None:
        assert (config.num_experts, config.num_experts_per_tok) == numbers
    assert config.to_dict() == before, "it is saved as it was"
