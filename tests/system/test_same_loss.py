"""The same loss everywhere: over gloo in fp32, 20 steps agree to 1e-5 whatever the strategy, ranks and accumulation.

Every run also records what its model was wrapped in, and refuses a wrapping that is not what was asked for.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.system.conftest import NUM_STEPS
from tunebook.files import read_json

SAMPLES = 16  # documents of a step


def command(outputs: Path, strategy: str, ranks: int, *overrides: str) -> list[str]:
    return ["tunebook", "train", "quickstart", "evaluation=none", "hardware=cpu", f"training.max_steps={NUM_STEPS}",
            f"training.global_samples={SAMPLES}", f"parallelism={strategy}", f"hardware.gpus_per_node={ranks}",
            f"outputs={outputs}", *overrides]  # fmt: skip


def padded(ranks: int, accumulation: int) -> list[str]:
    """One document per row, in so many passes per step."""
    return ["packing=padded", f"training.micro_batch_size={SAMPLES // ranks // accumulation}"]


@pytest.fixture(scope="module")
def losses_of(run_forked, read_run, tmp_path_factory):
    """Train; returns the run, whose strategy has been checked by its own record."""

    def train(strategy: str, ranks: int, *overrides: str):
        outputs = tmp_path_factory.mktemp("outputs")
        ended = run_forked(command(outputs, strategy, ranks, *overrides))
        assert ended.exit_code == 0, ended.output
        return read_run(outputs / "quickstart" / "latest")

    return train


# Of four ranks, on a machine of two cores, and of ZeRO's stages CI runs what is least like the rest. One rank that
# accumulates is in tests/train/test_run.py and test_accumulation.py.
NIGHTLY = pytest.mark.slow


@pytest.mark.parametrize(("ranks", "accumulation"), [(2, 2), pytest.param(4, 1, marks=NIGHTLY), (4, 4)])
def test_ranks_and_accumulation(losses_of, one_rank, ranks, accumulation):
    trained = losses_of("ddp", ranks, *padded(ranks, accumulation))
    assert read_json(trained.folder / "plan.json")["batch"]["accumulation"] == accumulation
    assert trained.losses == pytest.approx(one_rank.losses, rel=1e-5)


@pytest.mark.parametrize(
    ("ranks", "stage"),
    [
        pytest.param(2, 1, id="2-packed-1", marks=NIGHTLY),
        *(pytest.param(2, stage, id=f"2-packed-{stage}") for stage in (2, 3)),
        *(pytest.param(4, stage, id=f"4-padded-accumulated-{stage}", marks=NIGHTLY) for stage in (1, 2)),
        pytest.param(4, 3, id="4-padded-accumulated-3"),
    ],
)
def test_zero(losses_of, saved_by, one_rank, ranks, stage):
    trained = saved_by(f"zero{stage}") if ranks == 2 else losses_of(f"zero{stage}", ranks, *padded(ranks, 2))
    assert trained.losses == pytest.approx(one_rank.losses, rel=1e-5)
    found = read_json(trained.folder / "manifest.json")["parallelism_found"]
    assert (found["strategy"], found["wrapper"], found["ranks"]) == (f"zero{stage}", "DeepSpeedEngine", ranks)
    assert read_json(trained.folder / "deepspeed.json")["zero_optimization"]["stage"] == stage


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [("zero2_offload", 2), pytest.param("zero3_offload", 2, marks=NIGHTLY), ("zero3_offload", 1)],
)
def test_offload_is_found_where_it_was_asked_for(losses_of, one_rank, strategy, ranks):
    trained = losses_of(strategy, ranks)
    assert trained.losses == pytest.approx(one_rank.losses, rel=1e-5)
    found = read_json(trained.folder / "manifest.json")["parallelism_found"]
    assert found["offload_optimizer"] == "cpu"
    assert found["offload_parameters"] == ("cpu" if strategy == "zero3_offload" else "none")


@pytest.mark.parametrize("stage", [pytest.param(2, marks=NIGHTLY), 3])
def test_zero_in_bf16_computes_as_ddp_does(losses_of, stage):
    """DeepSpeed's own way, parallelism.mixed_precision=cast, is 1.6e-2 away after five of these steps."""
    ddp = losses_of("ddp", 2, "precision=bf16").losses
    trained = losses_of(f"zero{stage}", 2, "precision=bf16")
    assert read_json(trained.folder / "manifest.json")["parallelism_found"]["autocast"] == "bf16"
    assert trained.losses == pytest.approx(ddp, rel=2e-3)


def test_a_strategy_that_a_library_replaces_ends_with_7_on_every_rank(saved_by, run_forked, project_root, tmp_path):
    """fsdp on a CPU is refused by a rule. Past the rule, in the ranks, accelerate wraps DDP without a word."""
    folder = tmp_path / "run"
    shutil.copytree(saved_by("ddp").folder, folder, ignore=shutil.ignore_patterns("checkpoints"))
    frozen = (folder / "run.yaml").read_text()
    asked = frozen.replace("strategy: ddp", "strategy: fsdp\n  wrap_classes: []")
    assert asked != frozen
    for file in [*folder.glob("outcome-*.json"), folder / "metrics.jsonl"]:
        file.unlink()
    (folder / "run.yaml").write_text(asked)
    ended = run_forked([str(project_root / "src" / "tunebook" / "train" / "__main__.py"), str(folder)], ranks=2)
    outcomes = [json.loads((folder / f"outcome-{rank}.json").read_text()) for rank in (0, 1)]
    assert [outcome["exit_code"] for outcome in outcomes] == [7, 7], ended.output
    assert "on rank 0 strategy fsdp was asked for and ddp found" in outcomes[1]["reason"]
