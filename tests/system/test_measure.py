"""`tunebook plan --measure` trains two steps of a recipe, once, and leaves nothing but what they took."""

from __future__ import annotations

import json
import shlex
import sys

TUNEBOOK = [sys.executable, "-m", "tunebook"]


def test_two_ranks_are_measured_once_and_the_training_is_planned_by_that(run, tmp_path):
    settings = {"TUNEBOOK_CACHE": str(tmp_path / "cache"), "TMPDIR": str(tmp_path), "cwd": tmp_path}
    words = ["quickstart", "parallelism=ddp", "hardware.gpus_per_node=2", "training.global_samples=64"]
    command = shlex.join([*TUNEBOOK, "plan", *words, "--measure", "--json"])
    first = run(["sh", "-c", f"{command} 2> stderr.log"], **settings)
    printed = (tmp_path / "stderr.log").read_text()
    assert first.exit_code == 0, printed
    assert "measuring: 2 optimizer steps" in printed
    plan = json.loads(first.output)
    taken = plan["measured"]
    assert (plan["memory_source"], len(taken["memory_gib"]), taken["row_length"]) == ("measured", 2, 1024)
    # Python with torch takes 0.4 GiB, and a model of a million weights no 2 GiB more.
    assert all(0.3 < peak < 2.5 for peak in taken["memory_gib"])
    assert plan["memory_gib"]["total"] == max(taken["memory_gib"])
    again = run([*TUNEBOOK, "plan", *words, "training.seed=9", "--measure"], **settings)
    assert "measuring: " not in again.output
    shown = run([*TUNEBOOK, "train", *words, "--dry-run"], **settings)
    for text in (again.output, shown.output):
        assert f" on each rank, measured on {taken['date']}" in text
    assert not list(tmp_path.glob("tunebook-*"))
