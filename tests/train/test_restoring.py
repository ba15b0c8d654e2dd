"""Resumed runs: hyperparameters of run.yaml, the best checkpoint, early stopping, and all weights."""

from __future__ import annotations

import json
import math
import shutil
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR
from transformers import Adafactor, Qwen3MoeConfig, TrainerControl, TrainerState, TrainingArguments

from tunebook.config.choices import PackingMode, ResumeAnyway, ScheduleName
from tunebook.config.schema import TrainingConfig
from tunebook.errors import DataError
from tunebook.plan.architecture import read_facts
from tunebook.train.callbacks import EarlyStopping
from tunebook.train.methods.sft import RecipeTrainer
from tunebook.train.records import Records
from tunebook.train.restoring import (
    RestoredState,
    apply_hyperparameters,
    hyperparameters,
    keep_stored_formats,
    load_stored_weights,
)

from .conftest import losses, outcome, same_weights, steps, weights

# Hyperparameters


def test_a_loaded_optimizer_gets_the_written_hyperparameters_and_keeps_its_moments(one_gloo_rank):
    """As accelerate loads it for FSDP: the optimizer state of DCP contains hyperparameters."""

    def make(rate, decay, betas, last):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        norms = [weight for name, weight in model.named_parameters() if name.startswith("1.")]
        others = [weight for name, weight in model.named_parameters() if name.startswith("0.")]
        groups = [{"params": others, "weight_decay": decay}, {"params": norms, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=rate, betas=betas)
        return model, optimizer, LambdaLR(optimizer, lambda step: max(0.0, 1 - step / last))

    model, earlier, schedule = make(0.1, 0.5, (0.9, 0.999), 3)
    for _ in range(3):
        model(torch.ones(2, 4)).square().sum().backward()
        earlier.step()
        schedule.step()
    stored = get_optimizer_state_dict(model, earlier)
    model, optimizer, scheduler = make(0.3, 0.01, (0.8, 0.95), 6)
    written = hyperparameters(optimizer)
    set_optimizer_state_dict(model, optimizer, stored)
    scheduler.load_state_dict(schedule.state_dict())
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.0]
    apply_hyperparameters(written, optimizer, scheduler)
    found = [(group["lr"], group["weight_decay"], group["betas"]) for group in optimizer.param_groups]
    assert found == [(0.15, 0.01, (0.8, 0.95)), (0.15, 0.0, (0.8, 0.95))]
    assert {float(state["step"]) for state in optimizer.state.values()} == {3.0}
    assert scheduler.get_last_lr() == [0.15, 0.15]
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == pytest.approx([0.1, 0.1])


def test_a_resumed_run_follows_run_yaml_and_not_its_checkpoint(whole, config, run, changed, monkeypatch, capfd):
    """Other hyperparameters, schedule, batch and intervals, in a new folder. Earlier documents stay counted."""
    groups = []
    monkeypatch.setattr(
        Records,
        "on_train_end",
        lambda self, *_, optimizer, **kwargs: groups.extend(optimizer.param_groups),
        raising=False,
    )
    resumed = changed(
        config,
        optimizer={"learning_rate": 1e-5, "weight_decay": 0.2, "beta1": 0.7, "beta2": 0.9, "epsilon": 1e-6},
        schedule={"name": ScheduleName.cosine},
        training={
            "resume": str(whole[0]), "resume_anyway": [ResumeAnyway.config], "global_samples": 4, "max_steps": 12,
            "save_every_steps": 5, "log_every_steps": 2,
        },
    )  # fmt: skip
    folder, code, lines = run(resumed, "later")
    assert code == 0, outcome(folder)["reason"]
    assert [line["step"] for line in lines] == [8, 10, 12]
    assert steps(folder) == [10, 12]
    expected = [1e-5 * (1 + math.cos(math.pi * (step - 1) / 12)) / 2 for step in (8, 10, 12)]
    assert [line["learning_rate"] for line in lines] == pytest.approx(expected, rel=1e-12)
    assert [line["documents_seen"] for line in lines] == [6 * 8 + 2 * 4, 6 * 8 + 4 * 4, 6 * 8 + 6 * 4]
    values = [(group["weight_decay"], group["betas"], group["eps"]) for group in groups if group["params"]]
    assert values[0] == (0.2, (0.7, 0.9), 1e-6)
    assert {decay for decay, _, _ in values[1:]} <= {0.0}  # norms and biases
    printed = " ".join(capfd.readouterr().out.split())
    assert "changed from step 7 on (training.resume_anyway): " in printed
    assert "optimizer.beta1 was 0.9 and is 0.7" in printed


