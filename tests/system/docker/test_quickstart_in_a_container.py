"""`make train WHERE=container` and plain `docker compose run`, on the cpu image.

The quickstart's first part: that all of it learns what it claims is `tests/system/test_quickstart.py`'s.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

FIRST_PART = "training.max_steps=100 evaluation.limit=50"
SHORT = ["training.max_steps=4", "evaluation=none"]


def run_folder(text: str, outputs: Path) -> Path:
    """The run folder that a command's output names: the same path in the container and outside."""
    found = re.findall(rf"{re.escape(str(outputs))}/\w+/[\w.-]+", text)
    assert found, text[-3000:]
    return Path(found[-1])


def owners(folder: Path) -> set[tuple[int, int]]:
    """Who owns the files under a folder."""
    return {(path.lstat().st_uid, path.lstat().st_gid) for path in [folder, *folder.rglob("*")]}


def fingerprint(checkout: Path) -> dict[str, int]:
    """Every file of the checkout but what runs and builds may write, with its time of change."""
    left_out = ("outputs", ".cache", ".env", ".git")
    files = (path for path in checkout.rglob("*") if path.relative_to(checkout).parts[0] not in left_out)
    return {str(path): path.lstat().st_mtime_ns for path in files if path.is_file()}


@pytest.fixture(scope="module")
def trained(checkout, in_checkout, cpu_image):
    before = fingerprint(checkout)
    done = in_checkout("make", "train", "WHERE=container", "GPU=cpu", f"ARGS={FIRST_PART}", timeout_s=1500)
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout, before


def test_the_quickstart_learns_in_the_container(trained, checkout):
    output, _ = trained
    folder = (checkout / "outputs" / "quickstart" / "latest").resolve()
    assert str(folder) in output  # paths printed inside hold outside
    losses = [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0] / 2
    assert all((folder / "evaluation" / f"{when}.json").is_file() for when in ("before", "after"))
    assert (folder / "report.html").stat().st_size > 50_000
    assert "Warning" not in output


def test_its_manifest_says_which_image_and_code_it_ran_in(trained, checkout, inspect, cpu_image, in_checkout):
    manifest = json.loads((checkout / "outputs" / "quickstart" / "latest" / "manifest.json").read_text())
    labels = inspect(cpu_image)["Config"]["Labels"]
    commit = in_checkout("git", "rev-parse", "HEAD").stdout.strip()
    assert labels["org.opencontainers.image.revision"] == manifest["code"]["git_commit"] == commit
    assert labels["tunebook.lock-sha256"] in json.dumps(manifest)
    assert labels["tunebook.generation"] == "cpu"


def test_files_belong_to_the_caller(trained, checkout):
    assert owners(checkout / "outputs") == {(os.getuid(), os.getgid())}


def test_nothing_is_written_outside_outputs_and_the_caches(trained, checkout):
    _, before = trained
    assert fingerprint(checkout) == before


def test_compose_evaluates_the_newest_finished_run_and_trains(trained, checkout, in_checkout):
    folder = (checkout / "outputs" / "quickstart" / "latest").resolve()
    evaluated = in_checkout("docker", "compose", "run", "--rm", "eval", "--limit", "8", timeout_s=600)
    assert evaluated.returncode == 0, evaluated.stdout[-4000:]
    assert len(list((folder / "evaluation").glob("eval-*[Z0-9].json"))) == 1
    words = ("docker", "compose", "run", "--rm", "eval", f"run={folder}", "suite=quickstart", "--limit", "8")
    again = in_checkout(*words, timeout_s=600)
    assert again.returncode == 0, again.stdout[-4000:]
    done = in_checkout("docker", "compose", "run", "--rm", "train", "quickstart", *SHORT, timeout_s=600)
    assert done.returncode == 0, done.stdout[-4000:]
    short = run_folder(done.stdout, checkout / "outputs")
    assert len((short / "metrics.jsonl").read_text().splitlines()) == 4


def test_programs_that_the_model_writes_run_in_the_sandbox_which_make_starts(trained, checkout, in_checkout):
    folder = (checkout / "outputs" / "quickstart" / "latest").resolve()
    before = set((folder / "evaluation").glob("eval-*[Z0-9].json"))
    words = f"run={folder} tasks=[small_python_instruct] --limit 2"
    try:
        done = in_checkout("make", "eval", f"ARGS={words}", "WHERE=container", "GPU=cpu", timeout_s=900)
        assert done.returncode == 0, done.stdout[-4000:]
        (file,) = set((folder / "evaluation").glob("eval-*[Z0-9].json")) - before
        code = json.loads(file.read_text())["code"]
        assert code["execution"]["backend"] == "service"
        samples = [json.loads(line) for line in file.with_name(code["samples"]).read_text().splitlines()]
        assert len(samples) == 2
        assert all(sample["status"] not in (None, "broken") for sample in samples)
    finally:
        in_checkout("docker", "compose", "rm", "--force", "--stop", "--volumes", "sandbox")


def test_sweep_plan_and_errors_come_through_compose(cpu_image, in_checkout):
    listed = in_checkout("docker", "compose", "run", "--rm", "sweep", "quickstart", "training.seed=0,1", "--dry-run")
    assert listed.returncode == 0, listed.stdout
    assert "2 trials" in listed.stdout
    plan = in_checkout("docker", "compose", "run", "--rm", "plan", "qwen3b_zero2", "hardware=volta", "--json")
    assert json.loads(plan.stdout[plan.stdout.index("{") : plan.stdout.rindex("}") + 1])["recipe"] == "qwen3b_zero2"
    wrong = in_checkout("docker", "compose", "run", "--rm", "train", "quickstart", "training.max_step=4")
    assert wrong.returncode == 2
    assert "training.max_steps" in wrong.stdout


def test_a_gpu_recipe_is_refused_in_the_cpu_image_with_the_right_image_named(cpu_image, in_checkout):
    done = in_checkout("docker", "compose", "run", "--rm", "train", "qwen3b_zero2", "hardware=volta")
    assert done.returncode == 2, done.stdout
    assert "GPU=volta" in done.stdout
