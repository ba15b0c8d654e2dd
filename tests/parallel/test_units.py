"""Which classes FSDP makes units of."""

import pytest

from tunebook.errors import RequestError
from tunebook.parallel.units import unit_classes


def test_units_are_the_models_blocks_or_the_named_classes(config_on, qwen2):
    assert unit_classes(config_on("fsdp", 4), qwen2) == ["Qwen2DecoderLayer"]
    named = config_on("fsdp", 4, "parallelism.wrap_classes=[Qwen2MLP]")
    assert unit_classes(named, qwen2) == ["Qwen2MLP"]


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
