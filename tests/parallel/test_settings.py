"""Settings of DDP, DeepSpeed and FSDP for every choice of the parallelism group; forgetting ZeRO-3's order."""

import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import TrainingArguments

from tunebook.config.choices import Generation, MixedPrecision
from tunebook.parallel.deepspeed import deepspeed_settings, forget_parameter_order
from tunebook.parallel.fsdp import autocast_dtype, fsdp_arguments, hsdp_sizes, mixed_precision_policy
from tunebook.train.arguments import _parallelism


@pytest.fixture
def zero_of(config_on):
    return lambda choice, **settings: deepspeed_settings(config_on(choice, **settings))["zero_optimization"]


def test_only_what_is_set_is_written(zero_of):
    assert zero_of("zero1") == {"stage": 1, "reduce_bucket_size": "auto"}
    assert zero_of("zero2", round_robin_gradients=True) == {
        "stage": 2, "reduce_bucket_size": "auto", "round_robin_gradients": True,
    }  # fmt: skip
    zero = zero_of("zero3", max_live_parameters=1000, sub_group_size=5)
    assert (zero["stage3_max_live_parameters"], zero["sub_group_size"]) == (1000, 5)
    assert "stage3_max_reuse_distance" not in zero
    zero = zero_of("zero3", param_persistence_threshold=0, prefetch_bucket_size=0)  # a number of its own
    assert zero["stage3_param_persistence_threshold"] == zero["stage3_prefetch_bucket_size"] == 0


def test_zero3_with_everything_on_the_host(zero_of):
    zero = zero_of("zero3_offload")
    assert zero["stage"] == 3
    assert zero["offload_optimizer"]["device"] == zero["offload_param"]["device"] == "cpu"
    assert zero["stage3_gather_16bit_weights_on_model_save"] is True
    assert zero["stage3_prefetch_bucket_size"] == "auto"


def test_nvme_names_its_folder_and_has_buffers_for_what_a_rank_has_of_the_embedding(zero_of):
    """DeepSpeed ends a run whose largest parameter is above its default of 1e8 elements: 151,936 x 896 of Qwen's."""
    assert zero_of("zero3_nvme", nvme_path="~/nvme")["offload_param"]["nvme_path"] == str(Path.home() / "nvme")
    alone, shared = zero_of("zero3_nvme", ranks=1), zero_of("zero3_nvme", ranks=2)
    assert alone["offload_param"]["nvme_path"] == alone["offload_optimizer"]["nvme_path"] == "/mnt/nvme"
    assert alone["offload_param"]["buffer_size"] == 136_134_656
    assert "buffer_size" not in shared["offload_param"]
    assert "buffer_size" not in alone["offload_optimizer"]


