"""`plan` and `train --dry-run`: what is printed for people and for programs, and the exit code."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from tunebook.commands.job import plan_job
from tunebook.commands.plan import plan_command, show_launch
from tunebook.commands.train import set_up_folder
from tunebook.config.frozen import load_config
from tunebook.errors import DataError
from tunebook.hardware.detect import Machine
from tunebook.plan import draft
from tunebook.record.run_folder import RUN_FILE

from .test_train import PREPARED

TOO_LARGE = ("hardware=cpu", "parallelism=single", "model.liger_kernel=false")  # 46 GiB of states on 8 GiB
KEYS = {
    "recipe", "hardware", "precision", "attention", "packing", "batch", "memory_gib", "fits", "choices", "problems",
    "would_fit", "host_memory_gib", "nvme_gib", "time", "memory_source", "measured",
}  # fmt: skip


@pytest.fixture(autouse=True)
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cores and 8 GiB, wherever this runs."""
    machine = Machine(gpus=[], driver=None, num_cpus=2, host_memory_gib=8.0)
    monkeypatch.setattr(draft, "detect_machine", lambda: machine)


@pytest.fixture
def as_json(capsys: pytest.CaptureFixture[str]) -> Any:
    """`as_json("quickstart", "training.seed=1")`: the exit code and what was printed."""

    def plan(recipe: str | None, *words: str) -> tuple[int, dict[str, Any]]:
        code = plan_command(recipe, [*words], [], Console(), as_json=True)
        plan: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert set(plan) == KEYS
        return code, plan

    return plan


YAML_WORDS = {
    "recipe": ("qwen3b_zero2", ["training.seed=3", "hardware.reference={gpus_per_node: 4}"]),
    "auto": ("quickstart", ["parallelism=auto", "packing={row_length: 512}"]),
}  # fmt: skip


@pytest.mark.parametrize(("recipe", "words"), YAML_WORDS.values(), ids=YAML_WORDS)
def test_the_yaml_is_the_configuration_of_the_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, recipe: str | None, words: list[str]
) -> None:
    job = plan_job(recipe, words, [])
    set_up_folder(job, job.batch, PREPARED, tmp_path)
    printed = tmp_path / "printed.yaml"
    assert plan_command(recipe, words, [], Console(), as_yaml=True) == 0
    printed.write_text(capsys.readouterr().out)
    assert yaml.safe_load(printed.read_text()) == yaml.safe_load((tmp_path / RUN_FILE).read_text())
    assert load_config(printed) == load_config(tmp_path / RUN_FILE)


@pytest.mark.parametrize("recipe", ["quickstart", "dolly3b_zero3_nvme"])
def test_the_json_of_a_plan_is_complete(as_json: Any, recipe: str) -> None:
    code, plan = as_json(recipe)
    assert (code, plan["recipe"]) == (0, recipe)
    assert set(plan["hardware"]) == {"generation", "num_nodes", "gpus_per_node", "memory_gib"}
    assert {"global_samples", "micro", "accumulation", "world_size"} <= set(plan["batch"])
    parts = ("weights", "gradients", "optimizer", "activations", "buffers", "overhead")
    memory, host = plan["memory_gib"], plan["host_memory_gib"]
    assert memory["total"] == pytest.approx(sum(memory[part] for part in parts), abs=0.01)
    assert host["total"] >= max(host["processes"] + host["loading"], host["offload"] + host["saving"]) - 0.01
    assert (plan["nvme_gib"] > 0) == ("nvme" in recipe)
    assert set(plan["time"]) == {
        "tokens_per_second_per_gpu", "tokens_per_second", "tokens", "hours", "gpu_hours", "assumption",
    }  # fmt: skip
    assert all(set(choice) == {"key", "value", "why"} for choice in plan["choices"])


@pytest.mark.nightly
def test_a_strategy_that_was_chosen_is_planned_like_one_that_was_typed(as_json: Any) -> None:
    words = ("model=llama3_8b", "dataset=synthetic", "training.global_samples=64", "hardware=hopper")
    words += ("hardware.gpus_per_node=8",)
    (code, chosen), (_, typed) = (as_json(None, *words, f"parallelism={name}") for name in ("auto", "fsdp_grad_op"))
    assert code == 0
    mine, theirs = (
        {choice["key"]: choice for choice in plan.pop("choices")}["parallelism.strategy"] for plan in (chosen, typed)
    )
    assert mine["value"] == theirs["value"] == "fsdp_grad_op"
    assert theirs["why"] == "as asked"
    assert "not ddp (does not fit: " in mine["why"]
    assert chosen == typed


