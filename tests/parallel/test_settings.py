"""Settings of DDP, DeepSpeed and FSDP for every choice of the parallelism group; forgetting ZeRO-3's order."""

import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import TrainingArguments

from tunebook.parallel.deepspeed import deepspeed_settings, forget_parameter_order
from tunebook.parallel.fsdp import (
    autocast_dtype,
    fsdp_arguments,
    hsdp_sizes,
    mixed_precision_policy,
)
from tunebook.train.arguments import _parallelism

from ..conftest import config_of


def qwen3b(*overrides):
    return config_of("qwen3b_zero2", *overrides)


def zero_of(*overrides):
    return deepspeed_settings(qwen3b(*overrides))["zero_optimization"]


def test_zero1_leaves_the_rest_to_deepspeed():
    assert zero_of("parallelism=zero1") == {"stage": 1, "reduce_bucket_size": "auto"}


def test_zero3_with_everything_on_the_host():
    zero = zero_of("parallelism=zero3_offload")
    assert zero["stage"] == 3
    assert zero["offload_optimizer"]["device"] == zero["offload_param"]["device"] == "cpu"
    assert zero["stage3_gather_16bit_weights_on_model_save"] is True
    assert zero["stage3_prefetch_bucket_size"] == "auto"


def test_a_setting_of_zero_is_not_left_to_the_trainer():
    zero = zero_of(
        "parallelism=zero3", "parallelism.param_persistence_threshold=0", "parallelism.prefetch_bucket_size=0"
    )
    assert zero["stage3_param_persistence_threshold"] == zero["stage3_prefetch_bucket_size"] == 0


def test_nvme_names_its_folder():
    for typed, folder in (("/mnt/nvme", "/mnt/nvme"), ('"~/nvme"', str(Path.home() / "nvme"))):
        zero = zero_of("parallelism=zero3_nvme", f"parallelism.nvme_path={typed}")
        assert zero["offload_param"]["nvme_path"] == folder


def test_nvme_buffers_hold_what_a_rank_has_of_the_embedding():
    """DeepSpeed ends a run whose largest parameter is above its default of 1e8 elements: 50,280 x 2,560 of Dolly's."""
    one = qwen3b("model=dolly_v2_3b", "parallelism=zero3_nvme", "hardware.gpus_per_node=1")
    two = qwen3b("model=dolly_v2_3b", "parallelism=zero3_nvme", "hardware.gpus_per_node=2")
    settings = [deepspeed_settings(config)["zero_optimization"] for config in (one, two)]
    assert settings[0]["offload_param"]["buffer_size"] == 128_716_800
    assert "buffer_size" not in settings[1]["offload_param"]
    assert "buffer_size" not in settings[0]["offload_optimizer"]


def test_a_said_setting_is_written_and_a_silent_one_is_not():
    zero = zero_of("parallelism=zero3", "parallelism.max_live_parameters=1000", "parallelism.sub_group_size=5")
    assert (zero["stage3_max_live_parameters"], zero["sub_group_size"]) == (1000, 5)
    assert "stage3_max_reuse_distance" not in zero


@pytest.mark.parametrize(("choice", "reshards"), [("fsdp", True), ("fsdp_grad_op", False)])
def test_fsdp_reshards_or_keeps(choice, reshards):
    assert fsdp_arguments(qwen3b(f"parallelism={choice}"))["fsdp_config"]["reshard_after_forward"] is reshards


def test_fsdp_offload_sums_on_the_host_over_gloo():
    arguments = fsdp_arguments(qwen3b("parallelism=fsdp_offload"))
    assert arguments["fsdp_config"]["cpu_offload"] is True
    assert arguments["ddp_backend"] == "cuda:nccl,cpu:gloo"
    assert "ddp_backend" not in fsdp_arguments(qwen3b("parallelism=fsdp"))


def test_transformers_reads_every_setting_of_fsdp():
    """It drops those that it does not know in silence: `offload_params` was one."""
    read = inspect.getsource(TrainingArguments._process_fsdp_args)
    settings = fsdp_arguments(qwen3b("parallelism=fsdp_offload"))["fsdp_config"]
    assert [key for key in settings if f'"{key}"' not in read] == []


def test_hsdp_is_copies_times_shards():
    config = qwen3b("parallelism=hsdp", "parallelism.shard_group_size=2", "hardware.gpus_per_node=8")
    assert hsdp_sizes(config) == (4, 2)
    sizes = fsdp_arguments(config)["parallelism_config"]
    assert (sizes.dp_replicate_size, sizes.dp_shard_size) == (4, 2)
    assert hsdp_sizes(qwen3b("parallelism=fsdp")) is None


BF16 = ("precision=bf16", "hardware=hopper")


def test_zero_leaves_bf16_to_autocast_unless_told_to_cast():
    autocast = deepspeed_settings(qwen3b("parallelism=zero2", *BF16))
    assert autocast["torch_autocast"] == {"enabled": True, "dtype": "bfloat16"}
    assert "bf16" not in autocast  # accelerate would turn it on
    cast = deepspeed_settings(qwen3b("parallelism=zero2", "parallelism.mixed_precision=cast", *BF16))
    assert cast["bf16"] == {"enabled": "auto"}
    assert "torch_autocast" not in cast
    assert "torch_autocast" not in deepspeed_settings(qwen3b("parallelism=zero2", "precision=fp32"))


@pytest.mark.parametrize(("precision", "half"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
@pytest.mark.parametrize("is_cast", [False, True], ids=["autocast", "cast"])
def test_fsdp_gathers_16_bits_and_sums_gradients_in_fp32(precision, half, is_cast):
    way = f"parallelism.mixed_precision={'cast' if is_cast else 'autocast'}"
    config = qwen3b("parallelism=fsdp", f"precision={precision}", "hardware=hopper", way)
    policy = mixed_precision_policy(config)
    formats = (policy.param_dtype, policy.reduce_dtype, policy.output_dtype, policy.cast_forward_inputs)
    assert formats == (half, torch.float32, None if is_cast else torch.float32, is_cast)
    assert autocast_dtype(config) == (None if is_cast else half)


@pytest.mark.parametrize("overrides", [["precision=fp32"], [*BF16, "precision.master_weights=bf16"]])
def test_fsdp_mixes_nothing_where_there_is_one_format(overrides):
    config = qwen3b("parallelism=fsdp", *overrides)
    assert mixed_precision_policy(config) is None
    assert autocast_dtype(config) is None


@pytest.mark.parametrize(
    ("words", "bucket"),
    [
        (["hardware=hopper"], 400),
        (["hardware=hopper", "hardware.num_nodes=2"], None),
        (["hardware=cpu", "precision=fp32", "attention=sdpa"], None),
    ],
)
def test_ddp_sends_no_buffers_and_large_messages_inside_one_machine_with_gpus(words, bucket):
    arguments = _parallelism(qwen3b("parallelism=ddp", "hardware.gpus_per_node=2", *words))
    assert arguments.get("ddp_bucket_cap_mb") == bucket
    assert arguments["ddp_broadcast_buffers"] is False


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
