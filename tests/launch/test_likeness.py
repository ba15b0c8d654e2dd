"""What is said of an earlier run that only its machine makes another one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tunebook.checkpoint.record import Identity
from tunebook.config.choices import ResumeAnyway, Strategy
from tunebook.config.compose import compose
from tunebook.config.frozen import config_to_yaml
from tunebook.config.identity import HASH_VERSION, config_hash, result_settings
from tunebook.config.schema import RunConfig, world_size
from tunebook.hardware.detect import Machine
from tunebook.launch.likeness import on_another_machine
from tunebook.launch.resume import unfinished_run
from tunebook.plan.auto.resolve import resolve_auto
from tunebook.record.manifest import FORMAT

NO_GPU = Machine(gpus=[], driver=None, num_cpus=2, host_memory_gib=8.0)
NAME = "2026-01-01T00-00-00Z"

Stop = Callable[..., Path]


def resolved(outputs: Path, *words: str) -> RunConfig:
    return resolve_auto(compose("quickstart", [f"outputs={outputs}", "hardware=cpu", *words]).config, NO_GPU).config


@pytest.fixture
def stop(tmp_path: Path, make_checkpoint: Callable[..., Path]) -> Stop:
    """Leave a stopped run of a configuration, with a checkpoint."""

    def make(config: RunConfig, name: str = NAME) -> Path:
        folder = tmp_path / "quickstart" / name
        folder.mkdir(parents=True)
        manifest = {"format": FORMAT, "config_sha256": config_hash(config), "hash_version": HASH_VERSION}
        manifest["status"] = {"state": "stopped"}
        (folder / "manifest.json").write_text(json.dumps(manifest))
        (folder / "run.yaml").write_text(config_to_yaml(config))
        identity = Identity(
            strategy=config.parallelism.strategy.name,
            peft=config.peft.method.name,
            world_size=world_size(config),
            model={"name": "m", "revision": None, "config_sha256": None, "weights": "pretrained"},
            config_sha256=config_hash(config),
            hash_version=HASH_VERSION,
            settings=result_settings(config),
            data_sha256="0" * 64,
            tokenizer_sha256=None,
            chat_template_sha256=None,
        )
        make_checkpoint(folder, 5, identity=identity)
        return folder

    return make


def test_fewer_ranks_are_named_with_what_goes_on(tmp_path: Path, stop: Stop) -> None:
    folder = stop(resolved(tmp_path, "hardware.gpus_per_node=2"))
    said: list[str] = []
    assert unfinished_run(resolved(tmp_path, "hardware.gpus_per_node=1"), said.append) is None
    assert said == [
        f"not gone on with {folder}, which ended early: hardware.gpus_per_node was 2 and is 1; to go on: "
        f"training.resume={folder} 'training.resume_anyway=[world_size]'"
    ]


def test_another_strategy_on_another_machine_is_named_too(tmp_path: Path, stop: Stop) -> None:
    folder = stop(resolved(tmp_path, "hardware.gpus_per_node=2", "parallelism=ddp"))
    said: list[str] = []
    assert unfinished_run(resolved(tmp_path, "parallelism=single"), said.append) is None
    assert said == [
        f"not gone on with {folder}, which ended early: hardware.gpus_per_node was 2 and is 1, parallelism.strategy "
        f"was ddp and is single; to go on: training.resume={folder} 'training.resume_anyway=[world_size]'"
    ]


def test_another_strategy_alone_is_another_run(tmp_path: Path, stop: Stop) -> None:
    stop(resolved(tmp_path, "hardware.gpus_per_node=2", "parallelism=ddp"))
    said: list[str] = []
    assert unfinished_run(resolved(tmp_path, "hardware.gpus_per_node=2", "parallelism=zero1"), said.append) is None
    assert said == []


def test_only_the_newest_is_named(tmp_path: Path, stop: Stop) -> None:
    stop(resolved(tmp_path, "hardware.gpus_per_node=2"))
    newer = stop(resolved(tmp_path, "hardware.gpus_per_node=2"), "2026-01-02T00-00-00Z")
    said: list[str] = []
    unfinished_run(resolved(tmp_path, "hardware.gpus_per_node=1"), said.append)
    assert [line.partition(",")[0] for line in said] == [f"not gone on with {newer}"]


def test_what_was_allowed_already_stays_allowed(tmp_path: Path, stop: Stop) -> None:
    folder = stop(resolved(tmp_path, "hardware.gpus_per_node=2"))
    config = resolved(tmp_path, "hardware.gpus_per_node=1")
    config.training.resume_anyway = [ResumeAnyway.data]
    told = on_another_machine(config, folder, json.loads((folder / "manifest.json").read_text())["config_sha256"], ())
    assert told is not None
    assert told.endswith("'training.resume_anyway=[data,world_size]'")


def test_shards_that_another_strategy_cannot_load_are_named(tmp_path: Path, stop: Stop) -> None:
    earlier = resolved(tmp_path, "hardware.gpus_per_node=2", "parallelism=fsdp")
    folder = stop(earlier)
    now = resolved(tmp_path, "hardware.gpus_per_node=1")
    assert (earlier.parallelism.strategy, now.parallelism.strategy) == (Strategy.fsdp, Strategy.single)
    said: list[str] = []
    assert unfinished_run(now, said.append) is None
    (told,) = said
    assert told.startswith(
        f"not gone on with {folder}, which ended early: hardware.gpus_per_node was 2 and is 1, parallelism.strategy "
        "was fsdp and is single; it was saved by parallelism=fsdp, and this run has parallelism=single. Go on with "
    )
    assert "to go on:" not in told


def test_a_run_of_another_seed_is_not_named(tmp_path: Path, stop: Stop) -> None:
    stop(resolved(tmp_path, "hardware.gpus_per_node=2", "training.seed=7"))
    said: list[str] = []
    assert unfinished_run(resolved(tmp_path, "hardware.gpus_per_node=1"), said.append) is None
    assert said == []


def test_memory_that_was_typed_is_named(tmp_path: Path, stop: Stop) -> None:
    folder = stop(resolved(tmp_path, "hardware.memory_gib=20"))
    now = resolved(tmp_path, "hardware.memory_gib=10")
    said: list[str] = []
    assert unfinished_run(now, said.append, {"hardware.memory_gib"}) is None
    assert said == [
        f"not gone on with {folder}, which ended early: hardware.memory_gib was 20.0 and is 10.0; to go on: "
        f"training.resume={folder}"
    ]
