"""What is set up before the trainer wraps the model, and the check afterwards, in a run of one rank."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import distributed
from transformers.training_args import ParallelMode
from trl import SFTConfig

from tunebook.config.choices import Generation, Offload, Strategy
from tunebook.config.schema import FsdpConfig, ParallelismConfig, ZeroConfig
from tunebook.errors import RequestError
from tunebook.processes import free_port
from tunebook.train.spread import join_ranks

from .conftest import outcome

LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def without_launcher(monkeypatch):
    for name in LAUNCHER:
        monkeypatch.setenv(name, "0")  # so that it is taken away again afterwards
        monkeypatch.delenv(name)


def test_model_without_fsdp_ends_with_7(config, run, changed, without_launcher):
    """On a CPU accelerate silently skips FSDP. A rule refuses that; this is a second check."""
    fsdp = changed(config, training={"max_steps": 1})
    fsdp.parallelism = FsdpConfig(strategy=Strategy.fsdp)
    folder, code, lines = run(fsdp)
    assert code == 7
    reason = outcome(folder)["reason"]
    assert "on rank 0 strategy fsdp was asked for and ddp found" in reason
    assert "(DistributedDataParallel)" in reason
    assert lines == []


def test_one_rank_that_nobody_launched_is_made_a_group_of_one(config, changed, without_launcher):
    config.parallelism = ParallelismConfig(strategy=Strategy.ddp)
    join_ranks(config)
    assert "WORLD_SIZE" not in os.environ  # one rank has nobody to agree with
    config.hardware.generation = Generation.hopper  # on a CPU the group would be made here
    config.parallelism = FsdpConfig(strategy=Strategy.fsdp)
    join_ranks(config)
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["MASTER_ADDR"]) == ("0", "1", "127.0.0.1")
    assert int(os.environ["MASTER_PORT"]) > 0


def test_a_rank_that_was_launched_keeps_its_place(config, without_launcher, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    config.parallelism = FsdpConfig(strategy=Strategy.fsdp)
    config.hardware.generation = Generation.hopper
    join_ranks(config)
    assert "RANK" not in os.environ


@pytest.fixture
def launched(without_launcher, monkeypatch):
    """One rank as started by a launcher; its group is destroyed afterwards."""
    values = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
    for name, value in (values | {"MASTER_PORT": free_port()}).items():
        monkeypatch.setenv(name, str(value))
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    if distributed.is_initialized():
        distributed.destroy_process_group()


def timeout_of(group):
    return group._get_backend(torch.device("cpu")).options._timeout


def test_ranks_on_cpus_wait_for_each_other_as_long_as_was_asked(config, launched, tmp_path):
    """transformers would create the group without the timeout, but keeps an existing one."""
    config.parallelism = ParallelismConfig(strategy=Strategy.ddp)
    config.launcher.timeout_s = 77
    join_ranks(config)
    arguments = SFTConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, ddp_timeout=77, activation_checkpointing=False
    )
    assert arguments.parallel_mode is ParallelMode.DISTRIBUTED
    assert distributed.get_backend() == "gloo"
    assert timeout_of(distributed.group.WORLD) == timedelta(seconds=77)


def test_nvme_without_libaio_is_refused_before_the_model_is_loaded(config, without_launcher, monkeypatch):
    builders = SimpleNamespace(AsyncIOBuilder=lambda: SimpleNamespace(is_compatible=lambda: False))
    fake = SimpleNamespace(init_distributed=lambda **settings: None)
    monkeypatch.setitem(sys.modules, "deepspeed", fake)
    monkeypatch.setitem(sys.modules, "deepspeed.ops.op_builder", builders)
    config.parallelism = ZeroConfig(strategy=Strategy.zero3, offload_optimizer=Offload.nvme, nvme_path="/disk")
    with pytest.raises(RequestError) as caught:
        join_ranks(config)
    assert caught.value.problem_id == "libaio-missing"
