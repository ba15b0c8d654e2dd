"""What is set up before the trainer wraps the model, and the check afterwards, in a run of one rank."""

from __future__ import annotations

import json
import os

import pytest

from tunebook.config.choices import Offload, Strategy
from tunebook.config.schema import FsdpConfig, ParallelismConfig, ZeroConfig
from tunebook.errors import RequestError
from tunebook.record.manifest import read_manifest, start_manifest
from tunebook.train.spread import join_ranks

LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def without_launcher(monkeypatch):
    for name in LAUNCHER:
        monkeypatch.setenv(name, "0")  # so that it is taken away again afterwards
        monkeypatch.delenv(name)


def test_a_run_records_what_its_model_was_wrapped_in(config, run, changed, tmp_path):
    start_manifest(make(tmp_path / "run"), config, world_size=1, command=["tunebook"])
    folder, code, _ = run(changed(config, training={"max_steps": 1}))
    assert code == 0
    assert read_manifest(folder)["parallelism_found"] == {
        "strategy": "single",
        "wrapper": "Qwen2ForCausalLM",
        "ranks": 1,
    }
    assert not (folder / "deepspeed.json").exists()


def make(folder):
    folder.mkdir()
    return folder


def test_fsdp_that_became_something_else_ends_with_7_before_a_step(config, run, changed, without_launcher):
    """On a CPU accelerate leaves FSDP out without a word. A rule refuses it there; this is the net under the rule."""
    asked = changed(config, training={"max_steps": 1})
    asked.parallelism = FsdpConfig(strategy=Strategy.fsdp)
    folder, code, lines = run(asked)
    assert code == 7
    reason = json.loads((folder / "outcome-0.json").read_text())["reason"]
    assert "on rank 0 strategy fsdp was asked for and ddp found" in reason
    assert "(DistributedDataParallel)" in reason
    assert lines == []


def test_one_rank_that_nobody_launched_is_made_a_group_of_one(config, changed, without_launcher):
    config.parallelism = ParallelismConfig(strategy=Strategy.ddp)
    join_ranks(config)
    assert "WORLD_SIZE" not in os.environ  # one rank has nobody to agree with
    config.parallelism = FsdpConfig(strategy=Strategy.fsdp)
    join_ranks(config)
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["MASTER_ADDR"]) == ("0", "1", "127.0.0.1")
    assert int(os.environ["MASTER_PORT"]) > 0


def test_a_rank_that_was_launched_keeps_its_place(config, without_launcher, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    config.parallelism = FsdpConfig(strategy=Strategy.fsdp)
    join_ranks(config)
    assert "RANK" not in os.environ


def test_nvme_without_libaio_is_refused_before_the_model_is_loaded(config, without_launcher, monkeypatch):
    import sys
    from types import SimpleNamespace

    builders = SimpleNamespace(AsyncIOBuilder=lambda: SimpleNamespace(is_compatible=lambda: False))
    fake = SimpleNamespace(init_distributed=lambda **settings: None)
    monkeypatch.setitem(sys.modules, "deepspeed", fake)
    monkeypatch.setitem(sys.modules, "deepspeed.ops.op_builder", builders)
    config.parallelism = ZeroConfig(strategy=Strategy.zero3, offload_optimizer=Offload.nvme, nvme_path="/disk")
    with pytest.raises(RequestError, match=r"apt install libaio-dev"):
        join_ranks(config)
