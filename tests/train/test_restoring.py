"""Resumed runs: hyperparameters of run.yaml, the best checkpoint, early stopping, and all weights."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR
from transformers import Qwen3MoeConfig

from tunebook.config.choices import PackingMode, PeftMethod, ResumeAnyway, ScheduleName
from tunebook.errors import DataError
from tunebook.plan.architecture import read_facts
from tunebook.train.callbacks import Records
from tunebook.train.methods.sft import RecipeTrainer
from tunebook.train.restoring import apply_hyperparameters, hyperparameters, load_stored_weights

from .conftest import losses, outcome, same_weights, steps, weights

CONFIG = [ResumeAnyway.config]
NIGHTLY = pytest.mark.nightly
RANKED = {"global_samples": 4, "evaluate_every_steps": 1, "save_every_steps": 2, "keep_checkpoints": 1, "max_steps": 6}


def rates(lines):
    return [line["learning_rate"] for line in lines if "loss" in line]


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


@pytest.fixture
def ranked(config, changed):
    """Saves every second step of six, validates each, and loads the best."""

    def build(**training):
        training = RANKED | {"load_best_at_end": True} | training
        return changed(config, dataset={"validation_share": 0.3}, training=training)

    return build


# Hyperparameters


@pytest.mark.parametrize(
    ("factor", "expected"),
    [(lambda step: 1.0, 0.3), (lambda step: 0.5**step, 0.3 * 0.5**3), (lambda step: max(0.0, 1 - step / 6), 0.15)],
    ids=["constant", "halved", "linear"],
)
def test_a_loaded_optimizer_gets_the_written_hyperparameters_and_keeps_its_moments(factor, expected):
    def make(rate, decay, betas, schedule):
        weight = torch.nn.Parameter(torch.ones(3))
        groups = [{"params": [weight], "weight_decay": decay}]
        optimizer = torch.optim.AdamW(groups, lr=rate, betas=betas)
        return weight, optimizer, LambdaLR(optimizer, schedule)

    weight, earlier, schedule = make(0.1, 0.5, (0.9, 0.999), lambda step: max(0.0, 1 - step / 3))
    for _ in range(3):
        weight.grad = torch.full((3,), 2.0)
        earlier.step()
        schedule.step()
    assert earlier.param_groups[0]["lr"] == 0.0  # the end of the earlier schedule
    _, optimizer, scheduler = make(0.3, 0.01, (0.8, 0.95), factor)
    written = hyperparameters(optimizer)
    optimizer.load_state_dict(earlier.state_dict())
    scheduler.load_state_dict(schedule.state_dict())
    apply_hyperparameters(written, optimizer, scheduler)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["initial_lr"], group["weight_decay"], group["betas"]) == (
        expected,
        0.3,
        0.01,
        (0.8, 0.95),
    )
    assert scheduler.get_last_lr() == [expected]
    state = optimizer.state[group["params"][0]]
    assert (float(state["step"]), state["exp_avg"][0].item()) == (3, pytest.approx(2 * (1 - 0.9**3)))
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == [0.3 * factor(4)]


def test_an_optimizer_of_fsdp_gets_them_too(one_gloo_rank):
    """As accelerate loads it: the optimizer state of DCP contains hyperparameters."""

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


SCHEDULES = {
    "cosine": {"name": ScheduleName.cosine, "warmup_steps": 2},
    "linear": {"name": ScheduleName.linear},
    "constant": {"name": ScheduleName.constant},
    "warmup": {"name": ScheduleName.constant_with_warmup, "warmup_steps": 5},
    "floor": {"name": ScheduleName.cosine_with_min_lr, "min_learning_rate": 1e-4},
}


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("cosine", 1e-2),
        ("constant", 3e-3),
        ("warmup", 3e-3),
        *(pytest.param(name, 3e-3, marks=NIGHTLY) for name in ("cosine", "linear", "floor")),
    ],
)
def test_the_rates_after_a_resume_are_those_of_the_written_schedule(config, run, changed, name, rate):
    """Twice as long as before, so the earlier schedule had ended."""
    schedule = SCHEDULES[name]
    short = changed(config, schedule=schedule, training={"save_every_steps": 3, "max_steps": 3})
    earlier, code, _ = run(short, "earlier")
    assert code == 0
    longer = changed(short, optimizer={"learning_rate": rate}, training={"max_steps": 6})
    _, code, whole = run(longer, "whole")
    assert code == 0
    resumed = changed(longer, training={"resume": str(earlier), "resume_anyway": CONFIG})
    folder, code, lines = run(resumed, "later")
    assert code == 0, outcome(folder)["reason"]
    assert rates(lines) == rates(whole)[3:]  # every digit


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft over transformers
@pytest.mark.parametrize("peft", [{}, {"peft": {"method": PeftMethod.lora, "rank": 4}}], ids=["full", "lora"])
def test_every_changed_hyperparameter_applies_and_is_reported(config, run, changed, monkeypatch, capfd, peft):
    config = changed(config, **peft, training={"save_every_steps": 3, "max_steps": 3})
    earlier, code, _ = run(config, "earlier")
    assert code == 0
    groups = []
    monkeypatch.setattr(
        Records, "on_train_end", lambda self, *_, optimizer, **kwargs: groups.extend(optimizer.param_groups)
    )
    other = {"learning_rate": 1e-5, "weight_decay": 0.2, "beta1": 0.7, "beta2": 0.9, "epsilon": 1e-6}
    resumed = changed(
        config, optimizer=other, training={"max_steps": 5, "resume": str(earlier), "resume_anyway": CONFIG}
    )
    _, code, lines = run(resumed, "later")
    assert code == 0
    assert rates(lines) == [1e-5, 1e-5]
    found = [(group["lr"], group["weight_decay"], group["betas"], group["eps"]) for group in groups if group["params"]]
    assert found[0] == (1e-5, 0.2, (0.7, 0.9), 1e-6)
    assert {decay for _, decay, _, _ in found[1:]} <= {0.0}  # norms and biases
    said = " ".join(capfd.readouterr().out.split())
    assert "changed from step 4 on (training.resume_anyway): optimizer.beta1 was 0.9 and is 0.7" in said
    assert "Kept from the checkpoint: the weights, the optimizer's moments and step count" in said


def test_intervals_are_those_of_run_yaml_and_not_of_the_checkpoint(config, run, changed, stopped):
    first = changed(config, training={"save_every_steps": 5, "log_every_steps": 3, "num_epochs": 4})
    earlier = stopped(changed(first, training={"log_every_steps": 1}), 2, "earlier")
    assert steps(earlier) == [2]
    later = {"save_every_steps": 3, "log_every_steps": 4, "keep_checkpoints": 9, "resume": str(earlier)}
    folder, code, lines = run(changed(first, training=later), "later")
    assert code == 0
    assert steps(folder) == [3, 6, 9, 12]
    assert [line["step"] for line in lines] == [4, 8, 12]


def test_tokens_before_another_batch_size_stay_counted(config, run, changed, stopped):
    _, _, each = run(config, "whole")
    earlier = stopped(config, 2, "earlier")
    smaller = changed(
        config, training={"global_samples": 4, "max_steps": 4, "resume": str(earlier), "resume_anyway": CONFIG}
    )
    _, code, lines = run(smaller, "later")
    assert code == 0
    assert [line["documents_seen"] for line in lines] == [8 + 8 + 4, 8 + 8 + 4 + 4]
    assert lines[0]["tokens_seen"] > each[1]["tokens_seen"]


# The best checkpoint


def test_better_step_without_a_checkpoint_keeps_the_best_checkpoint(run, ranked, validating, capsys):
    validating(3.0, 2.0, 1.9, 2.5, 1.0, 2.2)
    folder, code, _ = run(ranked())
    assert code == 0, outcome(folder)["reason"]
    assert steps(folder) == [2, 6]
    assert outcome(folder)["best_step"] == 2
    assert same_weights(folder / "model", folder / "checkpoints" / "checkpoint-2")
    assert (
        "model/ is checkpoint-2 (2.0000), the best by validation loss; step 5 had 1.0000 and has no checkpoint "
        "(training.save_every_steps=2)"
    ) in " ".join(capsys.readouterr().out.split())


def test_of_equal_losses_the_first_is_the_best(run, ranked, validating):
    validating(1.0, 2.0, 1.0, 2.0, 1.0, 2.0)
    folder, code, _ = run(ranked())
    assert (code, outcome(folder)["best_step"], steps(folder)) == (0, 2, [2, 6])


def test_a_validation_loss_that_is_not_finite_ends_the_run(run, ranked, validating):
    validating(3.0, 2.0, 2.5, float("nan"), 1.0, 1.0)
    folder, code, lines = run(ranked())
    assert code == 7
    assert "the validation loss is not finite at step 4" in outcome(folder)["reason"]
    assert outcome(folder)["reason"].endswith("checkpoint-2")
    assert steps(folder) == [2]
    assert lines[-1]["not_finite"] == ["validation_loss"]
    assert not (folder / "model").exists()


EARLY, LATE = (3.0, 2.0, 4.0, 2.5, 4.0, 2.2), (3.0, 2.0, 4.0, 1.5, 1.7, 1.2)


@pytest.mark.parametrize(
    ("stop", "losses"),
    [(3, EARLY), (6, LATE), *(pytest.param(*case, marks=NIGHTLY) for case in ((1, EARLY), (6, EARLY), (3, LATE)))],
)
def test_best_step_equals_that_of_an_uninterrupted_run(run, ranked, validating, stopped, stop, losses):
    validating(*losses)
    whole, code, _ = run(ranked(), "whole")
    assert code == 0
    folder = stopped(ranked(), stop)
    assert not (folder / "model").exists()
    folder, code, _ = run(ranked())
    assert code == 0, outcome(folder)["reason"]
    assert outcome(folder)["best_step"] == outcome(whole)["best_step"]
    assert same_weights(folder / "model", whole / "model")


def test_step_saved_by_a_stop_is_ranked(run, ranked, validating, stopped):
    validating(3.0, 2.0, 1.0, 2.0, 2.0, 2.0)
    stopped(ranked(), 3)
    folder, code, _ = run(ranked())
    assert (code, outcome(folder)["best_step"], steps(folder)) == (0, 3, [3, 6])
    assert same_weights(folder / "model", folder / "checkpoints" / "checkpoint-3")


def test_missing_best_checkpoint_is_an_error_unless_allowed(run, ranked, validating, stopped, capfd):
    validating(3.0, 1.0, 4.0, 2.5, 4.0, 3.5)
    folder = stopped(ranked(), 4)
    assert steps(folder) == [2, 4]
    shutil.rmtree(folder / "checkpoints" / "checkpoint-2")
    for _ in range(2):
        folder, code, _ = run(ranked())
        assert code == 4
        assert "no complete checkpoint-2 in" in outcome(folder)["reason"]
        assert "'training.resume_anyway=[best]'" in outcome(folder)["reason"]
        assert not (folder / "model").exists()
    folder, code, _ = run(ranked(resume_anyway=[ResumeAnyway.best]))
    assert (code, outcome(folder)["best_step"]) == (0, 4)
    assert same_weights(folder / "model", folder / "checkpoints" / "checkpoint-4")
    assert "among those that exist: checkpoint-4 (2.5000)" in " ".join(capfd.readouterr().out.split())


def test_best_checkpoint_is_loaded_from_a_moved_folder(run, ranked, validating, stopped, tmp_path):
    validating(3.0, 1.0, 4.0, 2.5, 4.0, 3.5)
    earlier = stopped(ranked(), 4, "earlier").rename(tmp_path / "moved")
    folder, code, _ = run(ranked(resume=str(earlier)), "later")
    assert (code, outcome(folder)["best_step"], steps(folder)) == (0, 2, [6])
    assert same_weights(folder / "model", earlier / "checkpoints" / "checkpoint-2")


def test_other_data_are_refused_or_their_losses_not_compared(
    run, ranked, changed, validating, stopped, documents, tmp_path, capfd
):
    file = tmp_path / "data.jsonl"
    shutil.copy(documents, file)
    validating(3.0, 1.0, 4.0, 2.5, 4.0, 3.5)
    both = {"early_stopping_patience": 3}
    stopped(changed(ranked(**both), dataset={"path": str(file)}), 4)
    file.write_text("\n".join(reversed(file.read_text().splitlines())) + "\n")
    folder, code, lines = run(changed(ranked(**both), dataset={"path": str(file)}))
    assert (code, len(losses(lines))) == (2, 4)
    assert "its data have the hash" in outcome(folder)["reason"]
    assert "'training.resume_anyway=[data]'" in outcome(folder)["reason"]
    folder, code, _ = run(changed(ranked(**both, resume_anyway=[ResumeAnyway.data]), dataset={"path": str(file)}))
    assert (code, outcome(folder)["best_step"], outcome(folder)["step"]) == (0, 6, 6)
    assert "validation losses up to step 4 (4) were measured on other data" in " ".join(capfd.readouterr().out.split())


def test_load_best_at_end_can_be_set_when_resuming(run, ranked, validating, stopped):
    validating(3.0, 1.0, 4.0, 2.5, 4.0, 3.5)
    stopped(ranked(load_best_at_end=False, keep_checkpoints=9), 4, "earlier")
    later = ranked(
        resume=str(run(ranked(load_best_at_end=False, keep_checkpoints=9), "earlier")[0]), resume_anyway=CONFIG
    )
    folder, code, _ = run(later, "later")
    assert (code, outcome(folder)["best_step"]) == (0, 2)


def test_without_any_ranked_step_there_is_no_model(run, ranked, validating, monkeypatch):
    validating(3.0, 1.0, 4.0, 2.5, 4.0, 3.5)
    monkeypatch.setattr(RecipeTrainer, "_determine_best_metric", lambda *args, **kwargs: False)
    folder, code, _ = run(ranked())
    assert code == 4
    assert f"tunebook export {folder}" in outcome(folder)["reason"]
    assert not (folder / "model").exists()


# Early stopping


@pytest.mark.parametrize(
    ("stop", "loads_best"),
    [(4, True), (5, True), (3, False), *(pytest.param(*case, marks=NIGHTLY) for case in ((2, True), (5, False)))],
)
def test_patience_is_kept_over_a_stop(run, ranked, validating, stopped, stop, loads_best):
    """Also if the request to stop comes in the last step."""
    validating(3.0, 1.0, 4.0, 2.5, 4.0, 3.5, 3.0, 3.0)
    patient = ranked(early_stopping_patience=3, max_steps=8, load_best_at_end=loads_best)
    whole, code, _ = run(patient, "whole")
    assert (code, outcome(whole)["step"]) == (0, 5)
    assert steps(whole) == [2, 5]  # the last step is saved out of turn
    stopped(patient, stop)
    folder, code, lines = run(patient)
    assert code == 0, outcome(folder)["reason"]
    assert outcome(folder)["reason"] == outcome(whole)["reason"]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5]
    assert same_weights(folder / "model", whole / "model")


@pytest.mark.parametrize(("before", "after", "last"), [(None, 2, 5), (9, 2, 5), (3, 4, 6), (9, 1, 4)])
def test_patience_of_run_yaml_applies_after_a_resume(run, ranked, validating, stopped, before, after, last):
    """With a patience of 1 the training was over before it was resumed."""
    validating(3.0, 1.0, 0.9, 2.5, 4.0, 3.5, 3.0, 3.0)
    earlier = stopped(ranked(early_stopping_patience=before, max_steps=6), 4, "earlier")
    later = ranked(early_stopping_patience=after, max_steps=6, resume=str(earlier), resume_anyway=CONFIG)
    folder, code, _ = run(later, "later")
    assert code == 0, outcome(folder)["reason"]
    assert outcome(folder)["step"] == last
    assert outcome(folder)["reason"].startswith(f"stopped early after step {last}") == (last < 6)


def test_the_step_that_stops_early_can_be_the_only_one_that_is_saved(run, ranked, validating):
    validating(1.0, 2.0, 3.0, 2.5, 4.0, 3.5)
    folder, code, _ = run(ranked(early_stopping_patience=2, save_every_steps=5))
    assert (code, outcome(folder)["best_step"], steps(folder)) == (0, 3, [3])
    assert "model/ is checkpoint-3 (3.0000); step 1 had 1.0000 and has no checkpoint" in outcome(folder)["reason"]


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
    with pytest.raises(
        DataError, match=r"does not fill the model: the names of 12 weights differ, such as model\.layers\.1\."
    ):
        load_stored_weights(model, tmp_path, result)


@pytest.fixture
def experts(config, changed, tiny_model, tmp_path):
    """A mixture of experts, which are one tensor in the model and are stored one by one."""
    folder = tmp_path / "moe"
    shutil.copytree(tiny_model, folder)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    kept = json.loads((folder / "config.json").read_text())
    more = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "num_experts": 4}
    ids = {name: kept[name] for name in ("vocab_size", "eos_token_id", "pad_token_id")}
    made = Qwen3MoeConfig(**sizes, **more, **ids, num_experts_per_tok=2, tie_word_embeddings=True)
    made.architectures = ["Qwen3MoeForCausalLM"]
    made.save_pretrained(folder)
    facts = read_facts(config.model)  # of its dense twin; nothing here depends on them
    return changed(config, model={"path": str(folder), "facts": facts}, packing={"mode": PackingMode.padded})


def test_experts_are_resumed_to_the_same_bits(run, experts, stopped):
    whole, code, lines = run(experts, "whole")
    assert code == 0, outcome(whole)["reason"]
    assert any(".experts.0." in name for name in weights(whole / "model"))
    stopped(experts, 3)
    folder, code, resumed = run(experts)
    assert code == 0, outcome(folder)["reason"]
    assert losses(resumed) == losses(lines)
    assert same_weights(whole / "model", folder / "model")


def test_the_experts_of_the_best_step_are_loaded(run, experts, changed, validating):
    validating(3.0, 1.0, 4.0, 2.5, 4.0, 3.5)
    ranked = changed(experts, dataset={"validation_share": 0.3}, training=RANKED | {"load_best_at_end": True})
    folder, code, _ = run(ranked)
    assert code == 0, outcome(folder)["reason"]
    assert same_weights(folder / "model", folder / "checkpoints" / "checkpoint-2")
