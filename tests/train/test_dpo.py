"""Preference training: TRL's losses, one loss however a step is cut, the reference that is kept, and the numbers."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import SequentialSampler
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from tunebook.config.choices import Attention, DpoLoss, PackingMode, PeftMethod, ResumeAnyway, Weights
from tunebook.config.schema import AttentionConfig, DpoConfig, PackingConfig, PeftSettings
from tunebook.data.sampler import epoch_order
from tunebook.facts.attention import BY_DOCUMENT
from tunebook.train.methods.dpo import losses_of
from tunebook.train.methods.pairs import PairCollator
from tunebook.train.methods.reference import ReferencePass, reference_log_probabilities

from .conftest import base_config, losses, outcome

NUM_PAIRS, A_STEP, NUM_STEPS = 20, 8, 20
MEANS = ("reward_accuracy", "reward_margin", "chosen_log_probability", "rejected_log_probability", "reference_accuracy")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Twenty pairs of texts."""
    draw = random.Random(0)
    words = ["red", "blue", "green", "one", "two", "three", "cat", "dog", "sun", "moon"]
    made = []
    for _ in range(NUM_PAIRS):
        asked = draw.choices(words, k=draw.randint(2, 6))
        worse = draw.choices(words, k=draw.randint(1, 8))
        made.append(
            {
                "prompt": " ".join(asked) + ":",
                "chosen": " " + " ".join(sorted(asked)),
                "rejected": " " + " ".join(worse),
            }
        )
    file = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    file.write_text("".join(json.dumps(pair) + "\n" for pair in made))
    return file, made


@pytest.fixture(scope="module")
def weights_folder(tmp_path_factory, tiny_model):
    """The tiny model with weights on disk, larger than those drawn at random: its answers differ."""
    folder = tmp_path_factory.mktemp("weights") / "tiny"
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny_model), dtype=torch.float32)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return folder


@pytest.fixture
def dpo(weights_folder, pairs, changed):
    """A run over the pairs, with settings of the method and of other groups."""

    def config(settings=None, **groups):
        base = base_config(weights_folder, pairs[0])
        base = replace(base, method=DpoConfig(name="dpo", **(settings or {})))
        base = replace(base, packing=PackingConfig(mode=PackingMode.padded))
        base = changed(base, model={"weights": Weights.pretrained}, optimizer={"learning_rate": 1e-3})
        base = changed(base, training={"max_steps": NUM_STEPS, "save_every_steps": None, "num_epochs": 9})
        return changed(base, **groups)

    return config


class InOrder(DPOTrainer):
    """TRL's trainer over its data set in the order that it has."""

    def _get_train_sampler(self, *args):
        return SequentialSampler(self.train_dataset)


def losses_of_trl(folder, weights_folder, made, peft=None, **settings):
    """The losses of TRL's own trainer on the same pairs in the same order."""
    order = [pair for epoch in range(NUM_STEPS) for pair in epoch_order(len(made), 1, epoch).tolist()]
    logged = []
    arguments = DPOConfig(
        output_dir=str(folder), max_steps=NUM_STEPS, per_device_train_batch_size=A_STEP, learning_rate=1e-3, seed=1,
        lr_scheduler_type="constant", report_to=[], use_cpu=True, bf16=False, logging_steps=1, save_strategy="no",
        max_length=256, disable_tqdm=True, activation_checkpointing=False, remove_unused_columns=False,
        model_init_kwargs={"dtype": "float32"}, **settings,
    )  # fmt: skip
    trainer = InOrder(
        model=str(weights_folder), args=arguments, peft_config=peft,
        train_dataset=Dataset.from_list([made[pair] for pair in order]),
        processing_class=AutoTokenizer.from_pretrained(weights_folder),
    )  # fmt: skip
    log = trainer.log
    trainer.log = lambda logs, *args: (logged.append(logs.get("loss")), log(logs, *args))
    trainer.train()
    return [loss for loss in logged if loss is not None]


def in_packed_rows(config, *, row_length):
    return replace(config, packing=PackingConfig(mode=PackingMode.isolated, row_length=row_length))


