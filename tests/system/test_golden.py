"""Losses and records of real runs, compared with those recorded in tests/golden.

Losses in fp32 differ by 1e-5 between instruction sets of x86 (ATEN_CPU_CAPABILITY=default for AVX2 or AVX-512), which
order sums in other ways. tests/system/test_same_loss.py demands more of runs on one machine.
"""

from __future__ import annotations

import pytest

from tests.golden.record import check, key_paths
from tests.system.conftest import BIT_FOR_BIT, FIRST_STEPS, NUM_STEPS, ONE_THREAD, TWO_RANKS
from tunebook.files import read_json
from tunebook.record.metrics import read_metrics

LOSSES_AGREE_TO = 1e-3  # on any CPU
ONE_RANK = ("parallelism=single", "hardware=cpu")
HALF = NUM_STEPS // 2


@pytest.fixture(scope="module")
def halved(train_once):
    """One rank with a checkpoint after half of its steps."""
    return train_once(*BIT_FOR_BIT, *ONE_RANK, f"training.save_every_steps={HALF}", **ONE_THREAD)


@pytest.fixture(scope="module")
def resumed(halved, run_forked, read_run, tmp_path_factory):
    """Its second half once more, from that checkpoint."""
    outputs = tmp_path_factory.mktemp("outputs")
    words = ["tunebook", "train", "quickstart", "evaluation=none", *BIT_FOR_BIT, *ONE_RANK, f"outputs={outputs}"]
    checkpoint = halved.folder / "checkpoints" / f"checkpoint-{HALF}"
    ended = run_forked([*words, f"training.save_every_steps={HALF}", f"training.resume={checkpoint}"], **ONE_THREAD)
    assert ended.exit_code == 0, ended.output
    return read_run(outputs / "quickstart" / "latest")


def test_losses(one_rank, halved, resumed, saved_by, train_once):
    padded, lora = (FIRST_STEPS, "packing=padded"), (FIRST_STEPS, "peft=lora")
    runs = {
        "one rank, packed": one_rank,
        "one rank, padded": train_once(*padded, *ONE_RANK),
        "two ranks, packed": saved_by("ddp"),
        "two ranks, padded": train_once(*padded, *TWO_RANKS),
        "two ranks, LoRA": train_once(*lora, *TWO_RANKS),
        "two ranks, ZeRO-2": saved_by("zero2"),
        "two ranks, ZeRO-3": saved_by("zero3"),
    }
    losses = {name: found.losses for name, found in runs.items()}
    losses["resumed"] = halved.losses[:HALF] + resumed.losses
    assert losses["resumed"] == halved.losses
    assert {len(found) for found in losses.values()} == {NUM_STEPS}
    rounded = {name: [float(f"{loss:.5g}") for loss in found] for name, found in losses.items()}
    check("losses", rounded, lambda _: LOSSES_AGREE_TO)


def test_files_and_keys_of_a_run(halved, project_root):
    """Names and keys, not values, one in a line."""
    evidence = [read_json(file) for file in sorted((project_root / "recipes").glob("*/evidence/*.json"))]
    metrics = read_metrics(halved.folder)
    found = {
        "files of a run": {
            path.relative_to(halved.folder).as_posix() for path in halved.folder.rglob("*") if path.is_file()
        },
        "keys of manifest.json": key_paths(read_json(halved.folder / "manifest.json")),
        "keys of plan.json": key_paths(read_json(halved.folder / "plan.json")),
        "keys of a checkpoint's complete.json": key_paths(
            read_json(halved.folder / "checkpoints" / f"checkpoint-{HALF}" / "complete.json")
        ),
        "keys of metrics.jsonl": set().union(*(key_paths(line) for line in metrics)),
        "keys of recipes/*/evidence/*.json": set().union(*map(key_paths, evidence)),
    }
    check("run_folder", {name: "\n".join(sorted(lines)) for name, lines in found.items()})
