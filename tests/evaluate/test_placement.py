from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from tunebook.config.choices import Generation, MasterWeights, PeftMethod, Weights
from tunebook.config.schema import ModelConfig, PeftSettings, RunConfig
from tunebook.errors import RequestError
from tunebook.evaluate.placement import choose_placement, loaded_gib
from tunebook.hardware.detect import Gpu


def gpus(*memory_gib: float) -> list[Gpu]:
    return [
        Gpu(name="card", memory_gib=size, compute_capability=(9, 0), generation=Generation.hopper, uuid=f"GPU-{number}")
        for number, size in enumerate(memory_gib)
    ]


def test_a_model_that_fits_one_gpu_has_a_copy_on_each() -> None:
    placement = choose_placement(60, gpus(80, 80, 80))  # 60 x 1.15 + 1 = 70
    assert (placement.num_processes, placement.is_sharded) == (3, False)
    assert choose_placement(1, gpus(80, 80, 80), requested=2).num_processes == 2
    with pytest.raises(RequestError) as raised:
        choose_placement(1, gpus(80, 80, 80), requested=4)
    assert raised.value.problem_id == "more-processes-than-gpus"


def test_a_model_that_is_too_large_for_the_smallest_gpu_is_spread_over_all() -> None:
    placement = choose_placement(60, gpus(80, 48))
    assert (placement.num_processes, placement.is_sharded) == (1, True)


def test_a_cpu_has_one_process_unless_more_are_requested() -> None:
    assert choose_placement(0.0, []).num_processes == 1
    assert choose_placement(0.0, [], requested=2).num_processes == 2


def test_the_size_of_the_weights_is_read_from_their_files(
    tmp_path: Path, known_folder: Path, known_model: PreTrainedModel, cpu_config: RunConfig
) -> None:
    count = sum(weight.numel() for weight in known_model.parameters())
    assert loaded_gib(cpu_config, known_folder) == count * 4 / 2**30
    in_bf16 = replace(cpu_config, precision=replace(cpu_config.precision, master_weights=MasterWeights.bf16))
    assert loaded_gib(in_bf16, known_folder) == count * 2 / 2**30
    base = replace(cpu_config, model=ModelConfig(path=str(known_folder), weights=Weights.pretrained))
    (tmp_path / "adapter_config.json").write_text("{}")
    assert loaded_gib(base, tmp_path) == loaded_gib(base, None) == count * 4 / 2**30
    assert loaded_gib(cpu_config, None) == 0.0  # random weights: there is no file
    assert loaded_gib(replace(base, peft=PeftSettings(method=PeftMethod.qlora)), tmp_path) == 0.0
