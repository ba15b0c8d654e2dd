"""Which classes FSDP makes units of."""

from types import SimpleNamespace

import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model

from tunebook.errors import RequestError
from tunebook.parallel.units import classes_by_size, unit_classes


@pytest.mark.parametrize(
    ("min_num_parameters", "classes"),
    [
        (100_000, ["Qwen2Attention", "Qwen2MLP"]),  # the innermost: not the blocks that hold them
        (200_000, ["Qwen2MLP"]),
        (443_328, ["Qwen2DecoderLayer"]),
    ],
)
def test_by_size_takes_the_innermost_classes_that_are_large_enough(qwen2, min_num_parameters, classes):
    assert classes_by_size(qwen2, min_num_parameters) == classes


def test_a_size_that_no_part_has_names_the_largest(qwen2):
    with pytest.raises(RequestError, match="443328") as caught:
        classes_by_size(qwen2, 443_329)
    assert caught.value.problem_id == "units-too-large"


def test_by_block_takes_the_models_own_or_those_named(config_on, qwen2):
    assert unit_classes(config_on("fsdp", 4), qwen2) == ["Qwen2DecoderLayer"]
    named = config_on("fsdp", 4, "parallelism.wrap_classes=[Qwen2MLP]")
    assert unit_classes(named, qwen2) == ["Qwen2MLP"]


def _shard(model, classes):
    """Make units of the classes as accelerate does, on one rank."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=classes
    )
    fsdp2_prepare_model(
        SimpleNamespace(
            state=SimpleNamespace(fsdp_plugin=plugin), mixed_precision="no", device=torch.device("cpu"),
            is_main_process=True, torch_device_mesh=None,
        ),
        model,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("min_num_parameters", "classes"),
    [
        (1, ["Qwen2Attention", "Qwen2DecoderLayer", "Qwen2MLP"]),
        (200_000, ["Qwen2DecoderLayer", "Qwen2MLP"]),
        (443_328, ["Qwen2DecoderLayer"]),
    ],
)
def test_by_size_leaves_the_root_nothing_of_a_block(
    config_on, qwen2, one_gloo_rank, tmp_path, min_num_parameters, classes
):
    words = ["parallelism.wrap_policy=size", f"parallelism.wrap_min_num_parameters={min_num_parameters}"]
    assert unit_classes(config_on("fsdp", 4, *words), qwen2) == classes
    tokens = torch.arange(24).reshape(2, 12)
    expected = qwen2(tokens, labels=tokens, use_cache=False).loss
    expected.backward()
    gradients = {name: parameter.grad for name, parameter in qwen2.named_parameters()}
    qwen2.zero_grad()
    _shard(qwen2, classes)
    loss = qwen2(tokens, labels=tokens, use_cache=False).loss
    own = qwen2._get_fsdp_state()._fsdp_param_group
    names = [] if own is None else [parameter._module_info.param_name for parameter in own.fsdp_params]
    assert names == []  # the last norm is in a unit with the embeddings
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for name, parameter in qwen2.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), gradients[name], rtol=1e-5, atol=1e-4)


def test_a_class_that_the_model_has_not_is_refused(config_on, qwen2):
    wrong = config_on("fsdp", 4, "parallelism.wrap_classes=[LlamaDecoderLayer]")
    with pytest.raises(RequestError) as caught:
        unit_classes(wrong, qwen2)
    assert caught.value.problem_id == "wrap-class-unknown"


def test_a_model_whose_blocks_nobody_knows_must_be_told(config_on, qwen2):
    qwen2._no_split_modules = None
    with pytest.raises(RequestError) as caught:
        unit_classes(config_on("fsdp", 4), qwen2)
    assert caught.value.problem_id == "wrap-class-unknown"