def test_fsdp_reshards_or_keeps_and_offloads(config_on):
    arguments = {choice: fsdp_arguments(config_on(choice)) for choice in ("fsdp", "fsdp_grad_op", "fsdp_offload")}
    settings = {choice: found["fsdp_config"] for choice, found in arguments.items()}
    assert settings["fsdp"] == {
        "version": 2, "reshard_after_forward": True, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "cpu_ram_efficient_loading": True, "cpu_offload": False, "state_dict_type": "SHARDED_STATE_DICT",
    }  # fmt: skip
    assert settings["fsdp_grad_op"] == settings["fsdp"] | {"reshard_after_forward": False}
    assert settings["fsdp_offload"] == settings["fsdp"] | {"cpu_offload": True}
    assert arguments["fsdp_offload"]["ddp_backend"] == "cuda:nccl,cpu:gloo"
    assert "ddp_backend" not in arguments["fsdp"]
    assert arguments["fsdp"]["accelerator_config"] == {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    read = inspect.getsource(TrainingArguments._process_fsdp_args)  # silently drops other settings
    assert [key for key in settings["fsdp"] if f'"{key}"' not in read] == []


def test_hsdp_is_copies_times_shards(config_on):
    config = config_on("hsdp", ranks=8)
    assert hsdp_sizes(config) == (4, 2)
    sizes = fsdp_arguments(config)["parallelism_config"]
    assert (sizes.dp_replicate_size, sizes.dp_shard_size) == (4, 2)
    assert hsdp_sizes(config_on("fsdp")) is None


def test_zero_leaves_bf16_to_autocast_unless_told_to_cast(config_on):
    autocast = deepspeed_settings(config_on("zero2"))
    assert autocast["torch_autocast"] == {"enabled": True, "dtype": "bfloat16"}
    assert "bf16" not in autocast  # accelerate would turn it on
    cast = deepspeed_settings(config_on("zero2", mixed_precision=MixedPrecision.cast))
    assert cast["bf16"] == {"enabled": "auto"}
    assert "torch_autocast" not in cast
    assert "torch_autocast" not in deepspeed_settings(config_on("zero2", compute="fp32"))


@pytest.mark.parametrize(("compute", "half"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
@pytest.mark.parametrize("mixed", [MixedPrecision.autocast, MixedPrecision.cast])
def test_fsdp_gathers_16_bits_and_sums_gradients_in_fp32(config_on, compute, half, mixed):
    config, is_cast = config_on("fsdp", compute=compute, mixed_precision=mixed), mixed is MixedPrecision.cast
    policy = mixed_precision_policy(config)
    formats = (policy.param_dtype, policy.reduce_dtype, policy.output_dtype, policy.cast_forward_inputs)
    assert formats == (half, torch.float32, None if is_cast else torch.float32, is_cast)
    assert autocast_dtype(config) == (None if is_cast else half)


@pytest.mark.parametrize("precision", [{"compute": "fp32"}, {"master_weights": "bf16"}])
def test_fsdp_mixes_nothing_where_there_is_one_format(config_on, precision):
    config = config_on("fsdp", **precision)
    assert mixed_precision_policy(config) is None
    assert autocast_dtype(config) is None


def test_ddp_sends_no_buffers_and_large_messages_inside_one_machine_with_gpus(config_on):
    config = config_on("ddp")
    assert _parallelism(config) == {
        "ddp_find_unused_parameters": False, "ddp_broadcast_buffers": False, "ddp_bucket_cap_mb": 400,
    }  # fmt: skip
    config.hardware.num_nodes = 2
    assert "ddp_bucket_cap_mb" not in _parallelism(config)
    config.hardware.num_nodes, config.hardware.generation = 1, Generation.cpu
    assert "ddp_bucket_cap_mb" not in _parallelism(config)


@pytest.fixture
def engine():
    """As much of a ZeRO-3 engine as has a coordinator, which needs no process group until it gathers."""
    from deepspeed.runtime.zero.partitioned_param_coordinator import (
        InflightParamRegistry,
        PartitionedParameterCoordinator,
    )

    coordinator = PartitionedParameterCoordinator(
        prefetch_bucket_sz=1, max_reuse_distance_in_numel=1, max_available_parameters_in_numel=1,
        allgather_stream=torch.Stream(device="cpu") if hasattr(torch, "Stream") else None,
        inflight_param_registry=InflightParamRegistry(),
    )  # fmt: skip
    offload = SimpleNamespace(get_param_coordinator=lambda: coordinator)
    return SimpleNamespace(optimizer=SimpleNamespace(parameter_offload=offload)), coordinator


def test_a_recorded_order_is_forgotten_and_once_is_enough(engine):
    model, coordinator = engine
    forget_parameter_order(model)  # nothing is recorded yet: DeepSpeed itself would raise
    coordinator.reset_step = None
    coordinator._PartitionedParameterCoordinator__trace_mode = type(
        coordinator._PartitionedParameterCoordinator__trace_mode
    ).COMPLETE
    forget_parameter_order(model)
    assert coordinator.is_invalid_trace()
    forget_parameter_order(model)
    assert coordinator.is_invalid_trace()


@pytest.mark.parametrize("model", [torch.nn.Linear(2, 2), SimpleNamespace(optimizer=SimpleNamespace())])
def test_what_is_no_zero3_engine_is_left_alone(model):
    before = dict(vars(model))
    forget_parameter_order(model)
    assert vars(model) == before
