"""Two ranks over torchrun and gloo: the same numbers as one, and every way to end, as one."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from tests.system.conftest import NUM_STEPS, TWO_RANKS


def command(outputs: Path, *overrides: str, steps: int = NUM_STEPS) -> list[str]:
    return ["tunebook", "train", "quickstart", "evaluation=none", f"training.max_steps={steps}", f"outputs={outputs}",
            *overrides]  # fmt: skip


def latest(outputs: Path) -> Path:
    return outputs / "quickstart" / "latest"


def test_two_ranks_take_the_steps_of_one(saved_by, one_rank):
    """Packed; padded and accumulated ones are in test_same_loss.py."""
    assert saved_by("ddp").losses == pytest.approx(one_rank.losses, rel=1e-5)


FAULT = """
import os, time
if os.environ.get("RANK") == "1":
    from tunebook.train.callbacks import StopOnRequest
    from tunebook.train.methods.sft import RecipeTrainer

    original = RecipeTrainer.training_step

    def is_asked_to_stop(trainer):
        callbacks = trainer.callback_handler.callbacks
        return any(isinstance(callback, StopOnRequest) and callback.request.in_file() for callback in callbacks)

    def broken(self, *args, **kwargs):
        if self.state.global_step == 3:
            {fault}
        return original(self, *args, **kwargs)

    RecipeTrainer.training_step = broken