# The best checkpoint and early stopping


def state_after(*validation, best=None):
    """The trainer's state after a step for each of these validation losses."""
    log = [{"step": step, "eval_validation_loss": loss} for step, loss in enumerate(validation, 1)]
    return TrainerState(
        global_step=len(validation), max_steps=9, log_history=log, best_global_step=best,
        best_metric=None if best is None else validation[best - 1],
        best_model_checkpoint=None if best is None else f"/elsewhere/checkpoints/checkpoint-{best}",
    )  # fmt: skip


@pytest.fixture
def restored(tmp_path, make_checkpoint):
    """Restore a state from `earlier`, which has complete checkpoints of these steps, in a run that loads the best."""

    def restore(state, saved, *, has_same_data=True, **training):
        for step in saved:
            make_checkpoint(tmp_path / "earlier", step)
        training = TrainingConfig(load_best_at_end=True, **training)
        trainer = SimpleNamespace(saver=SimpleNamespace(folder=tmp_path / "later" / "checkpoints"))
        resumed = tmp_path / "earlier" / "checkpoints" / f"checkpoint-{saved[-1]}"
        arguments = TrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, metric_for_best_model="validation_loss", report_to=[]
        )
        callback = RestoredState(training, trainer, resumed, has_same_data=has_same_data)
        callback.on_train_begin(arguments, state, TrainerControl())
        return state

    return restore


def test_best_checkpoint_is_found_in_the_folder_of_the_earlier_run(restored, tmp_path):
    state = restored(state_after(3.0, 1.0, 4.0, 2.5, best=2), [2, 4])
    assert state.best_model_checkpoint == str(tmp_path / "earlier" / "checkpoints" / "checkpoint-2")
    assert (state.best_global_step, state.best_metric) == (2, 1.0)


def test_missing_best_checkpoint_is_an_error_unless_allowed(restored):
    with pytest.raises(DataError) as caught:
        restored(state_after(3.0, 1.0, 4.0, 2.5, best=2), [4])
    assert caught.value.problem_id == "best-checkpoint-missing"
    assert "'training.resume_anyway=[best]'" in caught.value.message
    state = restored(state_after(3.0, 1.0, 4.0, 2.5, best=2), [4], resume_anyway=[ResumeAnyway.best])
    assert (state.best_global_step, state.best_metric) == (4, 2.5)


def test_load_best_at_end_can_be_set_when_resuming(restored):
    state = restored(state_after(3.0, 1.0, 4.0, 1.0), [2, 3, 4])
    assert (state.best_global_step, state.best_metric) == (2, 1.0)  # the first of equal ones


def test_losses_on_other_data_are_not_compared(restored):
    state = restored(state_after(3.0, 1.0, 4.0, 2.5, best=2), [2, 4], has_same_data=False)
    assert (state.best_global_step, state.best_metric, state.best_model_checkpoint) == (None, None, None)
    assert not EarlyStopping(1).is_over(state)


@pytest.mark.parametrize(("patience", "is_over"), [(1, True), (2, True), (3, False)])
def test_patience_counts_validations_since_the_best(patience, is_over):
    """Also those before a resume, with the patience of run.yaml."""
    control = TrainerControl()
    EarlyStopping(patience).on_train_begin(SimpleNamespace(), state_after(3.0, 1.0, 4.0, 1.0), control)
    assert control.should_training_stop is is_over


