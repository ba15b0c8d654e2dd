"""Which classes FSDP makes units of."""

import pytest

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
    with pytest.raises(RequestError, match=r"largest kind, Qwen2DecoderLayer, has 443,328.*parameters=443328 or"):
        classes_by_size(qwen2, 443_329)


def test_by_block_takes_the_models_own_or_those_named(config_on, qwen2):
    assert unit_classes(config_on("fsdp", 4), qwen2) == ["Qwen2DecoderLayer"]
    named = config_on("fsdp", 4, "parallelism.wrap_classes=[Qwen2MLP]")
    assert unit_classes(named, qwen2) == ["Qwen2MLP"]
    by_size = config_on("fsdp", 4, "parallelism.wrap_policy=size", "parallelism.wrap_min_num_parameters=100000")
    assert unit_classes(by_size, qwen2) == ["Qwen2Attention", "Qwen2MLP"]


def test_a_class_that_the_model_has_not_names_its_block(config_on, qwen2):
    wrong = config_on("fsdp", 4, "parallelism.wrap_classes=[LlamaDecoderLayer]")
    with pytest.raises(RequestError, match=r"has no LlamaDecoderLayer.*wrap_classes=\[Qwen2DecoderLayer\]"):
        unit_classes(wrong, qwen2)


def test_a_model_whose_blocks_nobody_knows_must_be_told(config_on, qwen2):
    qwen2._no_split_modules = None
    with pytest.raises(RequestError, match=r"no block of the model is known.*\[Qwen2DecoderLayer\]"):
        unit_classes(config_on("fsdp", 4), qwen2)
