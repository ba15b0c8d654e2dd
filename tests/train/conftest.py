"""Runs of a tiny model on a few documents, in this process."""

from __future__ import annotations

import json
import os
import shutil
import signal
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from tunebook.config.choices import (
    Attention,
    Checkpointing,
    Compute,
    Generation,
    Overlong,
    PackingMode,
    ScheduleName,
    Switch,
    Weights,
)
from tunebook.config.frozen import config_to_yaml, plain_config
from tunebook.config.schema import (
    ActivationConfig,
    AttentionConfig,
    DatasetConfig,
    HardwareConfig,
    ModelConfig,
    OptimizerConfig,
    PackingConfig,
    PrecisionConfig,
    ScheduleConfig,
    TrainingConfig,
)
from tunebook.data.prepare import prepare
from tunebook.record.manifest import start_manifest
from tunebook.record.metrics import read_metrics
from tunebook.record.start_up import StartClock, note_launch
from tunebook.train.rank_process import StopRequest
from tunebook.train.records import Records
from tunebook.train.run import run_rank

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def losses(lines):
    """The loss of each logged step."""
    return [line["loss"] for line in lines if "loss" in line]


def outcome(folder):
    """How the first rank of a run ended."""
    return json.loads((folder / "outcome-0.json").read_text())


def steps(folder):
    """The steps of a run's checkpoints."""
    return sorted(int(path.name.split("-")[1]) for path in (folder / "checkpoints").glob("checkpoint-*"))


def weights(folder):
    """The tensors of a folder with one file of weights."""
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


def same_weights(folder, other):
    """True if two model folders contain the same tensors, and at least one."""
    first, second = weights(folder), weights(other)
    return bool(first) and all(torch.equal(first[name], second[name]) for name in first.keys() | second.keys())


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory, project_root):
    """A folder with the quickstart's tokenizer and a much smaller architecture."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    shutil.copytree(project_root / "recipes" / "quickstart" / "model", folder)
    config = json.loads((folder / "config.json").read_text()) | SIZES
    config.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def documents(tmp_path_factory, project_root):
    """Twenty-four conversations of the quickstart's."""
    file = tmp_path_factory.mktemp("data") / "train.jsonl"
    lines = (project_root / "recipes" / "quickstart" / "data" / "train.jsonl").read_text().splitlines()
    file.write_text("\n".join(lines[:24]) + "\n")
    return file


def base_config(tiny_model, documents):
    """Eight documents a step, three steps an epoch, two epochs."""
    return plain_config(
        recipe="tiny",
        model=ModelConfig(path=str(tiny_model), weights=Weights.random),
        dataset=DatasetConfig(path=str(documents), overlong=Overlong.drop, num_workers=1),
        hardware=HardwareConfig(generation=Generation.cpu, gpus_per_node=1),
        precision=PrecisionConfig(compute=Compute.fp32, tf32=Switch.disabled),
        attention=AttentionConfig(implementation=Attention.sdpa),
        packing=PackingConfig(mode=PackingMode.isolated),
        activation=ActivationConfig(checkpointing=Checkpointing.disabled),
        optimizer=OptimizerConfig(learning_rate=1e-2),
        schedule=ScheduleConfig(name=ScheduleName.constant),
        training=TrainingConfig(
            global_samples=8, max_length=256, num_epochs=2, seed=1, save_every_steps=2, keep_checkpoints=9
        ),
    )


@pytest.fixture
def config(tiny_model, documents):
    """The small run that most tests change a part of."""
    return base_config(tiny_model, documents)


@pytest.fixture(scope="session")
def train_in(tmp_path_factory):
    """Train a configuration in this process and in a folder; returns the folder, the exit code and the metrics.

    What accelerate writes into the environment of a run, such as that it is one of FSDP, is gone after it.
    """
    cache = {"TUNEBOOK_CACHE": str(tmp_path_factory.mktemp("cache"))}  # prepared once for all tests

    def train(folder, config):
        torch.set_num_threads(1)  # sums have one order
        folder.mkdir(exist_ok=True)
        request = StopRequest()
        with mock.patch.dict(os.environ, cache), request.listening():
            (folder / "run.yaml").write_text(config_to_yaml(config))
            (folder / "prepared.json").write_text(json.dumps({"folder": str(prepare(config).folder)}))
            code = run_rank(folder, request)
        lines = read_metrics(folder) if (folder / "metrics.jsonl").exists() else []
        return folder, code, lines

    return train


@pytest.fixture
def run(tmp_path, train_in):
    """Train a configuration in a folder of this test."""
    return lambda config, name="run": train_in(tmp_path / name, config)


@pytest.fixture(scope="session")
def whole(tmp_path_factory, train_in, tiny_model, documents):
    """The run of `config`, over what an earlier attempt has left: its folder and its metrics."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "old.safetensors").write_bytes(b"of an earlier attempt")
    (folder / ".model.replaced-1").mkdir()
    config = base_config(tiny_model, documents)
    start_manifest(folder, config, world_size=1, command=["tunebook", "train"])
    note_launch(folder, StartClock())
    folder, code, lines = train_in(folder, config)
    assert code == 0, outcome(folder)["reason"]
    return folder, lines


@pytest.fixture
def resumable(tmp_path, whole):
    """Make a run folder that has a checkpoint of `whole`, and the metrics up to it."""

    def make(step, name="run"):
        folder, checkpoint = tmp_path / name, f"checkpoints/checkpoint-{step}"
        shutil.copytree(whole[0] / checkpoint, folder / checkpoint)
        shutil.copy(whole[0] / "metrics.jsonl", folder)
        return folder

    return make


@pytest.fixture(scope="session")
def changed():
    """A configuration with keys of some groups replaced: `changed(config, training={"max_steps": 2})`."""

    def change(config, **groups):
        parts = {group: replace(getattr(config, group), **values) for group, values in groups.items()}
        return replace(config, **parts)

    return change


@pytest.fixture
def stopping_after(monkeypatch):
    """A context in which a run is asked to stop in a step, after which it saves."""

    @contextmanager
    def stop(step):
        def ask(self, args, state, control, **kwargs):
            if state.global_step == step - 1:
                os.kill(os.getpid(), signal.SIGTERM)

        with monkeypatch.context() as patch:
            patch.setattr(Records, "on_step_begin", ask, raising=False)
            yield

    return stop


@pytest.fixture
def stopped(run, stopping_after):
    """Train a configuration and stop it after a step; returns its folder."""

    def train(config, step, name="run"):
        with stopping_after(step):
            folder, code, lines = run(config, name)
        assert code == 6
        assert len([line for line in lines if "loss" in line]) == step
        return folder

    return train
