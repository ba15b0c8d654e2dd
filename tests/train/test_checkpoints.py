"""Checkpoints of real runs in this process: complete, verified, and resumed to the same bits."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from trl import SFTTrainer

from tunebook.checkpoint import save
from tunebook.checkpoint.verify import newest_checkpoint, verified_record
from tunebook.config.choices import OptimizerName, PackingMode, PeftMethod
from tunebook.files import sha256_file
from tunebook.train.methods.sft import RecipeTrainer
from tunebook.train.records import Records

from .conftest import losses, outcome, same_weights, steps

LORA = {"peft": {"method": PeftMethod.lora, "rank": 4, "dropout": 0.2}}  # what it drops is drawn at random
PADDED = {"packing": {"mode": PackingMode.padded}}
NIGHTLY = pytest.mark.nightly
VALIDATED = {"validation_share": 0.3}


# Resumed


def test_a_stopped_run_ends_with_the_same_bits_and_loses_no_step(whole, config, run, changed, stopping_after):
    """Stopped between two logged steps, where the first epoch ends."""
    _, each = whole
    config = changed(config, training={"log_every_steps": 2})
    with stopping_after(3):
        folder, code, lines = run(config)
    assert code == 6
    assert outcome(folder)["reason"].startswith("stopped by SIGTERM after step 3, saved in ")
    assert [(line["step"], line["num_steps"]) for line in lines] == [(2, 2), (3, 1)]
    record = verified_record(newest_checkpoint(folder))
    assert (record.step, record.identity.world_size) == (3, 1)
    assert {"trainer_state.json", "optimizer.pt", "scheduler.pt", "rng_state.pth"} <= set(record.files)
    folder, code, resumed = run(config)
    assert code == 0, outcome(folder)["reason"]
    assert [(line["step"], line["num_steps"]) for line in resumed] == [(2, 2), (3, 1), (4, 1), (6, 2)]
    assert losses(resumed)[1:3] == losses(each)[2:4]
    assert [line["tokens_seen"] for line in resumed] == [each[step - 1]["tokens_seen"] for step in (2, 3, 4, 6)]
    assert same_weights(whole[0] / "model", folder / "model")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft over transformers
@pytest.mark.parametrize(
    "groups",
    [
        LORA | PADDED,
        *(
            pytest.param({"optimizer": {"name": name}}, marks=NIGHTLY)
            for name in (OptimizerName.muon, OptimizerName.adafactor)
        ),
    ],
    ids=["lora-padded", "muon", "adafactor"],
)
def test_resumed_run_ends_with_the_same_bits(config, run, changed, tmp_path, groups):
    config = changed(changed(config, **groups), training={"max_steps": 4, "micro_batch_size": 4})
    whole, code, lines = run(config, "whole")
    assert code == 0
    shutil.copytree(whole / "checkpoints" / "checkpoint-2", tmp_path / "run" / "checkpoints" / "checkpoint-2")
    folder, code, resumed = run(config)
    assert code == 0, outcome(folder)["reason"]
    assert losses(resumed) == losses(lines)[2:]
    assert same_weights(whole / "model", folder / "model")


def test_each_step_and_validation_is_logged_once_whatever_came_between(config, run, changed, monkeypatch):
    """A checkpoint and a validation at step 2, a failure in step 4."""
    config = changed(config, dataset=VALIDATED, training={"evaluate_every_steps": 2, "max_steps": 5})
    evaluated, evaluate, step = [], RecipeTrainer.evaluate, SFTTrainer.training_step

    def evaluate_and_note(trainer, *args, **kwargs):
        evaluated.append(trainer.state.global_step)
        return evaluate(trainer, *args, **kwargs)

    def fail(trainer, *args, **kwargs):
        if trainer.state.global_step == 3:
            raise RuntimeError("the machine failed")
        return step(trainer, *args, **kwargs)

    monkeypatch.setattr(RecipeTrainer, "evaluate", evaluate_and_note)
    with monkeypatch.context() as patch:
        patch.setattr(SFTTrainer, "training_step", fail)
        folder, code, lines = run(config)
    assert (code, lines[-1]["step"], steps(folder)) == (1, 3, [2])
    _, code, lines = run(config)
    assert code == 0
    assert evaluated == [2, 4, 5]
    assert [(line["step"], "loss" in line) for line in lines] == [
        (1, True), (2, True), (2, False), (3, True), (4, True), (4, False), (5, True), (5, False),
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_code_in_a_checkpoint_is_never_run(config, run, resumable, monkeypatch, tmp_path, name):
    """Anyone who can change a file can also change its hash: complete.json detects damage, not forgery."""
    checkpoint = newest_checkpoint(resumable(4))
    content = torch.load(checkpoint / name, weights_only=False)
    torch.save(content | {"evil": RunsCode()}, checkpoint / name)
    record = json.loads((checkpoint / "complete.json").read_text())
    record["files"][name] = {"size": (checkpoint / name).stat().st_size, "sha256": sha256_file(checkpoint / name)}
    (checkpoint / "complete.json").write_text(json.dumps(record))
    monkeypatch.chdir(tmp_path)
    folder, code, _ = run(config)
    assert (code, (tmp_path / "ran").exists()) == (4, False)
    assert str(checkpoint / name) in outcome(folder)["reason"]


class RunsCode:
    def __reduce__(self):
        return (os.system, ("touch ran",))


# Saved


@pytest.mark.usefixtures("saves_at_once")
def test_run_resumes_after_a_full_disk(whole, config, run, changed, small_disk, tmp_path, monkeypatch):
    """The space check does not know the file system's overhead, so writes can still fail."""
    disk = small_disk(tmp_path / "run", 8 * 2**20)

    def fill_up(self, args, state, control, **kwargs):
        if state.global_step == 3:
            disk.fill(verified_record(newest_checkpoint(disk.folder)).num_bytes + 4096)

    with monkeypatch.context() as patch:
        patch.setattr(Records, "on_step_begin", fill_up, raising=False)
        folder, code, _ = run(config)
    last_good = folder / "checkpoints" / "checkpoint-2"
    assert code == 3, outcome(folder)["reason"]
    assert outcome(folder)["reason"].endswith(f"The last good checkpoint is {last_good}")
    assert verified_record(last_good).step == 2
    assert steps(folder) == [2]
    assert not (folder / "checkpoints" / "_unfinished").exists()
    (folder / "filler").unlink()
    folder, code, resumed = run(changed(config, training={"keep_checkpoints": 1}))
    assert code == 0, outcome(folder)["reason"]
    assert losses(resumed) == losses(whole[1])
    assert steps(folder) == [6]