@pytest.mark.parametrize(
    ("settings", "theirs", "is_full"),
    [
        ({}, {"loss_type": ["sigmoid"]}, True),
        ({"beta": 0.3}, {"loss_type": ["sigmoid"], "beta": 0.3}, False),
        ({"loss_type": DpoLoss.ipo, "rpo_alpha": 0.5}, {"loss_type": ["ipo", "sft"], "loss_weights": [1.0, 0.5]}, True),
    ],
    ids=["sigmoid-full", "sigmoid-lora", "ipo-with-sft-full"],
)
def test_losses_are_those_of_trl(run, dpo, pairs, weights_folder, tmp_path, settings, theirs, is_full):
    # A number of pairs that divides evenly: TRL's trainer has no shorter last step of an epoch.
    made = pairs[1][:16]
    targets = ["q_proj", "v_proj"]
    peft = PeftSettings() if is_full else PeftSettings(method=PeftMethod.lora, dropout=0.0, target_modules=targets)
    _, code, lines = run(replace(dpo(settings, dataset={"max_documents": len(made)}), peft=peft))
    assert code == 0
    adapter = None if is_full else LoraConfig(r=16, lora_alpha=32, target_modules=targets, task_type="CAUSAL_LM")
    expected = losses_of_trl(tmp_path / "trl", weights_folder, made, adapter, **theirs)
    assert len(expected) == NUM_STEPS
    assert losses(lines) == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_step_does_not_depend_on_the_number_of_passes(run, dpo):
    """The last step of an epoch has four pairs: of four passes, two have none."""
    settings = {"rpo_alpha": 0.7, "label_smoothing": 0.1}
    held_out = {"max_steps": 6, "micro_batch_size": 8}
    whole, cut = (
        run(dpo(settings, training=held_out | {"micro_batch_size": size}), f"by-{size}")[2] for size in (8, 2)
    )
    for key in ("loss", "grad_norm", *MEANS):
        first = key == "reward_accuracy"  # in the first step, rounding decides
        values = [[line[key] for line in lines[first:]] for lines in (cut, whole)]
        assert values[0] == pytest.approx(values[1], rel=2e-6, abs=1e-6)
    assert whole[0]["reward_margin"] == pytest.approx(0, abs=1e-5)  # the model is the reference
    assert whole[0]["loss"] != pytest.approx(math.log(2))  # with the SFT term
    assert whole[-1]["reward_margin"] > 0


@pytest.mark.parametrize("is_full", [True, False])
@pytest.mark.parametrize("attention", [Attention.sdpa, BY_DOCUMENT])
def test_packed_pairs_have_the_losses_of_padded_ones(run, dpo, is_full, attention):
    """Two rows a pass, in which a step's eight pairs are documents; the last step of an epoch has four."""
    targets = ["q_proj", "v_proj"]
    peft = PeftSettings() if is_full else PeftSettings(method=PeftMethod.lora, dropout=0.0, target_modules=targets)
    training = {"max_steps": 6, "evaluate_every_steps": 3}
    settings = {"rpo_alpha": 0.7, "loss_type": DpoLoss.ipo}
    optimizer = {"epsilon": 1e-4}  # with Adam's own, the rounding of gradients near zero becomes steps
    config = dpo(settings, dataset={"validation_share": 0.3}, training=training, optimizer=optimizer)
    config = replace(config, peft=peft)
    padded = run(replace(config, training=replace(config.training, micro_batch_size=8)), "padded")[2]
    rows = in_packed_rows(config, row_length=128)
    rows = replace(rows, attention=AttentionConfig(implementation=attention))
    _, code, packed = run(replace(rows, training=replace(rows.training, max_length=64)), "packed")
    assert code == 0
    names = ("loss", "grad_norm", "validation_loss", *MEANS, *(f"validation_{name}" for name in MEANS))
    for name in names:
        values = [[line[name] for line in lines if name in line] for lines in (packed, padded)]
        assert len(values[0]) == len(values[1]) >= 2
        first = name == "reward_accuracy"  # in the first step, rounding decides
        assert values[0][first:] == pytest.approx(values[1][first:], rel=2e-6, abs=1e-6), name


