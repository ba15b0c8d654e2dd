"""The trainer's arguments of a configuration, with the numbers of the sources."""

from pathlib import Path

import numpy as np
import pytest

from tunebook.config.choices import (
    Compute,
    Generation,
    MasterWeights,
    MixedPrecision,
    PackingMode,
    ScheduleName,
    Strategy,
    TrackerName,
)
from tunebook.config.schema import FsdpConfig, ParallelismConfig, ScheduleConfig, ZeroConfig
from tunebook.data.batch import solve_batch
from tunebook.train.arguments import learning_rate_schedule, trainer_arguments

from ..conftest import config_of


def arguments_of(config, has_validation=False):
    plan = solve_batch(config, np.full(15_000, 33))
    return trainer_arguments(config, plan, Path("/runs/r/1"), has_validation=has_validation)


def test_the_published_script_of_the_3b_model():
    arguments = arguments_of(config_of("qwen3b_zero2_exact"))
    expected = {
        "learning_rate": 1e-5,
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr_rate": 0.0},
        "warmup_steps": 40,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "per_device_train_batch_size": 11,
        "gradient_accumulation_steps": 6,
        "activation_checkpointing": True,
        "use_liger_kernel": True,
        "bf16": False,
        "fp16": False,
        "padding_free": False,
    }
    assert {key: arguments[key] for key in expected} == expected
    zero = arguments["deepspeed"]["zero_optimization"]
    assert zero == {"stage": 2, "reduce_bucket_size": "auto", "round_robin_gradients": True}


def test_saving_validation_and_trackers(config, changed):
    arguments = arguments_of(config)
    assert (arguments["report_to"], arguments["max_grad_norm"], arguments["save_steps"]) == ([], 1.0, 2)
    assert (arguments["save_strategy"], arguments["eval_strategy"]) == ("steps", "no")
    training = {"max_grad_norm": None, "save_every_steps": None, "evaluate_every_steps": 7, "load_best_at_end": True}
    other = changed(config, training=training, tracking={"name": TrackerName.tensorboard, "project": "mine"})
    arguments = arguments_of(other, has_validation=True)
    assert (arguments["report_to"], arguments["project"], arguments["run_name"]) == (["tensorboard"], "mine", "r/1")
    assert arguments["max_grad_norm"] == 0, "with which the Trainer measures the norm and clips nothing"
    assert (arguments["save_strategy"], arguments["eval_strategy"], arguments["eval_steps"]) == ("no", "steps", 7)
    assert arguments["metric_for_best_model"] == "validation_loss" and arguments["greater_is_better"] is False


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (ScheduleConfig(name=ScheduleName.linear, warmup_share=0.03), {"warmup_steps": 16}),  # 0.03 x 505 = 15.15
        (ScheduleConfig(name=ScheduleName.cosine), {"warmup_steps": 0}),
        (
            ScheduleConfig(name=ScheduleName.cosine_with_min_lr, min_learning_rate=2e-6),
            {"warmup_steps": 0, "lr_scheduler_kwargs": {"min_lr_rate": pytest.approx(0.2)}},
        ),
        (
            ScheduleConfig(name=ScheduleName.cosine_with_min_lr, min_learning_rate_share=0.1),
            {"warmup_steps": 0, "lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
        ),
    ],
)
def test_schedules(schedule, expected):
    arguments = learning_rate_schedule(schedule, 1e-5, 505)
    assert arguments == {"lr_scheduler_type": schedule.name.value} | expected


@pytest.mark.parametrize(
    ("parallelism", "master_weights", "is_set"),
    [
        (ParallelismConfig(strategy=Strategy.ddp), "fp32", True),
        (ZeroConfig(strategy=Strategy.zero2), "fp32", False),  # DeepSpeed runs autocast itself
        (ZeroConfig(strategy=Strategy.zero2, mixed_precision=MixedPrecision.cast), "fp32", True),
        (FsdpConfig(strategy=Strategy.fsdp), "fp32", True),
        (FsdpConfig(strategy=Strategy.fsdp), "bf16", False),  # accelerate would make them fp32
    ],
)
def test_accelerate_gets_bf16_only_if_it_handles_it_correctly(config, changed, parallelism, master_weights, is_set):
    precision = {"compute": Compute.bf16, "master_weights": MasterWeights[master_weights]}
    config = changed(config, precision=precision, hardware={"generation": Generation.hopper})
    config.parallelism = parallelism
    assert arguments_of(config)["bf16"] is is_set


@pytest.mark.parametrize(
    ("mode", "compute", "multiple"),
    [("padded", "fp8", 16), ("isolated", "fp8", None), ("padded", "bf16", None)],  # packed rows are filled by the rows
)
def test_padded_rows_in_fp8_are_multiples_of_16_tokens(config, changed, mode, compute, multiple):
    config = changed(config, precision={"compute": Compute[compute]}, packing={"mode": PackingMode[mode]})
    arguments = arguments_of(changed(config, training={"micro_batch_size": 1}))
    assert arguments["pad_to_multiple_of"] == multiple
    assert arguments["bf16"] is True  # what is not in fp8