@pytest.fixture
def validating(monkeypatch):
    """Set the validation loss of each step."""

    def use(*losses):
        def evaluate(trainer, *args, **kwargs):
            metrics = {"eval_validation_loss": losses[trainer.state.global_step - 1], "eval_validation_tokens": 7}
            trainer.log(dict(metrics))
            trainer.control = trainer.callback_handler.on_evaluate(
                trainer.args, trainer.state, trainer.control, metrics
            )
            return metrics

        monkeypatch.setattr(RecipeTrainer, "evaluate", evaluate)

    return use


RANKED = {"global_samples": 4, "evaluate_every_steps": 1, "keep_checkpoints": 1, "load_best_at_end": True}


def test_a_stopped_run_keeps_its_patience_and_its_best_checkpoint(config, run, changed, validating, stopped, capsys):
    """Step 3 has the lowest loss and no checkpoint; the last step is saved out of turn."""
    validating(3.0, 1.0, 0.9, 2.5, 4.0, 3.5, 3.0, 3.0)
    training = RANKED | {"early_stopping_patience": 2, "max_steps": 8, "log_every_steps": 3}
    config = changed(config, dataset={"validation_share": 0.3}, training=training)
    whole, code, lines = run(config, "whole")
    assert code == 0
    ending = outcome(whole)
    assert (ending["step"], ending["best_step"], steps(whole)) == (5, 2, [2, 5])
    assert ending["reason"].startswith("stopped early after step 5: no better validation loss in 2 evaluations; ")
    assert "model/ is checkpoint-2 (1.0000)" in capsys.readouterr().out
    assert same_weights(whole / "model", whole / "checkpoints" / "checkpoint-2")
    assert not (whole / "checkpoints" / "README.md").exists()  # upstream's card does not know the run
    assert sum(line["num_steps"] for line in lines if "loss" in line) == 5
    folder = stopped(changed(config, training={"log_every_steps": 1}), 4)
    assert not (folder / "model").exists()
    folder, code, _ = run(config)
    assert code == 0, outcome(folder)["reason"]
    assert (outcome(folder)["reason"], outcome(folder)["best_step"]) == (ending["reason"], 2)
    assert same_weights(folder / "model", whole / "model")


def test_a_validation_loss_that_is_not_finite_ends_the_run_before_it_is_saved(config, run, changed, validating):
    validating(3.0, 2.0, 2.5, float("nan"), 1.0)
    config = changed(config, dataset={"validation_share": 0.3}, training=RANKED | {"max_steps": 5})
    folder, code, lines = run(config)
    assert (code, steps(folder), lines[-1]["not_finite"]) == (7, [2], ["validation_loss"])
    assert outcome(folder)["reason"].endswith("checkpoint-2")
    assert not (folder / "model").exists()


def test_best_checkpoint_of_an_earlier_run_is_loaded(config, run, changed, validating):
    validating(3.0, 1.0, 4.0, 2.5, 4.0, 3.5)
    config = changed(config, dataset={"validation_share": 0.3}, training=RANKED | {"max_steps": 4})
    folder, code, _ = run(config, "earlier")
    assert code == 0
    training = {"max_steps": 6, "resume": str(folder), "resume_anyway": [ResumeAnyway.config]}
    later, code, _ = run(changed(config, training=training), "later")
    assert (code, outcome(later)["best_step"], steps(later)) == (0, 2, [6])
    assert same_weights(later / "model", folder / "checkpoints" / "checkpoint-2")


