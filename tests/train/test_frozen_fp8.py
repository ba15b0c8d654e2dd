"""Adapters over a frozen base in fp8, emulated on the CPU: what they learn, what is saved, and that it is resumed."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file

from tunebook.checkpoint.export.run import export_run
from tunebook.config.choices import Compute, MasterWeights, PeftMethod, Weights
from tunebook.config.frozen import config_to_yaml
from tunebook.model.load import load_model
from tunebook.model.random_weights import draw_weights
from tunebook.record.manifest import read_manifest, start_manifest

from .conftest import losses, same_weights, weights

# peft asks transformers by a name that has a newer one
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
FORMATS = {"compute": Compute.fp8, "master_weights": MasterWeights.bf16}


@pytest.fixture
def over_fp8(config, changed, tiny_model, tmp_path):
    """Adapters over pretrained weights: four steps of eight documents, a checkpoint after each second one."""
    folder = tmp_path / "base"
    shutil.copytree(tiny_model, folder)
    base = load_model(config)
    draw_weights(base, seed=1)
    base.to(torch.bfloat16).save_pretrained(folder)
    return changed(
        config,
        model={"path": str(folder), "weights": Weights.pretrained},
        peft={"method": PeftMethod.lora, "rank": 4, "dropout": 0.0},
        precision=FORMATS,
        dataset={"validation_share": 0.2},
        training={"max_steps": 4, "evaluate_every_steps": 2, "load_best_at_end": True},
    )


@pytest.fixture
def trained(over_fp8, run, tmp_path):
    """The folder of such a run, and its metrics."""
    (tmp_path / "run").mkdir()
    start_manifest(tmp_path / "run", over_fp8, world_size=1, command=["tunebook"])
    folder, code, lines = run(over_fp8)
    assert code == 0
    return folder, lines


def test_losses_are_close_to_those_over_bf16(over_fp8, trained, run, changed):
    folder, lines = trained
    manifest = read_manifest(folder)
    assert manifest["parallelism_found"]["fp8_layers"] == 14  # seven of each block
    assert manifest["leak_probe"]["sees_leaks"]
    assert manifest["leak_probe"]["moved"] == 0  # each token has a scale of its own
    _, code, expected = run(changed(over_fp8, precision={"compute": Compute.bf16}), name="bf16")
    assert code == 0
    for key in ("loss", "validation_loss"):
        found, other = ([line[key] for line in each if key in line] for each in (lines, expected))
        assert found == pytest.approx(other, rel=0.01)
        assert found != other
        assert found[-1] < found[0]


def test_adapters_alone_are_saved_and_resumed_to_the_digit(over_fp8, trained, run, tmp_path):
    folder, lines = trained
    checkpoint = folder / "checkpoints" / "checkpoint-2"
    assert {name.split(".")[-2] for name in weights(checkpoint) | weights(folder / "model")} == {"lora_A", "lora_B"}
    shutil.copytree(checkpoint, tmp_path / "again" / "checkpoints" / "checkpoint-2")
    again, code, resumed = run(over_fp8, name="again")
    assert code == 0
    assert losses(resumed) == losses(lines)[2:]
    assert same_weights(folder / "model", again / "model")


def test_the_export_merges_into_the_base_as_it_was(over_fp8, trained, changed, tmp_path):
    folder, _ = trained
    (folder / "plan.json").write_text("{}")
    in_bf16 = changed(over_fp8, precision={"compute": Compute.bf16})
    found = []
    for name, config in (("fp8", over_fp8), ("bf16", in_bf16)):
        (folder / "run.yaml").write_text(config_to_yaml(config))
        export_run(str(folder), tmp_path, print, merge=True, to=tmp_path / name)
        found.append(load_file(tmp_path / name / "model.safetensors"))
    base = weights(tmp_path / "base")
    assert all(torch.equal(found[0][name], found[1][name]) for name in base)
    assert any(not torch.equal(found[0][name], base[name]) for name in base)
