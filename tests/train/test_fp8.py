"""A run in fp8, its products computed on the CPU as a GPU would: what it trains, records, saves, and where it stops."""

from __future__ import annotations

import json
from functools import partial

import pytest
from safetensors.torch import load_file

from tunebook.config.choices import Compute
from tunebook.model import fp8_layers
from tunebook.record.manifest import read_manifest, start_manifest
from tunebook.train import run as run_module

pytest.importorskip("torchao", reason="torchao is in the images of GPUs with fp8 only")


@pytest.fixture
def wide_model(tiny_model, tmp_path):
    """The tiny model with a feed-forward network that is wide enough for fp8 to pay."""
    folder = tmp_path / "wide"
    folder.mkdir()
    for file in tiny_model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    settings = json.loads((folder / "config.json").read_text()) | {"intermediate_size": 2048}
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def fp8(config, changed, wide_model, monkeypatch):
    """Three steps of the wide model in fp8."""
    monkeypatch.setattr(run_module, "convert_to_fp8", partial(fp8_layers.convert_to_fp8, emulate=True))
    return changed(
        config, model={"path": str(wide_model)}, precision={"compute": Compute.fp8}, training={"max_steps": 3}
    )


def test_it_trains_close_to_bf16_and_writes_ordinary_weights(fp8, run, changed, tmp_path):
    (tmp_path / "run").mkdir()
    start_manifest(tmp_path / "run", fp8, world_size=1, command=["tunebook"])
    folder, code, lines = run(fp8)
    assert code == 0
    found = read_manifest(folder)
    assert found["parallelism_found"]["fp8_layers"] == 4  # gate_proj and up_proj of two blocks
    assert found["leak_probe"]["checked"]
    assert found["leak_probe"]["sees_leaks"]
    _, code, expected = run(changed(fp8, precision={"compute": Compute.bf16}), name="bf16")
    assert code == 0
    differences = [abs(line["loss"] / other["loss"] - 1) for line, other in zip(lines, expected, strict=True)]
    assert 0 < max(differences) < 0.01
    weights, others = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("run", "bf16"))
    assert {name: (one.shape, one.dtype) for name, one in weights.items()} == {
        name: (one.shape, one.dtype) for name, one in others.items()
    }