def test_problems_are_in_the_json_and_end_it_with_2(as_json: Any) -> None:
    for recipe, override, problem_id in (
        ("qwen3b_zero", "training.seed=0", "unknown-recipe"),
        ("quickstart", "training.sead=0", "unknown-key"),
        ("qwen3b_zero2", "training.global_samples=4", "batch-too-small"),
    ):
        code, plan = as_json(recipe, override)
        assert (code, plan["recipe"]) == (2, recipe)
        assert [problem["id"] for problem in plan["problems"] if problem["is_error"]] == [problem_id]
    code, plan = as_json("qwen3b_zero2", "precision=bf16", "training.resume=nvr")
    assert code == 2
    assert {"bf16-on-volta", "resume-not-found"} <= {problem["id"] for problem in plan["problems"]}
    bf16 = next(problem for problem in plan["problems"] if problem["id"] == "bf16-on-volta")
    assert (bf16["key"], bf16["fix"]) == ("precision.compute", "precision.compute=fp32")
    assert bf16["place"] == "override 'precision=bf16'"
    assert plan["precision"] == "bf16"  # as asked
    assert (plan["batch"], plan["memory_gib"], plan["fits"], plan["time"]) == (None, None, None, None)


def test_a_plan_that_cannot_fit_ends_with_3(as_json: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, plan = as_json("qwen3b_zero2", *TOO_LARGE)
    assert (code, plan["fits"]) == (3, False)
    assert [problem["id"] for problem in plan["problems"]] == ["does-not-fit"]
    assert plan["would_fit"] == []
    assert plan_command("qwen3b_zero2", [*TOO_LARGE], [], Console()) == 3
    out = capsys.readouterr().out
    assert out.startswith("does not fit: ")
    assert "Nothing that was tried fits; the least memory takes:\n  peft=" in out


@pytest.mark.nightly
def test_a_plan_whose_host_is_too_small_ends_with_3(as_json: Any) -> None:
    words = ("hardware.host_memory_gib=931",)
    code, plan = as_json("llama2_70b_fsdp_1node", *words)
    assert (code, plan["fits"], plan["host_memory_gib"]["capacity"]) == (3, False, 931)
    assert plan["host_memory_gib"]["offload"] == pytest.approx(1087.9, abs=0.5)
    assert [problem["id"] for problem in plan["problems"] if problem["is_error"]] == ["host-memory-too-small"]
    console = Console(file=io.StringIO())
    assert plan_command("llama2_70b_fsdp_1node", [*words], [], console) == 3
    assert console.file.getvalue().startswith("does not fit: 1,415.3 of 931 GiB of host memory\n")


def test_missing_files_end_a_plan_as_they_end_the_training(capsys: Any, tmp_path: Path, as_json: Any) -> None:
    """Everything that can be planned without the data is shown all the same."""
    words = ["hardware=hopper", "dataset=file", f"dataset.path={tmp_path}/their.jsonl"]
    with pytest.raises(DataError, match=f"dataset.path: no file matches {tmp_path}/their.jsonl") as caught:
        plan_command("qwen3b_zero2", words, [], Console(width=200))
    assert caught.value.exit_code == 4
    printed = capsys.readouterr().out
    assert printed.startswith("fits: ") and "missing; planned without it" in printed
    code, plan = as_json("qwen3b_zero2", *words)
    assert (code, plan["fits"]) == (4, True)
    assert [problem["id"] for problem in plan["problems"]] == ["data-file-not-found"]
    (tmp_path / "their.jsonl").write_text('{"text": "a"}\n')
    assert plan_command("qwen3b_zero2", words, [], Console(width=200)) == 0
    assert "missing" not in capsys.readouterr().out
    (tmp_path / "their.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    with pytest.raises(DataError, match="type method=dpo"):
        plan_command("qwen3b_zero2", words, [], Console(width=200))
    assert "for another method; planned without it" in capsys.readouterr().out
    (tmp_path / "mine.jsonl").write_text('{"text": "a"}\n')
    parts = ["dataset=mixture", *(f"dataset.parts.{name}.path={tmp_path}/{name}.jsonl" for name in ("mine", "their"))]
    with pytest.raises(DataError, match="type method=dpo"):
        plan_command("qwen3b_zero2", [words[0], *parts], [], Console(width=200))


def test_a_dry_run_shows_what_a_job_starts_in_containers_and_on_several_nodes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def commands(*words: str) -> list[str]:
        show_launch(plan_job("quickstart", ["launcher=slurm", *words], []), Console(width=200), Path("/runs/1"))
        lines = capsys.readouterr().out.splitlines()
        return [line.removeprefix("in the job: ") for line in lines if line.startswith("in the job: ")]

    (ranks,) = commands("launcher.container_image=registry/x:1", "launcher.container_runtime=docker")
    assert ranks.startswith("srun --nodes 1 --ntasks 1 ")
    assert " docker run --rm " in ranks
    assert " registry/x:1 -m tunebook.launch.local " in ranks
    nodes = ["hardware=cpu", "hardware.num_nodes=2", "hardware.gpus_per_node=1", "parallelism=ddp"]
    (ranks,) = commands(*nodes)
    assert ranks.startswith("srun --nodes 2 --ntasks 2 --ntasks-per-node 1 --kill-on-bad-exit=1 ")
    assert ranks.endswith("-m tunebook.launch.local /runs/1 --endpoint '<host>:<port>'")
    assert commands() == []  # one node: the script says it all
