from __future__ import annotations

import json

import pytest
import torch

from tunebook.config.choices import Checkpointing, Generation
from tunebook.config.frozen import config_to_yaml
from tunebook.train.out_of_memory import memory_ran_out

GIB = 2**30
WITHOUT_STEP = "before the first step was over"
OF_THE_GPU = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.47 GiB.")


@pytest.fixture
def on_a_gpu(monkeypatch):
    """The GPU memory of a run whose last allocation failed (h100_held_out.jsonl, edge_3102_2)."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (int(1.81 * GIB), int(79.18 * GIB)))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: int(76.63 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: int(63.79 * GIB))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: int(66.29 * GIB))


@pytest.fixture
def told(config, tmp_path):
    """The message of a run after a step, with these rows per pass and passes per step."""

    def tell(error=OF_THE_GPU, *, rows=29, passes=2, steps=3, checkpointing=Checkpointing.disabled):
        config.hardware.generation = Generation.hopper
        config.activation.checkpointing = checkpointing
        (tmp_path / "run.yaml").write_text(config_to_yaml(config))
        plan = {"memory_gib": {"allocated": 65.732}, "batch": {"micro": rows, "accumulation": passes}}
        (tmp_path / "plan.json").write_text(json.dumps(plan))
        lines = [json.dumps({"step": step, "num_steps": 1, "loss": 1.0}) for step in range(1, steps + 1)]
        (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
        return memory_ran_out(tmp_path, error)

    return tell


@pytest.mark.usefixtures("on_a_gpu")
def test_message_compares_gpu_memory_with_the_plan(told, monkeypatch):
    error = told()
    assert (error.exit_code, error.problem_id) == (3, "memory-ran-out")
    assert error.message == (
        "the GPU ran out of memory after step 3: tensors took up to 66.3 of its 79.2 GiB where 65.7 were planned, 12.8 "
        "were lost to fragmentation, and 0.7 were held by CUDA's context, NCCL and other processes (nvidia-smi lists "
        "those); use fewer rows in a pass: training.micro_batch_size=2 (now 29)"
    )
    assert WITHOUT_STEP in told(steps=0).message
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "5")
    assert told().message.startswith("the GPU of rank 5 ran out of memory after step 3: ")


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")], ids=repr)
def test_host_memory_advice_does_not_mention_rows(told, error):
    assert told(error).message == (
        "the memory of the host ran out after step 3; offload less to it, or start fewer ranks on it: tunebook plan "
        "shows what each host needs"
    )


def test_a_damaged_log_hides_nothing(told, tmp_path):
    error = told(MemoryError())
    (tmp_path / "metrics.jsonl").write_text("{nothing\n{}\n")
    assert memory_ran_out(tmp_path, MemoryError()).message == error.message.replace("after step 3", WITHOUT_STEP)


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize(
    ("rows", "passes", "checkpointing", "expected"),
    [
        (28, 15, "disabled", "training.micro_batch_size=21 (now 28)"),  # 420 rows in a step either way
        (7, 1, "enabled", "training.micro_batch_size=1 (now 7)"),
        (1, 4, "disabled", "keep fewer activations: activation=checkpointing"),
        (1, 4, "enabled", "--compare parallelism=zero3,fsdp,fsdp_offload"),
    ],
)
def test_it_names_a_change_that_takes_less(told, rows, passes, checkpointing, expected):
    assert expected in told(rows=rows, passes=passes, checkpointing=Checkpointing[checkpointing]).message


@pytest.mark.usefixtures("on_a_gpu")
def test_without_a_plan_whole_layers_may_be_recomputed(told, tmp_path):
    told()
    (tmp_path / "plan.json").unlink()
    assert "keep fewer activations: activation=checkpointing" in memory_ran_out(tmp_path, OF_THE_GPU).message


@pytest.mark.usefixtures("on_a_gpu")
def test_silent_gpu_causes_no_second_error(told, monkeypatch):
    def fail():
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "mem_get_info", fail)
    assert told().message.startswith("the GPU ran out of memory after step 3; use fewer rows")


@pytest.mark.usefixtures("on_a_gpu")
def test_a_run_without_a_plan_is_told_what_filled_the_gpu(told, tmp_path):
    told()
    (tmp_path / "plan.json").unlink()
    assert "up to 66.3 of its 79.2 GiB, 12.8 were lost" in memory_ran_out(tmp_path, OF_THE_GPU).message
