"""A run held against the book's evidence, made again from its manifest, and compared with another."""

from __future__ import annotations

import json

import pytest

ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # whose sums have one order
TWO_RANKS = ("parallelism=ddp", "hardware=cpu", "hardware.gpus_per_node=2")


def test_the_quickstart_agrees_with_its_evidence(quickstart, run):
    ended = run(["tunebook", "verify", str(quickstart.folder)])
    assert ended.exit_code == 0, ended.output
    assert "agrees with cpu-1-" in ended.output
    assert "DIFFERENT" not in ended.output
    assert (quickstart.folder / "verify.html").stat().st_size > 20_000


@pytest.mark.parametrize(
    "ranks", [pytest.param((), marks=pytest.mark.slow, id="one_rank"), pytest.param(TWO_RANKS, id="two_ranks")]
)
def test_a_run_is_made_again_from_its_manifest_to_the_last_bit(run, read_run, tmp_path, ranks):
    words = ["evaluation=none", "training.max_steps=6", "training.deterministic=true", "training.resume=never", *ranks]
    first = run(["tunebook", "train", "quickstart", *words, f"outputs={tmp_path}"], **ONE_THREAD)
    assert first.exit_code == 0, first.output
    original = (tmp_path / "quickstart" / "latest").resolve()
    again = run(["tunebook", "reproduce", str(original), f"--outputs={tmp_path}"], **ONE_THREAD)
    assert again.exit_code == 0, again.output
    assert "code, packages and machine are as they were" in again.output
    assert f"agrees with quickstart/{original.name}" in again.output
    repeated = (tmp_path / "quickstart" / "latest").resolve()
    assert repeated != original
    assert read_run(repeated).losses == read_run(original).losses  # every bit
    compared = run(["tunebook", "diff", str(original), str(repeated), "--json"])
    assert compared.exit_code == 0, compared.output
    found = json.loads(compared.output)
    assert found["config"] == found["manifest"] == []
    assert not any("loss" in difference["key"] for difference in found["results"])
