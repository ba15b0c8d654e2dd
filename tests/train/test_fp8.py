"""A run in fp8 with products emulated on the CPU: what it trains, records and saves, and how it ends."""

from __future__ import annotations

import json
import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from tunebook.config.choices import Compute, PackingMode
from tunebook.model import blocks
from tunebook.record.manifest import read_manifest, start_manifest
from tunebook.train import build

from .conftest import outcome


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
def asked(config, changed, wide_model):
    """Three steps of the wide model in fp8, which no CPU can do."""
    return changed(
        config, model={"path": str(wide_model)}, precision={"compute": Compute.fp8}, training={"max_steps": 3}
    )


@pytest.fixture
def fp8(asked, monkeypatch):
    """The same, computed as a GPU would."""
    pytest.importorskip("torchao", reason="torchao is in the images of GPUs with fp8 only")
    monkeypatch.setattr(build, "convert_to_fp8", partial(blocks.convert_to_fp8, emulate=True))
    return asked


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


def test_run_without_its_fp8_layers_ends_with_7(asked, run, monkeypatch):
    """Whatever the cause; here the conversion does nothing."""
    monkeypatch.setattr(build, "convert_to_fp8", lambda model, scaling: ["model.layers.0.mlp.up_proj"])
    folder, code, lines = run(asked)
    assert (code, lines) == (7, [])
    reason = outcome(folder)["reason"]
    assert "on rank 0 fp8_layers 1 was asked for and 0 found" in reason


def test_padded_rows_are_multiples_of_16_tokens_too(fp8, run, changed, monkeypatch):
    lengths = []

    def look(model, scaling):
        model.register_forward_pre_hook(
            lambda _, args, kwargs: lengths.append(kwargs["input_ids"].shape), with_kwargs=True
        )
        return blocks.convert_to_fp8(model, scaling, emulate=True)

    monkeypatch.setattr(build, "convert_to_fp8", look)
    for mode, micro in ((PackingMode.padded, 2), (PackingMode.isolated, 1)):
        settings = {"packing": {"mode": mode}, "training": {"max_steps": 2, "micro_batch_size": micro}}
        _, code, lines = run(changed(fp8, **settings), name=mode.name)
        assert code == 0
        assert len(lines) == 2
    assert {length % 16 for _, length in lengths} == {0}


def test_resumed_fp8_run_ends_with_the_same_bits(fp8, run, changed, tmp_path, same_bits):
    saved = changed(fp8, training={"max_steps": 4, "save_every_steps": 2})
    folder, code, _ = run(saved, name="whole")
    assert code == 0
    shutil.copytree(folder / "checkpoints" / "checkpoint-2", tmp_path / "again" / "checkpoints" / "checkpoint-2")
    again, code, _ = run(saved, name="again")
    assert code == 0
    whole, resumed = (load_file(one / "model" / "model.safetensors") for one in (folder, again))
    assert all(torch.equal(weight, resumed[name]) for name, weight in whole.items())
    stored = load_file(folder / "checkpoints" / "checkpoint-4" / "model.safetensors")
    assert {name: weight.dtype for name, weight in stored.items()} == dict.fromkeys(stored, torch.float32)


def test_leak_probe_runs_in_bf16(fp8, run, monkeypatch):
    passes = set()

    def look(model, scaling):
        model.register_forward_pre_hook(
            lambda _, args: passes.add((torch.is_grad_enabled(), blocks.count_fp8_layers(model)))
        )
        return blocks.convert_to_fp8(model, scaling, emulate=True)

    monkeypatch.setattr(build, "convert_to_fp8", look)
    _, code, _ = run(fp8)
    assert code == 0
    assert passes == {(False, 0), (True, 4)}