@pytest.mark.usefixtures("saves_at_once")
def test_a_best_checkpoint_that_was_damaged_meanwhile_is_not_loaded(config, run, changed, validating, monkeypatch):
    def damage(trainer, *args, **kwargs):
        if trainer.state.global_step == 2:
            (trainer.saver.folder / "checkpoint-2" / "optimizer.pt").write_bytes(b"other")
        return original(trainer, *args, **kwargs)

    original = RecipeTrainer.training_step
    monkeypatch.setattr(RecipeTrainer, "training_step", damage)
    validating(3.0, 1.0, 2.0)
    config = changed(config, dataset={"validation_share": 0.3}, training=RANKED | {"max_steps": 3})
    folder, code, _ = run(config)
    assert code == 4
    assert "checkpoint-2 cannot be loaded: optimizer.pt has 5 bytes" in outcome(folder)["reason"]


# Weights


def test_a_tied_weight_that_is_stored_once_is_loaded(small_qwen2, tmp_path):
    model = small_qwen2(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    result = model.load_state_dict(weights(tmp_path), strict=False)
    assert result.missing_keys == ["lm_head.weight"]
    load_stored_weights(model, tmp_path / "nowhere", result)  # nothing is read again


def test_weights_that_are_absent_from_a_checkpoint_are_an_error(small_qwen2, tmp_path):
    small_qwen2(num_hidden_layers=1).save_pretrained(tmp_path)
    model = small_qwen2(num_hidden_layers=2)
    result = model.load_state_dict(weights(tmp_path), strict=False)
    with pytest.raises(DataError, match=r"12 weights differ, such as model\.layers\.1\.") as caught:
        load_stored_weights(model, tmp_path, result)
    assert caught.value.problem_id == "checkpoint-not-loaded"


@pytest.fixture
def experts(config, changed, tiny_model, tmp_path):
    """A mixture of experts, which are one tensor in the model and are stored one by one."""
    folder = tmp_path / "moe"
    shutil.copytree(tiny_model, folder)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    tiny = json.loads((folder / "config.json").read_text())
    more = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "num_experts": 4}
    ids = {name: tiny[name] for name in ("vocab_size", "eos_token_id", "pad_token_id")}
    made = Qwen3MoeConfig(**sizes, **more, **ids, num_experts_per_tok=2, tie_word_embeddings=True)
    made.architectures = ["Qwen3MoeForCausalLM"]
    made.save_pretrained(folder)
    facts = read_facts(config.model)  # of its dense twin; nothing here depends on them
    return changed(config, model={"path": str(folder), "facts": facts}, packing={"mode": PackingMode.padded})


def test_experts_are_resumed_to_the_same_bits(run, experts, changed, tmp_path):
    config = changed(experts, training={"max_steps": 4, "save_every_steps": 2})
    whole, code, lines = run(config, "whole")
    assert code == 0, outcome(whole)["reason"]
    assert any(".experts.0." in name for name in weights(whole / "model"))
    shutil.copytree(whole / "checkpoints" / "checkpoint-2", tmp_path / "run" / "checkpoints" / "checkpoint-2")
    folder, code, resumed = run(config)
    assert code == 0, outcome(folder)["reason"]
    assert losses(resumed) == losses(lines)[2:]
    assert same_weights(whole / "model", folder / "model")


def test_state_in_fp32_of_weights_in_bf16_is_loaded_in_fp32():
    """A resumed run of Adafactor would differ from an undisturbed one."""
    weight = torch.nn.Parameter(torch.randn(4, 3).bfloat16())
    saved, loaded = (Adafactor([weight], lr=0.1, relative_step=False, scale_parameter=False) for _ in range(2))
    weight.grad = torch.randn_like(weight)
    saved.step()
    keep_stored_formats(loaded)
    loaded.load_state_dict(saved.state_dict())
    row = saved.state[weight]["exp_avg_sq_row"]
    assert row.dtype is torch.float32
    assert torch.equal(loaded.state[weight]["exp_avg_sq_row"], row)
    assert loaded.state[weight]["exp_avg_sq_row"].dtype is torch.float32
