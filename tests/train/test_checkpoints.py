"""Checkpoints of real runs in this process: complete, verified, and resumed to the same bits."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from trl import SFTTrainer

from tunebook.checkpoint import save
from tunebook.checkpoint.verify import newest_checkpoint, verified_record
from tunebook.config.choices import OptimizerName, PackingMode, PeftMethod
from tunebook.files import sha256_file
from tunebook.record.metrics import by_schedule
from tunebook.train.callbacks import Records
from tunebook.train.methods.sft import RecipeTrainer

from .conftest import losses, outcome, same_weights, steps

pytestmark = pytest.mark.usefixtures("same_bits")  # a resumed run repeats what the kernels of another run computed
NUM_STEPS = 6
LORA = {"peft": {"method": PeftMethod.lora, "rank": 4, "dropout": 0.2}}  # what it drops is drawn at random
PADDED = {"packing": {"mode": PackingMode.padded}, "training": {"micro_batch_size": 4, "save_every_steps": 2}}
SAVED = {"training": {"save_every_steps": 2}}
of_upstream = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft over transformers


MUON, ADAFACTOR = ({"optimizer": {"name": name}} for name in (OptimizerName.muon, OptimizerName.adafactor))


@of_upstream
@pytest.mark.parametrize(
    "groups",
    [{}, PADDED, LORA, LORA | PADDED, MUON, ADAFACTOR],
    ids=["packed", "padded", "lora", "lora-padded", "muon", "adafactor"],
)
def test_resumed_run_ends_with_the_same_bits(config, run, stopped, changed, groups):
    config = changed(config, **groups)
    whole, code, lines = run(config, "whole")
    assert code == 0
    folder = stopped(config, 3)  # in the middle of an epoch's last pass, or where the first epoch ends
    assert outcome(folder)["reason"].startswith("stopped by SIGTERM after step 3, saved in ")
    record = verified_record(newest_checkpoint(folder))
    assert (record.step, record.identity.world_size) == (3, 1)
    assert {"trainer_state.json", "optimizer.pt", "scheduler.pt", "rng_state.pth"} <= set(record.files)
    folder, code, resumed = run(config)
    assert code == 0, outcome(folder)["reason"]
    assert losses(resumed) == losses(lines)
    assert len(losses(resumed)) == NUM_STEPS
    assert [line["tokens_seen"] for line in resumed] == [line["tokens_seen"] for line in lines]
    assert same_weights(whole / "model", folder / "model")


def test_a_stop_between_two_logged_steps_loses_none_of_them(config, run, changed, stopping_after):
    every_second = changed(config, training={"log_every_steps": 2})
    _, code, each = run(config, "each")
    assert code == 0
    _, code, whole = run(every_second, "whole")
    assert code == 0
    with stopping_after(3):
        folder, code, lines = run(every_second)
    assert code == 6
    assert [(line["step"], line["num_steps"]) for line in lines] == [(2, 2), (3, 1)]
    assert outcome(folder)["step"] == 3
    assert verified_record(newest_checkpoint(folder)).step == 3
    folder, code, resumed = run(every_second)
    assert code == 0, outcome(folder)["reason"]
    assert [(line["step"], line["num_steps"]) for line in resumed] == [(2, 2), (3, 1), (4, 1), (6, 2)]
    assert losses(resumed)[1:3] == losses(each)[2:4]
    assert [line["tokens_seen"] for line in resumed] == [each[step - 1]["tokens_seen"] for step in (2, 3, 4, 6)]
    together = by_schedule(resumed, 2)
    assert together == [(line["step"], pytest.approx(line["loss"], rel=1e-6)) for line in whole]
    assert [together[0], together[2]] == [(line["step"], line["loss"]) for line in (whole[0], whole[2])]  # every bit


def test_each_step_and_validation_is_logged_once_whatever_came_between(
    config, run, changed, stopping_after, monkeypatch
):
    """Saves and validations meet at steps 2 and 4, and the last step has both."""
    training = {"save_every_steps": 2, "evaluate_every_steps": 2, "max_steps": 5}
    config = changed(config, dataset={"validation_share": 0.3}, training=training)
    _, code, whole = run(config, "whole")
    assert code == 0
    evaluated, evaluate, step = [], RecipeTrainer.evaluate, SFTTrainer.training_step

    def noted(trainer, *args, **kwargs):
        evaluated.append(trainer.state.global_step)
        return evaluate(trainer, *args, **kwargs)

    def fail(trainer, *args, **kwargs):
        if trainer.state.global_step == 3:
            raise RuntimeError("the machine failed")
        return step(trainer, *args, **kwargs)

    monkeypatch.setattr(RecipeTrainer, "evaluate", noted)
    with stopping_after(2):
        assert run(config)[1] == 6
    with monkeypatch.context() as patch:
        patch.setattr(SFTTrainer, "training_step", fail)
        _, code, lines = run(config)
    assert (code, lines[-1]["step"]) == (1, 3)
    _, code, lines = run(config)
    assert code == 0
    assert evaluated == [2, 4, 5]
    kept = [[(line["step"], line.get("loss"), line.get("validation_loss")) for line in one] for one in (lines, whole)]
    assert kept[0] == kept[1]
    assert [step for step, _, validation in kept[0] if validation is None] == [1, 2, 3, 4, 5]


def test_validation_at_the_end_that_is_repeated_is_logged_once(config, run, changed, monkeypatch):
    once = changed(config, dataset={"validation_share": 0.3}, training={"max_steps": 2, "save_every_steps": 1})
    with monkeypatch.context() as patch:
        patch.setattr(RecipeTrainer, "save_final_model", lambda *_: 1 / 0)
        assert run(once)[1] == 1
    _, code, lines = run(once)
    assert code == 0
    assert [(line["step"], "validation_loss" in line) for line in lines] == [(1, False), (2, False), (2, True)]


@of_upstream
def test_resume_without_random_state_differs(config, run, stopped, changed, monkeypatch):
    """Proves that the test above depends on random numbers."""
    config = changed(config, **LORA)
    whole = losses(run(config, "whole")[2])
    stopped(config, 3)
    monkeypatch.setattr(RecipeTrainer, "_load_rng_state", lambda self, checkpoint: None)
    assert losses(run(config)[2])[3:] != whole[3:]


def test_damaged_checkpoint_is_skipped_with_a_message(config, run, stopped, changed, capfd):
    config = changed(config, **SAVED)
    whole = losses(run(config, "whole")[2])
    folder = stopped(config, 5)
    assert steps(folder) == [4, 5]
    file = folder / "checkpoints" / "checkpoint-5" / "optimizer.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    capfd.readouterr()
    folder, code, lines = run(config)
    assert code == 0
    said = capfd.readouterr().out
    assert f"{folder / 'checkpoints' / 'checkpoint-5'} is passed over: optimizer.pt is not what was written" in said
    assert f"resuming from {folder / 'checkpoints' / 'checkpoint-4'}: every file in it was read" in said
    assert losses(lines) == whole
    assert steps(folder) == [4, 6]  # the damaged one is gone


def test_the_newest_and_the_best_stay_and_the_best_is_loaded_after_a_resume(config, run, stopped, changed):
    worsening = changed(
        config,
        dataset={"validation_share": 0.3},
        optimizer={"learning_rate": 0.05},
        training={
            "global_samples": 4,
            "max_steps": 8,
            "evaluate_every_steps": 1,
            "save_every_steps": 1,
            "keep_checkpoints": 1,
            "load_best_at_end": True,
        },
    )
    whole, code, lines = run(worsening, "whole")
    assert code == 0
    validation = {line["step"]: line["validation_loss"] for line in lines if "validation_loss" in line}
    best = min(validation, key=validation.get)
    assert best < 6  # so it is gone on from a later one
    assert steps(whole) == [best, 8]
    folder = stopped(worsening, 6)
    assert steps(folder) == [best, 6]
    moved = folder.rename(folder.with_name("moved"))
    assert run(worsening, "moved")[1] == 0
    assert steps(moved) == [best, 8]
    state = json.loads((moved / "checkpoints" / "checkpoint-8" / "trainer_state.json").read_text())
    assert state["best_global_step"] == best
    assert state["best_model_checkpoint"] == str(moved / "checkpoints" / f"checkpoint-{best}")
    assert same_weights(whole / "model", moved / "model")


def test_checkpoint_of_another_run_is_resumed_in_a_new_folder(config, run, stopped, changed, tmp_path):
    whole = losses(run(config, "whole")[2])
    earlier = stopped(config, 3, "earlier")
    folder, code, lines = run(changed(config, training={"resume": str(earlier)}), "later")
    assert code == 0
    assert losses(lines) == whole[3:]
    other = changed(config, training={"resume": str(earlier)}, optimizer={"learning_rate": 1e-3})
    folder, code, _ = run(other, "other")
    assert code == 2
    assert "optimizer.learning_rate was 0.01 and is 0.001" in outcome(folder)["reason"]


@pytest.mark.usefixtures("saves_at_once")
def test_a_best_checkpoint_that_was_damaged_meanwhile_is_not_loaded(config, run, changed, monkeypatch):
    def damage(trainer, *args, **kwargs):
        if trainer.state.global_step == 4:
            (file,) = Path(trainer.saver.folder).glob("checkpoint-*/optimizer.pt")
            file.write_bytes(b"other")
        return original(trainer, *args, **kwargs)

    original = RecipeTrainer.training_step
    monkeypatch.setattr(RecipeTrainer, "training_step", damage)
    best_first = changed(
        config,
        dataset={"validation_share": 0.3},
        optimizer={"learning_rate": 0.05},
        training={"global_samples": 4, "max_steps": 6, "evaluate_every_steps": 4, "save_every_steps": 4,
                  "load_best_at_end": True},
    )  # fmt: skip
    folder, code, _ = run(best_first)
    assert code == 4
    assert "checkpoint-4 cannot be loaded: optimizer.pt has 5 bytes" in outcome(folder)["reason"]


@pytest.mark.usefixtures("saves_at_once")
@pytest.mark.parametrize("is_foreseen", [True, False], ids=["foreseen", "while-it-writes"])
def test_run_resumes_after_a_full_disk(config, run, changed, small_disk, tmp_path, monkeypatch, is_foreseen):
    """The space check does not know the file system's overhead, so writes can still fail."""
    config = changed(config, **SAVED)
    _, _, lines = run(config, "whole")
    disk = small_disk(tmp_path / "run", 8 * 2**20)

    def fill_up(self, args, state, control, **kwargs):
        if state.global_step == 3:
            needed = verified_record(newest_checkpoint(disk.folder)).num_bytes
            disk.fill(needed // 2 if is_foreseen else needed + 4096)

    with monkeypatch.context() as patch:
        patch.setattr(Records, "on_step_begin", fill_up, raising=False)
        folder, code, _ = run(config)
    assert code == 3, outcome(folder)["reason"]
    kept = folder / "checkpoints" / "checkpoint-2"
    assert f"The last good checkpoint is {kept}" in outcome(folder)["reason"]
    assert ("iB free and the checkpoint of step 4 takes about" in outcome(folder)["reason"]) == is_foreseen
    assert newest_checkpoint(folder) == kept
    assert verified_record(kept).step == 2
    assert steps(folder) == [2]
    assert not (folder / "checkpoints" / "_unfinished").exists()
    (folder / "filler").unlink()
    folder, code, resumed = run(config)
    assert code == 0, outcome(folder)["reason"]
    assert losses(resumed) == losses(lines)


def test_line_after_a_save_contains_its_time(config, run, changed):
    _, code, lines = run(changed(config, **SAVED))
    assert code == 0
    told = {line["step"]: line["save_seconds"] for line in lines if "save_seconds" in line}
    assert sorted(told) == [3, 5]
    assert told[5] > 0


@pytest.mark.usefixtures("saves_when_waited_for")
def test_stop_waits_for_both_saves(config, run, stopped, changed):
    config = changed(config, **SAVED)
    whole = losses(run(config, "whole")[2])
    folder = stopped(config, 5)
    assert steps(folder) == [4, 5]
    assert [verified_record(folder / "checkpoints" / f"checkpoint-{step}").step for step in (4, 5)] == [4, 5]
    assert not (folder / "checkpoints" / "_unfinished").exists()
    _, code, resumed = run(config)
    assert code == 0
    assert losses(resumed) == whole


@pytest.mark.usefixtures("saves_when_waited_for")
def test_the_best_is_loaded_once_it_is_complete(config, run, changed):
    best_last = changed(
        config,
        dataset={"validation_share": 0.3},
        training={"global_samples": 4, "max_steps": 4, "evaluate_every_steps": 2, "save_every_steps": 2,
                  "load_best_at_end": True},
    )  # fmt: skip
    folder, code, lines = run(best_last)
    assert code == 0, outcome(folder)["reason"]
    validation = {line["step"]: line["validation_loss"] for line in lines if "validation_loss" in line}
    assert validation[4] < validation[2]  # the one that is still in the air when training has ended
    assert same_weights(folder / "model", folder / "checkpoints" / "checkpoint-4")


@pytest.mark.usefixtures("saves_when_waited_for")
def test_non_finite_loss_completes_the_pending_save(config, run, changed, monkeypatch):
    def spoil(trainer, *args, **kwargs):
        return original(trainer, *args, **kwargs) * (float("nan") if trainer.state.global_step == 2 else 1)

    original = RecipeTrainer.training_step
    monkeypatch.setattr(RecipeTrainer, "training_step", spoil)
    folder, code, _ = run(changed(config, **SAVED))
    assert code == 7
    assert "the loss is not finite at step 3" in outcome(folder)["reason"]
    assert not (folder / "model").exists()
    assert outcome(folder)["reason"].endswith("checkpoint-2")
    assert verified_record(folder / "checkpoints" / "checkpoint-2").step == 2


@pytest.mark.usefixtures("saves_at_once")
def test_a_save_that_fails_in_the_background_ends_the_run_after_the_next_step(config, run, changed, monkeypatch):
    def fill(file):
        if "checkpoint-2" in str(file):
            return original(file)
        raise OSError(errno.ENOSPC, "No space left on device")

    original = save._seal
    monkeypatch.setattr(save, "_seal", fill)
    folder, code, lines = run(changed(config, training={"save_every_steps": 2, "num_epochs": 4}))
    assert code == 3
    assert "is full; free some space" in outcome(folder)["reason"]
    assert outcome(folder)["reason"].endswith("checkpoint-2")
    assert len(losses(lines)) == 4  # the fifth step was not logged
    assert steps(folder) == [2]
    assert not (folder / "checkpoints" / "_unfinished").exists()


def test_in_the_background_or_not_a_run_ends_with_the_same_bits_and_files(config, run, changed):
    folders = []
    for name, is_in_background in (("background", True), ("waiting", False)):
        training = SAVED["training"] | {"save_in_background": is_in_background}
        folder, code, _ = run(changed(config, training=training), name)
        assert code == 0
        assert steps(folder) == [4, 6]
        folders.append(folder / "checkpoints" / "checkpoint-6")
    assert same_weights(*folders)
    records = [verified_record(folder) for folder in folders]
    assert records[0].files.keys() == records[1].files.keys()
    assert records[0].identity == records[1].identity


@pytest.mark.usefixtures("saves_when_waited_for")
def test_what_is_uploaded_is_complete_and_named_by_its_step(config, run, changed, monkeypatch):
    uploaded = []

    def look(trainer, checkpoint_folder):
        complete = verified_record(Path(checkpoint_folder)).step  # or it raises
        uploaded.append((complete, trainer.state.global_step))

    monkeypatch.setattr(SFTTrainer, "_push_from_checkpoint", look)
    monkeypatch.setattr(SFTTrainer, "_finish_current_push", lambda trainer: uploaded.append("waited for"))
    for name in ("init_hf_repo", "push_to_hub"):
        monkeypatch.setattr(SFTTrainer, name, lambda trainer, **words: None)
    folder, code, _ = run(changed(config, training={"save_every_steps": 2, "push_to_hub": "me/tiny"}))
    assert code == 0, outcome(folder)["reason"]
    assert uploaded == [(2, 2), (4, 4), (6, 6), "waited for"]


class RunsCode:
    def __reduce__(self):
        return (os.system, ("touch ran",))


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_code_in_a_checkpoint_is_never_run(config, run, stopped, changed, monkeypatch, tmp_path, name):
    """Anyone who can change a file can also change its hash: complete.json detects damage, not forgery."""
    folder = stopped(config, 3)
    checkpoint = newest_checkpoint(folder)
    content = torch.load(checkpoint / name, weights_only=False)
    torch.save(content | {"evil": RunsCode()}, checkpoint / name)
    record = json.loads((checkpoint / "complete.json").read_text())
    record["files"][name] = {"size": (checkpoint / name).stat().st_size, "sha256": sha256_file(checkpoint / name)}
    (checkpoint / "complete.json").write_text(json.dumps(record))
    monkeypatch.chdir(tmp_path)
    _, code, _ = run(config)
    assert (code, (tmp_path / "ran").exists()) == (4, False)
    reason = outcome(folder)["reason"]
    assert reason.startswith(f"{checkpoint / name} holds something that no checkpoint of a run needs")
    assert "proves that it was not damaged, not who wrote it" in reason
    assert reason.endswith("or start again with training.resume=never")
