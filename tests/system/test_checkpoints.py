"""Checkpoints of whole runs: killed at random moments, and refused or gone back behind by the launcher."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from tunebook.checkpoint.verify import verified_record
from tunebook.record.metrics import read_metrics

CASES = {"ddp": 2, "ddp_lora": 2}
KILLS_OF_CASE = 3


def test_killed_runs_lose_nothing_and_end_with_the_bits_of_those_that_nobody_killed(run, project_root):
    """A small version of the benchmark, whose recorded figures are of hundreds."""
    words = [sys.executable, str(project_root / "tests" / "bench" / "checkpoint_kills.py")]
    ended = run([*words, "--kills", str(KILLS_OF_CASE * len(CASES)), "--only", *CASES], timeout_s=600)
    assert ended.exit_code == 0, ended.output
    lines = [json.loads(line) for line in ended.output.splitlines() if line.startswith("{")]
    assert [(line["case"], line["kills"], line["ranks"]) for line in lines] == [
        (case, KILLS_OF_CASE, ranks) for case, ranks in CASES.items()
    ]
    for line in lines:
        assert line["attempts"] == line["kills"] + line["runs"]  # each kill was followed by a start that went on
        assert (line["lost"], line["damaged"], line["different"]) == (0, 0, 0)


def test_with_another_number_of_ranks_the_losses_are_the_same_but_for_roundings(run, project_root):
    """DeepSpeed cuts its shards anew. The benchmark has figures of more strategies, and of more ranks than before."""
    words = [sys.executable, str(project_root / "tests" / "bench" / "checkpoint_ranks.py"), "--saved-by", "2"]
    ended = run([*words, "--only", "zero2", "zero3"], timeout_s=600)
    assert ended.exit_code == 0, ended.output
    lines = [json.loads(line) for line in ended.output.splitlines() if line.startswith("{")]
    found = [(line["case"], line["ranks"], line["resumed_with"], line["steps"]) for line in lines]
    assert found == [("zero2", 2, 1, 6), ("zero3", 2, 1, 6)]
    assert max(line["largest_difference"] for line in lines) <= 1e-6


ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # whose sums have one order, so that equal ranks compute the same bits


def command(outputs: Path, *overrides: str) -> list[str]:
    words = ["tunebook", "train", "quickstart", "evaluation=none", "training.max_steps=8", f"outputs={outputs}"]
    words.append("training.deterministic=true")
    return [*words, "parallelism=ddp", "hardware=cpu", "hardware.gpus_per_node=2", *overrides]


@pytest.fixture(scope="module")
def whole(run, read_run, tmp_path_factory):
    """A run of two ranks that nobody stopped, with its last two checkpoints."""
    outputs = tmp_path_factory.mktemp("whole")
    ended = run(command(outputs, "training.save_every_steps=2"), **ONE_THREAD)
    assert ended.exit_code == 0, ended.output
    found = read_run(outputs / "quickstart" / "latest")
    assert found.checkpoints == ["checkpoint-6", "checkpoint-8"]
    return found


def test_two_ranks_record_what_they_saved(whole):
    record = verified_record(whole.folder / "checkpoints" / "checkpoint-6")
    assert {"rng_state_0.pth", "rng_state_1.pth", "model.safetensors", "optimizer.pt"} <= set(record.files)
    assert (record.identity.strategy, record.identity.world_size, record.step) == ("ddp", 2, 6)


def test_a_named_run_is_gone_back_in_to_the_same_bits(run, read_run, whole, tmp_path):
    earlier = tmp_path / "earlier"
    shutil.copytree(whole.folder, earlier)
    file = earlier / "checkpoints" / "checkpoint-8" / "rng_state_1.pth"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    words = command(tmp_path / "outputs", f"training.resume={earlier}", "training.save_every_steps=2")
    ended = run(words, **ONE_THREAD)
    assert ended.exit_code == 0, ended.output
    words = " ".join(ended.output.split())
    assert "checkpoint-8 is passed over: rng_state_1.pth is not what was written" in words
    assert f"going on after {earlier / 'checkpoints' / 'checkpoint-6'}: every file in it was read" in words
    later = read_run(tmp_path / "outputs" / "quickstart" / "latest")
    assert later.losses == whole.losses[6:]
    model = (later.folder / "model" / "model.safetensors").read_bytes()
    assert model == (whole.folder / "model" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optimizer.learning_rate=1e-5"], "optimizer.learning_rate was 0.0012 and is 1e-05"),
        (["parallelism=zero1"], "it was saved by parallelism=ddp, and this run has parallelism=zero1"),
        (["parallelism=single", "hardware.gpus_per_node=1"], "it was saved by 2 ranks and this run has 1 rank"),
    ],
    ids=["config", "strategy", "ranks"],
)
def test_another_run_is_refused_before_anything_starts(run, whole, tmp_path, overrides, message):
    ended = run(command(tmp_path, f"training.resume={whole.folder}", "training.save_every_steps=2", *overrides))
    assert ended.exit_code == 2, ended.output
    assert message in " ".join(ended.output.split())
    assert "Traceback" not in ended.output
    assert not (tmp_path / "quickstart").exists()


def test_zero_resumes_with_the_written_hyperparameters_as_ddp_does(run, read_run, tmp_path):
    """DeepSpeed restores those of the checkpoint, and the clipping with them."""
    other = ["optimizer.learning_rate=4e-4", "optimizer.weight_decay=0.5", "optimizer.beta2=0.9"]
    other += ["training.max_grad_norm=0.05", "training.resume_anyway=[config]", "schedule.warmup_steps=5"]
    found = {}
    for strategy in ("ddp", "zero2"):
        first, later = (tmp_path / strategy / name for name in ("first", "later"))
        own = [f"parallelism={strategy}", "packing=padded", "training.save_every_steps=4"]
        ended = run(command(first, *own, "training.max_steps=4"), timeout_s=600)
        assert ended.exit_code == 0, ended.output
        resumed = f"training.resume={first / 'quickstart' / 'latest'}"
        ended = run(command(later, *own, resumed, *other), timeout_s=600)
        assert ended.exit_code == 0, ended.output
        assert "optimizer.learning_rate was 0.0012 and is 0.0004" in " ".join(ended.output.split())
        found[strategy] = read_run(later / "quickstart" / "latest")
    zero2, ddp = ([line["learning_rate"] for line in read_metrics(found[name].folder)] for name in ("zero2", "ddp"))
    assert len(zero2) == 4
    assert zero2 == ddp
    assert found["zero2"].losses == pytest.approx(found["ddp"].losses, rel=1e-5)