def test_packed_pairs_that_leak_end_the_run_before_the_reference_is_kept(run, dpo, monkeypatch, capsys):
    def counted_through(self, examples):
        batch = collate(self, examples)
        batch["position_ids"] = torch.arange(batch["input_ids"].numel())[None]
        return batch

    collate = DataCollatorForLanguageModeling.torch_call
    monkeypatch.setattr(DataCollatorForLanguageModeling, "torch_call", counted_through)
    folder, code, lines = run(in_packed_rows(dpo(dataset={"max_documents": 17}), row_length=512))
    assert (code, lines) == (7, [])
    assert "once" not in capsys.readouterr().out
    assert "affect each other" in outcome(folder)["reason"]


def test_adapters_are_trained_after_a_reference_pass_under_fsdp(one_gloo_rank, weights_folder):
    """In bf16, with the reference's pass before any other."""
    base = AutoModelForCausalLM.from_pretrained(weights_folder, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    mesh, policy = init_device_mesh("cpu", (1,)), MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for module in (*base.model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    ids = torch.arange(8)[None]

    def compute(*_):
        with torch.no_grad(), model.disable_adapter():
            logits = model(input_ids=ids, use_cache=False).logits
        return logits, logits

    reference_log_probabilities(SimpleNamespace(model_wrapped=model, compute_ref_log_probs=compute), model, {})
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert trained == {name for name, _ in model.named_parameters() if "lora" in name}


def test_smoothed_sigmoid_is_a_sum_of_losses_of_trl():
    names, weights = losses_of(DpoConfig(label_smoothing=0.2, rpo_alpha=0.5))
    assert names == ["sigmoid", "robust", "sft"]
    delta, smoothing = torch.tensor([-2.0, 0.3, 4.0]), 0.2
    right, wrong = (-torch.nn.functional.logsigmoid(sign * delta) for sign in (1, -1))
    robust = ((1 - smoothing) * right - smoothing * wrong) / (1 - 2 * smoothing)
    assert torch.allclose(weights[0] * right + weights[1] * robust, (1 - smoothing) * right + smoothing * wrong)


def test_full_fine_tune_keeps_the_reference_and_resumes_to_the_digit(run, dpo, stopped, capsys):
    training = {"max_steps": 6, "micro_batch_size": 4, "save_every_steps": 2}
    config = dpo(dataset={"max_documents": 19}, training=training)  # no other test's
    whole = losses(run(config)[2])
    assert "log-probabilities of 19 train pairs, once" in capsys.readouterr().out
    folder = stopped(config, 3, "again")
    assert "once" not in capsys.readouterr().out  # kept with the data
    resumed = run(replace(config, training=replace(config.training, resume="auto")), folder.name)
    assert losses(resumed[2]) == whole
    prepared = json.loads((folder / "prepared.json").read_text())["folder"]
    (kept,) = (folder / prepared / "train").glob("reference-*.npy")
    table = np.load(kept)
    assert table.shape == (19, 2)
    assert np.isfinite(table).all()


def test_weights_that_compute_otherwise_have_a_reference_of_their_own():
    """With another's, their first loss would not be log 2: DeepSpeed casts weights, and YaRN stretches positions."""

    def key(yarn_factor=None, **parallelism):
        precision = {"compute": "bf16", "master_weights": "fp32", "fp8_scaling": "tensorwise"}
        positions = {"yarn_factor": yarn_factor, "yarn_original_positions": None}
        settings = {"precision": precision, "parallelism": parallelism, "model": positions}
        identity = SimpleNamespace(settings=settings, model={"weights": "pretrained"})
        return ReferencePass(SimpleNamespace(saver=SimpleNamespace(identity=identity)), None)._key()

    assert key(mixed_precision="cast") != key(mixed_precision="autocast") == key() != key(yarn_factor=4.0)


def test_full_fine_tune_resumes_for_more_steps_over_other_pairs(run, dpo):
    """The first two steps see 16 of 18 pairs."""
    config = dpo(dataset={"max_documents": 18}, training={"max_steps": 2, "save_every_steps": 2})
    folder, _, _ = run(config)
    more = {"max_steps": 6, "resume": str(folder), "resume_anyway": [ResumeAnyway.config]}
    _, code, lines = run(replace(config, training=replace(config.training, **more)), "more")
    assert (code, [line["step"] for line in lines if "loss" in line]) == (0, [3, 4, 5, 6])


def test_resume_without_the_reference_is_refused(run, dpo, stopped):
    config = dpo(training={"max_steps": 6, "save_every_steps": 2, "seed": 5})
    folder = stopped(config, 3)
    prepared = json.loads((folder / "prepared.json").read_text())["folder"]
    for file in (folder / prepared / "train").glob("reference-*.npy"):
        file.unlink()
    _, code, _ = run(config, folder.name)
    assert code == 2
    assert "training.resume=never training.max_steps=1" in outcome(folder)["reason"]
    run(replace(config, training=replace(config.training, max_steps=1)), "one-step")
    _, code, lines = run(replace(config, training=replace(config.training, resume="auto")), folder.name)
    assert (code, lines[-1]["step"]) == (0, 6)


def test_validation_counts_every_pair_once(run, dpo):
    held_out = {"max_steps": 2, "evaluate_every_steps": 1}
    settings = {"rpo_alpha": 0.5}
    found = {}
    for size in (8, 2):
        config = dpo(settings, dataset={"validation_share": 0.3}, training=held_out | {"micro_batch_size": size})
        found[size] = [line for line in run(config, f"by-{size}")[2] if "validation_loss" in line]
    assert len(found[8]) == 2
    for key in ("validation_loss", *(f"validation_{name}" for name in MEANS)):
        assert [line[key] for line in found[2]] == pytest.approx([line[key] for line in found[8]], rel=2e-6, abs=1e-6)


def test_best_step_and_early_stop_by_reward_accuracy(run, dpo, capsys):
    validated = {"evaluate_every_steps": 1, "save_every_steps": 1, "load_best_at_end": True}
    by = {"best_metric": "validation_reward_accuracy", "early_stopping_patience": 2}
    folder, code, lines = run(dpo(dataset={"validation_share": 0.3}, training={"max_steps": 9} | validated | by))
    assert code == 0
    found = [line["validation_reward_accuracy"] for line in lines if "validation_loss" in line]
    best = found.index(max(found))
    assert outcome(folder)["best_step"] == best + 1
    assert len(found) == min(9, best + 1 + 2)
    assert f"reward accuracy {found[0]:.4f}" in capsys.readouterr().out


def test_batch_of_pairs_is_laid_out_as_trl_does():
    def side(ids, num_prompt):
        ids = np.array(ids)
        return {"input_ids": ids, "labels": np.where(np.arange(len(ids)) < num_prompt, -100, ids)}

    none = {"pairs": [-1], "sides": [side([0, 0], 1)] * 2}
    first, second = [side([1, 2, 3, 4, 5], 3), side([1, 2, 3, 6], 3)], [side([7, 8, 9], 2), side([7, 8, 10, 11], 2)]
    rows = [{"pairs": [7], "sides": first}, none, {"pairs": [2], "sides": second}]
    batch = PairCollator(pad_token_id=0, multiple=2)(rows)
    assert batch["pairs"].tolist() == [7, 2]
    assert batch["input_ids"].tolist() == [
        [1, 2, 3, 4, 5, 0],
        [7, 8, 9, 0, 0, 0],
        [1, 2, 3, 6, 0, 0],
        [7, 8, 10, 11, 0, 0],
    ]
    assert batch["completion_mask"].tolist() == [
        [0, 0, 0, 1, 1, 0],
        [0, 0, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0, 0],
    ]
    assert batch["attention_mask"].sum(1).tolist() == [5, 3, 4, 4]
    assert PairCollator(pad_token_id=0)([none])["pairs"].tolist() == [-1]
    together = PairCollator(pad_token_id=0, multiple=6, is_packed=True)([{"pairs": [7, 2], "sides": first + second}])
    assert together["pairs"].tolist() == [7, 2]
    row = together["row"]
    assert row["input_ids"].tolist() == [[1, 2, 3, 4, 5, 7, 8, 9, 1, 2, 3, 6, 7, 8, 10, 11, 0, 0]]
    assert row["labels"].tolist() == [
        [*[-100] * 3, 4, 5, *[-100] * 2, 9, *[-100] * 3, 6, *[-100] * 2, 10, 11, -100, -100]
    ]
    assert row["cu_seq_lens_q"].tolist() == [0, 5, 8, 12, 16, 18]
