"""A run held against the book's evidence, made again from its manifest, and compared with another."""

from __future__ import annotations

import json

import pytest

from tests.system.conftest import BIT_FOR_BIT, ONE_THREAD


def test_the_quickstart_agrees_with_its_evidence(quickstart, run):
    ended = run(["tunebook", "verify", str(quickstart.folder)])
    assert ended.exit_code == 0, ended.output
    assert "agrees with cpu-1-" in ended.output
    assert "DIFFERENT" not in ended.output


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_run_is_made_again_from_its_manifest_to_the_last_bit(run, read_run, train_once, saved_by, tmp_path, ranks):
    alone = (*BIT_FOR_BIT, "hardware=cpu", "parallelism=single")
    original = (saved_by("ddp") if ranks == 2 else train_once(*alone, **ONE_THREAD)).folder
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
    assert [difference["key"] for difference in found["config"]] == ["outputs"]
    assert found["manifest"] == []
    rows = {row["name"]: row for row in found["results"]}
    assert rows["loss"]["difference"] == 0.0
    assert rows["loss"]["reason"].startswith("equal to the last bit")
