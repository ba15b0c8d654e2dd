"""Settings of DeepSpeed and FSDP for every choice of the parallelism group, written out."""

import pytest

from tunebook.config.auto import resolve_auto
from tunebook.config.choices import Strategy
from tunebook.config.compose import compose
from tunebook.hardware.detect import Machine
from tunebook.parallel.deepspeed import deepspeed_settings, zero_stage
from tunebook.parallel.fsdp import fsdp_settings, is_fsdp

NO_GPU = Machine(gpus=[], driver=None, num_cpus=2, host_memory_gib=8.0)


def config_of(*overrides):
    return resolve_auto(compose("qwen3b_zero2", list(overrides)).config, NO_GPU).config


def zero_of(*overrides):
    return deepspeed_settings(config_of(*overrides))["zero_optimization"]


def test_the_trainer_keeps_optimizer_and_schedule():
    settings = deepspeed_settings(config_of())
    assert "optimizer" not in settings and "scheduler" not in settings
    assert settings["zero_allow_untested_optimizer"] is True


def test_zero1_leaves_the_rest_to_deepspeed():
    assert zero_of("parallelism=zero1") == {"stage": 1, "reduce_bucket_size": "auto"}


def test_zero3_with_everything_on_the_host():
    zero = zero_of("parallelism=zero3_offload")
    assert zero["stage"] == 3
    assert zero["offload_optimizer"]["device"] == zero["offload_param"]["device"] == "cpu"
    assert zero["stage3_gather_16bit_weights_on_model_save"] is True
    assert zero["stage3_prefetch_bucket_size"] == "auto"


def test_nvme_names_its_folder():
    zero = zero_of("parallelism=zero3_nvme", "parallelism.nvme_path=/mnt/nvme")
    assert zero["offload_param"]["nvme_path"] == "/mnt/nvme"


def test_a_said_setting_is_written_and_a_silent_one_is_not():
    zero = zero_of("parallelism=zero3", "parallelism.max_live_parameters=1000", "parallelism.sub_group_size=5")
    assert (zero["stage3_max_live_parameters"], zero["sub_group_size"]) == (1000, 5)
    assert "stage3_max_reuse_distance" not in zero


@pytest.mark.parametrize(("choice", "reshards"), [("fsdp", True), ("fsdp_grad_op", False)])
def test_fsdp_reshards_or_keeps(choice, reshards):
    assert fsdp_settings(config_of(f"parallelism={choice}"))["reshard_after_forward"] is reshards


def test_fsdp_units_by_size_or_by_class():
    by_size = fsdp_settings(
        config_of("parallelism=fsdp", "parallelism.wrap_policy=size", "parallelism.wrap_min_num_parameters=7")
    )
    assert (by_size["auto_wrap_policy"], by_size["min_num_params"]) == ("SIZE_BASED_WRAP", 7)
    by_class = fsdp_settings(config_of("parallelism=fsdp", "parallelism.wrap_classes=[Qwen2DecoderLayer]"))
    assert by_class["transformer_layer_cls_to_wrap"] == ["Qwen2DecoderLayer"]


def test_fsdp_offload():
    assert fsdp_settings(config_of("parallelism=fsdp_offload"))["offload_params"] is True


def test_families():
    assert [zero_stage(strategy) for strategy in (Strategy.ddp, Strategy.zero1, Strategy.zero3)] == [None, 1, 3]
    assert [is_fsdp(strategy) for strategy in (Strategy.zero3, Strategy.fsdp_grad_op, Strategy.hsdp)] == [
        False,
        True,
        True,
    ]
