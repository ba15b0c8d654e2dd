"""How a model is wrapped, and the comparison with what was asked for on every rank."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tunebook.config.choices import PeftMethod
from tunebook.errors import InvalidTrainingError, RequestError
from tunebook.parallel.wrapped import expected_parallelism, find_parallelism, require_expected, unit_classes


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
        "unit_classes": ["Block"],
        "whole_parameters": 0,
        "offload_parameters": "none",
        "weights": "fp32",
        "gathered": "bf16",
        "reduced": "fp32",
    }


def test_fsdp_that_keeps_what_it_gathered(one_gloo_rank):
    found = find_parallelism(sharded(init_device_mesh("cpu", (1,)), reshard_after_forward=False))
    assert found["strategy"] == "fsdp_grad_op"
    assert (found["gathered"], found["reduced"]) == ("fp32", "fp32")


def test_hsdp_has_a_mesh_of_two_axes(one_gloo_rank):
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
    found = find_parallelism(sharded(mesh))
    assert (found["strategy"], found["mesh"], found["ranks"]) == ("hsdp", [1, 1], 1)


def test_a_frozen_parameter_that_was_left_whole_is_counted(one_gloo_rank):
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


FSDP = {
    "strategy": "fsdp", "wrapper": "FSDPQwen2ForCausalLM", "ranks": 4, "mesh": [4], "offload_parameters": "none",
    "whole_parameters": 0, "weights": "fp32", "gathered": "bf16", "reduced": "fp32",
    "unit_classes": ["Qwen2DecoderLayer"],
}  # fmt: skip
ZERO2 = {
    "strategy": "zero2", "wrapper": "DeepSpeedEngine", "ranks": 4, "autocast": "bf16", "offload_optimizer": "none",
    "offload_parameters": "none",
}  # fmt: skip
DDP = {"strategy": "ddp", "wrapper": "DistributedDataParallel", "ranks": 4}


@pytest.mark.parametrize(
    ("choice", "wrapped"),
    [
        ("fsdp", FSDP),
        ("fsdp_offload", FSDP | {"offload_parameters": "cpu"}),
        ("fsdp_grad_op", FSDP | {"strategy": "fsdp_grad_op"}),
        ("zero2", ZERO2),
        ("zero3_nvme", ZERO2 | {"strategy": "zero3", "offload_optimizer": "nvme", "offload_parameters": "nvme"}),
        ("ddp", DDP),
    ],
)
def test_what_was_asked_for_passes(config_on, choice, wrapped):
    require_expected(config_on(choice, 4), [wrapped] * 4, wrapped.get("unit_classes", []))


def test_hsdp_is_a_mesh_of_copies_and_shards(config_on):
    expected = expected_parallelism(config_on("hsdp", 4))
    assert (expected["strategy"], expected["mesh"], expected["ranks"]) == ("hsdp", [2, 2], 4)


def test_ddp_on_one_rank_is_the_bare_module(config_on):
    assert expected_parallelism(config_on("ddp", 1))["strategy"] == "single"
    for found in ({"strategy": "single", "wrapper": "Qwen2ForCausalLM", "ranks": 1}, DDP | {"ranks": 1}):
        require_expected(config_on("ddp", 1), [found], [])


@pytest.mark.parametrize(
    ("choice", "wrapped", "message"),
    [
        ("fsdp", DDP, "strategy fsdp was asked for and ddp found.*DistributedDataParallel"),
        ("fsdp_offload", FSDP, "offload_parameters cpu was asked for and none found"),
        ("fsdp", FSDP | {"whole_parameters": 2}, "whole_parameters 0 was asked for and 2 found"),
        ("fsdp", FSDP | {"gathered": "fp32"}, "gathered bf16 was asked for and fp32 found"),
        ("fsdp", FSDP | {"reduced": "bf16"}, "reduced fp32 was asked for and bf16 found"),
        ("fsdp", FSDP | {"unit_classes": ["Embedding"]}, "units of Qwen2DecoderLayer were asked for"),
        ("zero2", ZERO2 | {"strategy": "zero1"}, "strategy zero2 was asked for and zero1 found"),
        ("zero2", ZERO2 | {"autocast": None}, "autocast bf16 was asked for and None found"),
        ("ddp", DDP | {"ranks": 2}, "ranks 4 was asked for and 2 found"),
    ],
)
def test_anything_else_is_refused_by_name_on_the_rank_that_has_it(config_on, choice, wrapped, message):
    expected = {"fsdp": FSDP, "fsdp_offload": FSDP | {"offload_parameters": "cpu"}, "zero2": ZERO2, "ddp": DDP}[choice]
    units = expected.get("unit_classes", [])
    with pytest.raises(InvalidTrainingError, match=f"parallelism=.* on rank 2 {message}") as caught:
        require_expected(config_on(choice, 4), [expected, expected, wrapped, expected], units)
    assert (caught.value.exit_code, caught.value.problem_id) == (7, "other-parallelism")


def test_bf16_weights_are_expected_where_they_were_asked_for(config_on):
    expected = expected_parallelism(config_on("fsdp", 4, master_weights="bf16"))
    assert (expected["weights"], expected["gathered"], expected["reduced"]) == ("bf16", "bf16", "bf16")
    adapted = config_on("fsdp", 4)
    adapted.peft.method = PeftMethod.lora
    assert "weights" not in expected_parallelism(adapted)


def test_what_computes_in_fp16_is_gathered_so_and_summed_in_fp32(config_on):
    expected = expected_parallelism(config_on("fsdp", 4, compute="fp16"))
    assert (expected["weights"], expected["gathered"], expected["reduced"]) == ("fp32", "fp16", "fp32")


def test_fp8_layers_are_those_that_were_converted_on_every_rank(config_on):
    fp8, sound = config_on("fsdp", 2, compute="fp8"), FSDP | {"ranks": 2, "mesh": [2], "fp8_layers": 72}
    units = FSDP["unit_classes"]
    require_expected(fp8, [sound] * 2, units, 72)
    for second in (sound | {"fp8_layers": 71}, {key: sound[key] for key in sound if key != "fp8_layers"}):
        with pytest.raises(InvalidTrainingError, match="on rank 1 fp8_layers 72 was asked for") as caught:
            require_expected(fp8, [sound, second], units, 72)
        assert (caught.value.exit_code, caught.value.problem_id) == (7, "other-parallelism")


# Units


def test_units_are_the_models_blocks_or_the_named_classes(config_on, qwen2):
    assert unit_classes(config_on("fsdp"), qwen2) == ["Qwen2DecoderLayer"]
    named = config_on("fsdp", wrap_classes=["Qwen2MLP"])
    assert unit_classes(named, qwen2) == ["Qwen2MLP"]


def test_a_class_that_the_model_has_not_is_refused(config_on, qwen2):
    wrong = config_on("fsdp", wrap_classes=["LlamaDecoderLayer"])
    with pytest.raises(RequestError) as caught:
        unit_classes(wrong, qwen2)
    assert caught.value.problem_id == "wrap-class-unknown"


def test_a_model_whose_blocks_nobody_knows_must_be_told(config_on, qwen2):
    qwen2._no_split_modules = None
    with pytest.raises(RequestError) as caught:
        unit_classes(config_on("fsdp"), qwen2)
    assert caught.value.problem_id == "wrap-class-unknown"