"""
# Rank 0 reads the file at the end of a step, at most once in a second.
WAIT_TO_BE_ASKED = "while not is_asked_to_stop(self): time.sleep(1.1)"


def environment_with(fault: str, folder: Path) -> dict[str, str]:
    """Let something happen in the fourth step of rank 1 alone: what to add to the environment."""
    (folder / "sitecustomize.py").write_text(FAULT.format(fault=fault))  # Python imports it by itself
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}


@pytest.fixture
def rank_1_with(tmp_path):
    return partial(environment_with, folder=tmp_path)


@pytest.mark.parametrize("how", ["Ctrl-C", "SIGTERM"])
def test_a_request_to_stop_saves_on_both_and_the_same_command_goes_on(
    start, run, read_run, tmp_path, one_rank, rank_1_with, how
):
    words = command(tmp_path, *TWO_RANKS)
    running = start(words, **rank_1_with(WAIT_TO_BE_ASKED))
    metrics = latest(tmp_path) / "metrics.jsonl"
    running.wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 3)
    if how == "Ctrl-C":
        running.interrupt()  # pressed twice, which is one request
        time.sleep(0.05)
        running.interrupt()
    else:
        running.process.terminate()  # to the launcher alone
    ended = running.wait(300)
    assert ended.exit_code == 6, ended.output
    assert "Traceback" not in ended.output
    stopped = read_run(latest(tmp_path))
    done = len(stopped.losses)
    assert done == 4  # the step that they were in
    assert stopped.status["state"] == "stopped"
    assert f"after step {done}" in stopped.status["reason"]
    assert stopped.checkpoints == [f"checkpoint-{done}"]
    assert not (stopped.folder / "model").exists()
    assert (stopped.folder / "report.html").exists()
    if how == "SIGTERM":
        return  # a checkpoint is resumed whoever asked for it

    ended = run(words)
    assert ended.exit_code == 0, ended.output
    assert f"resuming from {stopped.folder / 'checkpoints' / f'checkpoint-{done}'}" in ended.output
    finished = read_run(latest(tmp_path))
    assert finished.folder == stopped.folder
    assert finished.status["state"] == "finished"
    assert finished.losses == pytest.approx(one_rank.losses, rel=1e-5)
    assert (finished.folder / "model" / "model.safetensors").exists()


def ranks_of(folder: Path) -> list[int]:
    """The processes that train in a run folder, torchrun not among them, in the order of their ranks."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_bytes().split(b"\0")
            environment = (file.parent / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        rank = next((int(word[5:]) for word in environment if word.startswith(b"RANK=")), None)
        if str(folder).encode() in words and rank is not None:
            found.append((rank, int(file.parent.name)))
    return [process for _, process in sorted(found)]


def test_a_rank_that_is_killed_ends_the_run_and_is_named(start, run_forked, read_run, tmp_path, one_rank, rank_1_with):
    words = command(tmp_path, *TWO_RANKS, "training.save_every_steps=2")
    running = start(words, **rank_1_with("time.sleep(1000)"))
    saved = latest(tmp_path) / "checkpoints" / "checkpoint-2" / "complete.json"
    running.wait_for(lambda: saved.exists() and len(read_run(latest(tmp_path)).losses) >= 3)
    os.kill(ranks_of(latest(tmp_path).resolve())[1], signal.SIGKILL)
    ended = running.wait(300)
    assert ended.exit_code == 1, ended.output
    failed = read_run(latest(tmp_path))
    assert failed.status["state"] == "failed"
    assert "rank 1 ended without recording a reason: it was killed" in failed.status["reason"]
    assert "rank 1 ended without recording a reason" in ended.output
    assert failed.checkpoints

    assert run_forked(words).exit_code == 0  # goes on after the last checkpoint
    finished = read_run(latest(tmp_path))
    assert finished.folder == failed.folder
    assert finished.losses == pytest.approx(one_rank.losses, rel=1e-5)


def test_a_rank_that_crashes_ends_the_run_with_its_reason(run, read_run, tmp_path, rank_1_with):
    broken = rank_1_with("raise ZeroDivisionError('a fault of rank 1')")
    ended = run(command(tmp_path / "outputs", *TWO_RANKS), **broken)
    assert ended.exit_code == 1, ended.output
    status = read_run(latest(tmp_path / "outputs")).status
    assert (status["state"], status["reason"]) == ("failed", "ZeroDivisionError: a fault of rank 1")


FULL_DISK = (
    "time.sleep(3); "  # the first save ends in the background
    "from tunebook.checkpoint import save; "
    "save._seal = lambda file: (_ for _ in ()).throw(OSError(28, 'No space left on device'))"
)


def test_a_save_that_one_rank_cannot_complete_in_the_background_ends_both(run, read_run, tmp_path, rank_1_with):
    broken = rank_1_with(FULL_DISK)  # from the fourth step on, after which the second save begins
    ended = run(command(tmp_path / "outputs", *TWO_RANKS, "training.save_every_steps=2"), **broken)
    assert ended.exit_code == 3, ended.output
    assert "Traceback" not in ended.output
    failed = read_run(latest(tmp_path / "outputs"))
    assert "is full; free some space" in failed.status["reason"]
    assert failed.status["reason"].endswith("checkpoint-2")
    assert failed.checkpoints == ["checkpoint-2"]
    assert 4 <= len(failed.losses) <= 6  # the next save would wait for it


def test_a_loss_that_is_not_finite_names_the_step_and_the_last_good_checkpoint(run, read_run, tmp_path, rank_1_with):
    broken = rank_1_with("return original(self, *args, **kwargs) * float('nan')")
    ended = run(command(tmp_path / "outputs", *TWO_RANKS, "training.save_every_steps=1"), **broken)
    assert ended.exit_code == 7, ended.output
    assert "Traceback" not in ended.output
    invalid = read_run(latest(tmp_path / "outputs"))
    assert invalid.status["state"] == "invalid"
    reason = invalid.status["reason"]
    assert "not finite at step 4" in reason
    assert reason.endswith("checkpoint-3")
    assert reason in ended.output
    assert invalid.checkpoints == ["checkpoint-2", "checkpoint-3"]
    assert not (invalid.folder / "model").exists()


def test_a_rank_that_is_stopped_ends_the_run_after_the_time_out(run, read_run, tmp_path):
    stopped = environment_with("os.kill(os.getpid(), 19)", tmp_path)
    ended = run(command(tmp_path / "outputs", *TWO_RANKS, "launcher.timeout_s=8"), **stopped)
    assert ended.exit_code == 1, ended.output
    folder = latest(tmp_path / "outputs")
    assert str(read_run(folder).status["reason"]) in ended.output
    assert ranks_of(folder.resolve()) == []