@pytest.mark.usefixtures("saves_when_waited_for")
def test_stop_waits_for_both_saves(config, stopped):
    folder = stopped(config, 5)
    assert steps(folder) == [2, 4, 5]
    assert [verified_record(folder / "checkpoints" / f"checkpoint-{step}").step for step in (4, 5)] == [4, 5]
    assert not (folder / "checkpoints" / "_unfinished").exists()


@pytest.mark.usefixtures("saves_when_waited_for")
def test_non_finite_loss_completes_the_pending_save(config, run, monkeypatch):
    def spoil(trainer, *args, **kwargs):
        return original(trainer, *args, **kwargs) * (float("nan") if trainer.state.global_step == 2 else 1)

    original = RecipeTrainer.training_step
    monkeypatch.setattr(RecipeTrainer, "training_step", spoil)
    folder, code, lines = run(config)
    assert code == 7
    assert outcome(folder)["reason"].endswith("checkpoint-2")
    assert "loss" in lines[-1]["not_finite"]
    assert not (folder / "model").exists()
    assert verified_record(folder / "checkpoints" / "checkpoint-2").step == 2


@pytest.mark.usefixtures("saves_at_once")
def test_a_save_that_fails_in_the_background_ends_the_run_after_the_next_step(config, run, changed, monkeypatch):
    def fill(file):
        if "checkpoint-2" in str(file):
            return original(file)
        raise OSError(errno.ENOSPC, "No space left on device")

    original = save._seal
    monkeypatch.setattr(save, "_seal", fill)
    folder, code, lines = run(changed(config, training={"num_epochs": 4}))
    assert code == 3
    assert outcome(folder)["reason"].endswith("checkpoint-2")
    assert len(losses(lines)) == 4  # the fifth step was not logged
    assert steps(folder) == [2]


def test_in_the_background_or_not_a_run_ends_with_the_same_bits_and_files(whole, config, run, changed):
    waiting, code, _ = run(changed(config, training={"save_in_background": False}))
    assert code == 0
    assert steps(waiting) == [2, 4, 6]
    folders = [folder / "checkpoints" / "checkpoint-6" for folder in (whole[0], waiting)]
    assert same_weights(*folders)
    records = [verified_record(folder) for folder in folders]
    assert records[0].files.keys() == records[1].files.keys()
    assert records[0].identity == records[1].identity


def test_the_folder_of_a_checkpoint_is_there_before_its_weights(config, run, changed, monkeypatch):
    """FSDP writes its shards after upstream has looked for the folder of the best step."""
    found, save_model = [], RecipeTrainer.save_model

    def saved(self, output_dir=None, **settings):
        found.append(Path(output_dir).is_dir())
        save_model(self, output_dir, **settings)

    monkeypatch.setattr(RecipeTrainer, "save_model", saved)
    _, code, _ = run(changed(config, training={"max_steps": 2, "save_every_steps": 1}))
    assert (code, found[:2]) == (0, [True, True])
