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
    hopper = Gpu(name="card", memory_gib=0, compute_capability=(9, 0), generation=Generation.hopper)
    return [replace(hopper, memory_gib=size, uuid=f"GPU-{number}") for number, size in enumerate(memory_gib)]


@pytest.mark.parametrize(
    ("gib", "memory_gib", "requested", "num_processes", "is_sharded"),
    [
        (60, (80, 80, 80), None, 3, False),  # 60 x 1.15 + 1 = 70: a copy on each
        (1, (80, 80, 80), 2, 2, False),
        (60, (80, 48), None, 1, True),  # too large for the smallest: spread over all
        (0.0, (), None, 1, False),
        (0.0, (), 2, 2, False),
    ],
)
def test_a_copy_on_each_gpu_or_one_over_all(
    gib: float, memory_gib: tuple[float, ...], requested: int | None, num_processes: int, is_sharded: bool
) -> None:
    placement = choose_placement(gib, gpus(*memory_gib), requested=requested)
    assert (placement.num_processes, placement.is_sharded) == (num_processes, is_sharded)


def test_no_more_processes_than_gpus() -> None:
    with pytest.raises(RequestError) as raised:
        choose_placement(1, gpus(80, 80, 80), requested=4)
    assert raised.value.problem_id == "more-processes-than-gpus"


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
