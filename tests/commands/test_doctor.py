"""`tunebook doctor` on this machine, and its output."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from tunebook.commands import doctor as command
from tunebook.commands.doctor import doctor_command
from tunebook.doctor.checks import Finding
from tunebook.hardware.detect import Machine

CPU_ONLY = Machine(gpus=[], driver=None, num_cpus=2, host_memory_gib=8.0)


@pytest.fixture
def levels(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, str]]:
    """`levels("quickstart", "training.seed=1")`: the level of each finding on a machine without GPUs."""
    monkeypatch.setattr(command, "check_driver", lambda: (CPU_ONLY, Finding(id="gpus-found", what="no GPU")))
    monkeypatch.setattr(command, "check_torch", lambda machine: Finding(id="torch-works", what="torch"))

    def run(recipe: str | None = None, *overrides: str) -> dict[str, str]:
        code = doctor_command(recipe, list(overrides), [], Console(file=io.StringIO()), as_json=True)
        findings: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["findings"]
        findings_by_id = {finding["id"]: finding["level"] for finding in findings}
        assert all((finding["fix"] is None) == (finding["level"] == "ok") for finding in findings)
        assert code == (2 if "error" in findings_by_id.values() else 0)
        return findings_by_id

    return run


def test_without_a_recipe_the_machine_alone_is_checked(levels):
    ids = {"gpus-found", "container", "torch-works", "shm-size", "disk-space"}
    assert set(levels()) == set(levels(None, "outputs=elsewhere", "hardware.num_nodes=2")) == ids


def test_a_recipe_for_this_machine_and_one_for_gpus_that_are_not_here(levels):
    gpus = ("hardware=hopper", "parallelism=ddp", "hardware.gpus_per_node=2")
    assert levels("quickstart")["recipe"] == "ok"
    findings_by_id = levels("quickstart", *gpus, "attention=sdpa", "packing=padded", "model.compile_layers=false")
    assert (findings_by_id["no-gpu-here"], findings_by_id["recipe"]) == ("error", "ok")


@pytest.mark.parametrize(
    ("words", "id"),
    [
        (("qwen3b_zeor2",), "unknown-recipe"),
        (("quickstart", "training.sede=1"), "unknown-key"),
        (("quickstart", "precision=fp16", "hardware=cpu"), "needs-gpu"),
        (("quickstart", "model.name=a/model"), "model-not-named"),
    ],
)
def test_what_is_wrong_with_a_request_is_a_finding(words, id, levels):
    findings_by_id = levels(*words)
    assert findings_by_id[id] == "error" and "recipe" not in findings_by_id


@pytest.mark.parametrize("torch_works", [True, False])
def test_nccl_is_tried_where_torch_works_on_several_gpus(torch_works, levels, monkeypatch):
    ranks: list[int] = []
    torch = Finding(id="torch-works", what="torch", fix=None if torch_works else "fix", is_error=not torch_works)
    machine = Machine(gpus=[None] * 2, driver="580", num_cpus=2, host_memory_gib=8.0)  # type: ignore[list-item]
    monkeypatch.setattr(command, "check_driver", lambda: (machine, torch))
    monkeypatch.setattr(command, "check_image", lambda machine, config: iter(()))
    monkeypatch.setattr(command, "check_torch", lambda machine: torch)
    monkeypatch.setattr(command, "check_links", lambda machine: Finding(id="links", what="NVLink"))
    monkeypatch.setattr(command, "check_nccl", lambda num: (ranks.append(num), Finding(id="nccl", what="right"))[1])
    levels()
    assert ranks == ([2] if torch_works else [])
