"""A run in fp8 with products emulated on the CPU: what it trains, records and saves, and how it ends."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from tunebook.config.choices import Compute, PackingMode
from tunebook.model import fp8 as fp8_layers
from tunebook.record.manifest import read_manifest, start_manifest
from tunebook.train import build

from .conftest import losses, outcome, same_weights


@pytest.fixture
def fp8(config, changed, tiny_model, tmp_path):
    """Steps in fp8 of the tiny model with a feed-forward network that is wide enough for fp8 to pay."""
    folder = tmp_path / "wide"
    shutil.copytree(tiny_model, folder)
    settings = json.loads((folder / "config.json").read_text()) | {"intermediate_size": 2048}
    (folder / "config.json").write_text(json.dumps(settings))
    return changed(config, model={"path": str(folder)}, precision={"compute": Compute.fp8}, training={"max_steps": 3})


@pytest.fixture
def passes(monkeypatch):
    """Products as a GPU would compute them. Kept of each pass: if it has gradients, the layers in fp8, its shape."""
    pytest.importorskip("torchao", reason="torchao is in the images of GPUs with fp8 only")
    found = []

    def convert(model, scaling):
        def look(_, args, kwargs):
            found.append(
                (torch.is_grad_enabled(), fp8_layers.count_fp8_layers(model), tuple(kwargs["input_ids"].shape))
            )

        model.register_forward_pre_hook(look, with_kwargs=True)
        return fp8_layers.convert_to_fp8(model, scaling, emulate=True)

    monkeypatch.setattr(build, "convert_to_fp8", convert)
    return found


def test_it_trains_close_to_bf16_and_resumes_with_ordinary_weights(fp8, passes, run, changed, tmp_path):
    (tmp_path / "run").mkdir()
    start_manifest(tmp_path / "run", fp8, world_size=1, command=["tunebook"])
    folder, code, lines = run(fp8)
    assert code == 0
    manifest = read_manifest(folder)
    assert manifest["parallelism_found"]["fp8_layers"] == 4  # gate_proj and up_proj of two blocks
    assert manifest["leak_probe"]["checked"] and manifest["leak_probe"]["sees_leaks"]
    assert {(has_gradients, layers) for has_gradients, layers, _ in passes} == {(False, 0), (True, 4)}  # probe in bf16
    assert {length % 16 for has_gradients, _, (_, length) in passes if has_gradients} == {0}
    other, code, expected = run(changed(fp8, precision={"compute": Compute.bf16}), name="bf16")
    assert code == 0
    differences = [abs(line["loss"] / other["loss"] - 1) for line, other in zip(lines, expected, strict=True)]
    assert 0 < max(differences) < 0.01
    formats = [
        {name: (weight.shape, weight.dtype) for name, weight in load_file(one / "model" / "model.safetensors").items()}
        for one in (folder, other)
    ]
    assert formats[0] == formats[1]
    assert {dtype for _, dtype in formats[0].values()} == {torch.float32}
    shutil.copytree(folder / "checkpoints" / "checkpoint-2", tmp_path / "again" / "checkpoints" / "checkpoint-2")
    again, code, resumed = run(fp8, name="again")
    assert code == 0
    assert losses(resumed) == losses(lines)[2:]
    assert same_weights(folder / "model", again / "model")


def test_padded_rows_are_multiples_of_16_tokens_too(fp8, passes, run, changed):
    padded = {"packing": {"mode": PackingMode.padded}, "training": {"max_steps": 1, "micro_batch_size": 2}}
    assert run(changed(fp8, **padded))[1] == 0
    assert {length % 16 for _, _, (_, length) in passes} == {0}


def test_run_without_its_fp8_layers_ends_with_7(fp8, run, monkeypatch):
    """Whatever the cause; here the conversion does nothing."""
    monkeypatch.setattr(build, "convert_to_fp8", lambda model, scaling: ["model.layers.0.mlp.up_proj"])
    folder, code, lines = run(fp8)
    assert (code, lines) == (7, [])
    assert "on rank 0 fp8_layers 1 was asked for and 0 found" in outcome(folder)["reason"]
