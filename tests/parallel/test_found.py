"""What a model was wrapped in, read off the wrapped model."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tunebook.parallel.found import find_parallelism


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x)


def blocks():
    return nn.Sequential(Block(), Block())


def sharded(mesh, **settings):
    model = blocks()
    for block in model:
        fully_shard(block, mesh=mesh, **settings)
    return fully_shard(model, mesh=mesh, **{key: value for key, value in settings.items() if key == "mp_policy"})


def test_a_bare_module():
    assert find_parallelism(blocks()) == {"strategy": "single", "wrapper": "Sequential", "ranks": 1}


def test_ddp(one_gloo_rank):
    found = find_parallelism(DistributedDataParallel(blocks()))
    assert found == {"strategy": "ddp", "wrapper": "DistributedDataParallel", "ranks": 1}


def test_fsdp_in_bf16(one_gloo_rank):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = find_parallelism(sharded(init_device_mesh("cpu", (1,)), mp_policy=policy))
    assert found == {
        "strategy": "fsdp",
        "wrapper": "FSDPSequential",
        "ranks": 1,
        "mesh": [1],
        "mesh_axes": [],
        "placements": [found["placements"][0]],
        "units": 2,
        "unit_classes": ["Block"],
        "whole_parameters": 0,
        "resharded_after_forward": True,
        "offload_parameters": "none",
        "weights": "fp32",
        "gathered": "bf16",
        "reduced": "fp32",
    }
    assert found["placements"][0] in ("S(0)", "Shard(dim=0)")


def test_fsdp_that_keeps_what_it_gathered(one_gloo_rank):
    found = find_parallelism(sharded(init_device_mesh("cpu", (1,)), reshard_after_forward=False))
    assert (found["strategy"], found["resharded_after_forward"]) == ("fsdp_grad_op", False)
    assert (found["gathered"], found["reduced"]) == ("fp32", "fp32")


def test_hsdp_has_a_mesh_of_two_axes(one_gloo_rank):
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
    found = find_parallelism(sharded(mesh))
    assert (found["strategy"], found["mesh"], found["ranks"]) == ("hsdp", [1, 1], 1)
    assert found["mesh_axes"] == ["dp_replicate", "dp_shard"]


def test_a_parameter_that_fsdp_left_whole_is_counted(one_gloo_rank):
    model = blocks()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)), ignored_params={model[0].linear.weight})
    assert find_parallelism(model)["whole_parameters"] == 1


def test_a_frozen_parameter_that_was_left_whole_is_counted_too(one_gloo_rank):
    """accelerate leaves 4-bit weights that are stored as bytes out of the sharding, with a warning only."""
    model = blocks()
    frozen = model[0].linear.weight.requires_grad_(False)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)), ignored_params={frozen})
    assert find_parallelism(model)["whole_parameters"] == 1


def tensor(device="cuda", dtype=torch.float32):
    return SimpleNamespace(device=SimpleNamespace(type=device), dtype=dtype, numel=lambda: 1)


def engine(stage, parameters, device="cuda", autocast=None, **optimizer):
    return SimpleNamespace(
        zero_optimization_stage=lambda: stage,
        optimizer=SimpleNamespace(**optimizer),
        module=SimpleNamespace(parameters=lambda: iter(parameters)),
        device=SimpleNamespace(type=device),
        dp_world_size=4,
        torch_autocast_enabled=lambda: autocast is not None,
        torch_autocast_dtype=lambda: autocast,
    )


@pytest.mark.parametrize(("shards_gradients", "strategy"), [(False, "zero1"), (True, "zero2")])
def test_zero_1_and_2_differ_in_what_their_optimizer_shards(shards_gradients, strategy):
    model = engine(
        2, [tensor()], autocast=torch.bfloat16, partition_gradients=shards_gradients, cpu_offload=False,
        single_partition_of_fp32_groups=[tensor()],
    )  # fmt: skip
    found = find_parallelism(model)
    assert (found["strategy"], found["ranks"], found["offload_optimizer"]) == (strategy, 4, "none")
    assert (found["autocast"], found["weights"]) == ("bf16", "fp32")


def test_an_offload_that_is_only_said_is_not_found():
    model = engine(
        2, [tensor()], partition_gradients=True, cpu_offload=True, single_partition_of_fp32_groups=[tensor("cuda")]
    )
    assert find_parallelism(model)["offload_optimizer"] == "none"


def test_a_run_on_a_cpu_takes_the_optimizers_word():
    states = [tensor("cpu")]
    model = engine(2, [tensor("cpu")], "cpu", partition_gradients=True, cpu_offload=True,
                   single_partition_of_fp32_groups=states)  # fmt: skip
    assert find_parallelism(model)["offload_optimizer"] == "cpu"
    model.optimizer.cpu_offload = False
    assert find_parallelism(model)["offload_optimizer"] == "none"


def zero3(shards, **optimizer):
    parameters = [SimpleNamespace(ds_tensor=shard) for shard in shards]
    settings = {"params_in_nvme_and_cpu": False, "swap_optimizer": False, "offload_optimizer": True,
                "offload_param": True, "fp32_partitioned_groups_flat": [tensor("cpu")]}  # fmt: skip
    return engine(3, parameters, **(settings | optimizer))


def test_zero_3_is_found_where_its_shards_are():
    found = find_parallelism(zero3([tensor("cpu"), tensor("cpu")]))
    assert found["strategy"] == "zero3"
    assert (found["offload_optimizer"], found["offload_parameters"]) == ("cpu", "cpu")
    assert find_parallelism(zero3([tensor("cpu"), tensor("cuda")]))["offload_parameters"] == "cpu and none"
    in_files = find_parallelism(zero3([tensor("cpu")], params_in_nvme_and_cpu=True, swap_optimizer=True))
    assert (in_files["offload_optimizer"], in_files["offload_parameters"]) == ("nvme", "nvme")


def test_zero_3_with_a_whole_parameter_is_not_zero_3():
    model = zero3([tensor()])
    parameters = [*model.module.parameters(), tensor()]
    model.module.parameters = lambda: iter(parameters)
    assert find_parallelism(model)["strategy"] == "zero3 with 1 whole parameters"
