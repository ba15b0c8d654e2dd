"""The trainer's arguments of a configuration, with the numbers of the sources."""

from pathlib import Path

import numpy as np
import pytest

from tunebook.config.choices import ScheduleName
from tunebook.config.schema import ScheduleConfig
from tunebook.data.batch import solve_batch
from tunebook.train.arguments import learning_rate_schedule, trainer_arguments

from ..conftest import config_of


def arguments_of(recipe, *overrides, has_validation=False):
    config = config_of(recipe, *overrides)
    lengths = None if config.dataset.num_documents else np.full(15_000, 33)
    plan = solve_batch(config, lengths)
    return trainer_arguments(config, plan, Path("/runs/r/1"), has_validation=has_validation)


def test_the_published_script_of_the_3b_model():
    arguments = arguments_of("qwen3b_zero2_exact")
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
        "max_steps": 3750,
    }
    assert {key: arguments[key] for key in expected} == expected
    zero = arguments["deepspeed"]["zero_optimization"]
    assert zero == {
        "stage": 2,
        "reduce_bucket_size": "auto",
        "round_robin_gradients": True,
    }


def test_gradients_are_clipped_only_if_a_norm_is_set():
    assert arguments_of("qwen3b_zero2_exact", "training.max_grad_norm=0.3")["max_grad_norm"] == 0.3
    arguments = arguments_of("qwen3b_zero2_exact", "training.max_grad_norm=null")
    assert arguments["max_grad_norm"] == 0, "with which the Trainer measures the norm and clips nothing"
    assert arguments["deepspeed"]["gradient_clipping"] == "auto", "that is the Trainer's"


def test_fsdp_of_the_70b_model():
    arguments = arguments_of("llama2_70b_fsdp", has_validation=True)
    assert arguments["fsdp"] is True
    assert arguments["fsdp_config"] == {
        "version": 2,
        "reshard_after_forward": True,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "cpu_ram_efficient_loading": True,
        "cpu_offload": False,
        "state_dict_type": "SHARDED_STATE_DICT",
    }
    assert arguments["accelerator_config"] == {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    assert (arguments["bf16"], arguments["ddp_timeout"], arguments["max_steps"]) == (True, 5400, 500)
    assert (arguments["eval_strategy"], arguments["eval_steps"], arguments["save_steps"]) == ("steps", 100, 250)


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


def test_trackers_are_off_unless_asked_for():
    assert arguments_of("quickstart")["report_to"] == []
    asked = arguments_of("quickstart", "tracking=tensorboard", "tracking.project=mine")
    assert (asked["report_to"], asked["project"], asked["run_name"]) == (["tensorboard"], "mine", "r/1")


@pytest.mark.parametrize(
    ("overrides", "is_told"),
    [
        (["parallelism=ddp"], True),
        (["parallelism=zero2"], False),  # DeepSpeed runs autocast itself
        (["parallelism=zero2", "parallelism.mixed_precision=cast"], True),
        (["parallelism=fsdp"], True),
        (["parallelism=fsdp", "precision.master_weights=bf16"], False),  # accelerate would make them fp32
    ],
)
def test_accelerate_gets_bf16_only_if_it_handles_it_correctly(overrides, is_told):
    shared = ("precision=bf16", "hardware=hopper", "packing=padded")
    assert arguments_of("qwen3b_zero2", *shared, *overrides)["bf16"] is is_told


@pytest.mark.parametrize(
    ("words", "multiple"),
    [
        (["packing=padded", "precision=fp8"], 16),  # the collator's business where rows are padded
        (["precision=fp8"], None),  # and that of the rows where documents share them
        (["packing=padded", "precision=bf16"], None),
    ],
)
def test_rows_in_fp8_are_multiples_of_16_tokens(words, multiple):
    arguments = arguments_of("quickstart", "hardware=hopper", *words)
    assert arguments["pad_to_multiple_of"] == multiple
    assert arguments["bf16"] is True  # what is not in fp8
