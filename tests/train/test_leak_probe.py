"""The leak probe in real runs of a tiny model: isolated rows pass, and every known leak ends the run with 7."""

from __future__ import annotations

import inspect
import json
import random
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoConfig, Qwen2Model
from transformers.models.lfm2 import modeling_lfm2
from transformers.models.qwen3_5 import modeling_qwen3_5

from tunebook.config.choices import Attention, Compute, PackingMode
from tunebook.record.manifest import read_manifest, start_manifest
from tunebook.train import leak_probe
from tunebook.train.leak_probe import LeakProbe, TrainingForward
from tunebook.train.methods.sft import RecipeTrainer

from .conftest import outcome


@pytest.fixture
def probed(config, run, changed, tmp_path):
    """Run one step; returns the exit code, the reason, the manifest's entry and the metrics."""

    def train(**groups):
        (tmp_path / "run").mkdir()
        asked = changed(config, **({"training": {"max_steps": 1}} | groups))
        start_manifest(tmp_path / "run", asked, world_size=1, command=["tunebook"])
        folder, code, lines = run(asked)
        reason = outcome(folder)["reason"]
        return code, reason, read_manifest(folder).get("leak_probe"), lines

    return train


@pytest.mark.parametrize("attention", [Attention.sdpa, Attention.eager])
def test_isolated_rows_pass_and_what_was_measured_is_recorded(probed, attention):
    code, _, entry, lines = probed(attention={"implementation": attention})
    assert (code, len(lines)) == (0, 1)
    assert entry["checked"] is entry["sees_leaks"] is True
    assert (entry["ranks"], entry["worst_rank"]) == (1, 0)
    assert entry["moved"] <= entry["alone"] <= entry["tolerance"]["logits"] == 32 * 128 * 2.0**-24
    assert entry["moved"] <= entry["tolerance"]["moved"] == 2.0**-20
    assert entry["leaking"] > 1000 * entry["tolerance"]["logits"]
    assert entry["loss_difference"] <= entry["tolerance"]["loss"]
    assert entry["tokens_together"] == entry["tokens_apart"] == 78
    assert 0 < entry["probe_s"] < 60


def refused(code, reason, entry, lines):
    """Check the ending of a leaking run: before its first step, with the measurement recorded."""
    assert code == 7
    assert "documents that share a packed row affect each other" in reason
    assert "packing=padded" in reason
    asked = re.search(r"attention=(\w+)\)", reason)
    assert asked and not reason.endswith(f"such as attention={asked[1]}"), "advises what was asked for"
    assert lines == []
    return entry


def test_an_all_ones_mask_is_caught(probed, monkeypatch):
    inputs_of = TrainingForward._inputs

    def with_mask(self, documents):
        inputs = inputs_of(self, documents)
        return inputs | {"attention_mask": torch.ones_like(inputs["input_ids"])}

    monkeypatch.setattr(TrainingForward, "_inputs", with_mask)
    entry = refused(*probed())
    assert entry["moved"] > 0.01
    assert entry["alone"] > 0.01


def test_a_cache_is_caught(probed, monkeypatch):
    forward = Qwen2Model.forward
    monkeypatch.setattr(Qwen2Model, "forward", lambda self, **inputs: forward(self, **inputs | {"use_cache": True}))
    assert refused(*probed())["moved"] > 0.01


def test_positions_that_are_not_reset_are_caught(probed, monkeypatch):
    prepare = RecipeTrainer._prepare_inputs

    def counted_through(self, inputs):
        inputs = prepare(self, inputs)
        positions = torch.arange(inputs["input_ids"].shape[1])[None]
        return inputs | {"position_ids": positions}

    monkeypatch.setattr(RecipeTrainer, "_prepare_inputs", counted_through)
    assert refused(*probed())["moved"] > 0.01


def test_positions_that_are_reset_one_token_late_are_caught(probed, monkeypatch):
    """The first token of a document attends to the previous document."""
    prepare = RecipeTrainer._prepare_inputs

    def late(self, inputs):
        inputs = prepare(self, inputs)
        positions = inputs["position_ids"].clone()
        (starts,) = (positions[0] == 0).nonzero(as_tuple=True)
        for start in starts[1:].tolist():
            positions[0, start] = positions[0, start - 1] + 1
            positions[0, start + 1 :] -= 1
        return inputs | {"position_ids": positions}

    monkeypatch.setattr(RecipeTrainer, "_prepare_inputs", late)
    entry = refused(*probed())
    assert entry["moved"] > 0.01


@pytest.fixture
def small_model(tiny_model, tmp_path):
    """The folder of a small model of another architecture, with the tiny one's tokenizer."""

    def write(kind, **sizes):
        folder = tmp_path / kind
        shutil.copytree(tiny_model, folder)
        vocabulary = json.loads((tiny_model / "config.json").read_text())["vocab_size"]
        ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
        AutoConfig.for_model(kind, vocab_size=vocabulary, **sizes, **ends).save_pretrained(folder)
        return {"path": str(folder)}

    return write


def test_a_leak_that_rounding_in_16_bits_could_hide_is_caught(probed, small_model):
    """Bloom's attention uses no positions, so it treats packed documents as one."""
    bloom = small_model("bloom", hidden_size=64, n_head=4, n_layer=4)
    eager = {"implementation": Attention.eager}
    entry = refused(*probed(model=bloom, precision={"compute": Compute.bf16}, attention=eager))
    assert entry["tolerance"]["moved"] < entry["moved"] < entry["tolerance"]["logits"]


SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
HYBRIDS = {
    "lfm2": {"layer_types": ["conv", "full_attention"], "num_key_value_heads": 4},
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention"], "num_key_value_heads": 4, "head_dim": 16,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    },
}  # fmt: skip
_STATES = {
    "lfm2": (modeling_lfm2, "causal_conv1d_fn"),
    "qwen3_5_text": (modeling_qwen3_5, "torch_chunk_gated_delta_rule"),
}


@pytest.fixture(params=HYBRIDS)
def hybrid(request, small_model, monkeypatch):
    """A small model whose layers carry a state along the row; afterwards its functions are transformers' own again."""
    for file, _ in _STATES.values():
        for name, value in list(vars(file).items()):
            if inspect.isfunction(value):
                monkeypatch.setattr(file, name, value)
    return request.param, small_model(request.param, **SIZES, **HYBRIDS[request.param])


def test_states_are_kept_apart_on_a_cpu(probed, hybrid):
    code, _, entry, lines = probed(model=hybrid[1])
    assert (code, len(lines)) == (0, 1)
    assert entry["moved"] == 0.0 < entry["leaking"]


def test_states_that_refuse_packed_rows_end_the_run(probed, hybrid, monkeypatch):
    monkeypatch.setattr("tunebook.train.build.isolate_documents", lambda model, **_: None)
    code, reason, entry, lines = probed(model=hybrid[1])
    assert (code, entry, lines) == (7, None, [])
    assert "can't keep packed sequences apart" in reason
    assert "packing=padded" in reason


def test_states_that_pytorch_carries_into_the_next_document_are_caught(probed, hybrid, monkeypatch):
    file, name = _STATES[hybrid[0]]
    reference = getattr(file, name).__wrapped__

    def along_the_row(*args, seq_idx=None, cu_seqlens=None, **kwargs):
        return reference(*args, **kwargs)

    monkeypatch.setattr(file, name, along_the_row)
    entry = refused(*probed(model=hybrid[1]))
    assert entry["moved"] > 10 * entry["tolerance"]["moved"]


def test_a_probe_that_could_not_see_a_leak_ends_the_run(probed, monkeypatch):
    measure = leak_probe.measure_isolation
    monkeypatch.setattr(
        leak_probe, "measure_isolation", lambda *arguments: replace(measure(*arguments), leaking=2.0**-20)
    )
    code, reason, entry, lines = probed()
    assert (code, lines, entry["sees_leaks"]) == (7, [], False)
    assert "cannot be verified" in reason
    assert "packing=padded, which needs no verification" in reason


def test_padded_rows_need_no_proof(probed):
    code, _, entry, _ = probed(packing={"mode": PackingMode.padded})
    assert code == 0
    assert entry == {"checked": False, "why": "padded rows hold one document each"}


def test_the_run_is_the_same_with_the_probe_and_without(config, run, changed, monkeypatch, same_bits):
    asked = changed(config, training={"max_steps": 3})
    with_probe = run(asked, "with")[2]
    monkeypatch.setattr(LeakProbe, "on_train_begin", lambda *arguments, **words: None)
    without = run(asked, "without")[2]
    assert [line["loss"] for line in with_probe] == [line["loss"] for line in without]
    assert [line["grad_norm"] for line in with_probe] == [line["grad_norm"] for line in without]


def test_probe_restores_generators_and_modes():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5))
    model[1].eval()
    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    with leak_probe._generators_kept(), leak_probe._in_evaluation_mode(model):
        assert not any(module.training for module in model.modules())
        random.random()
        np.random.rand()
        torch.rand(1)
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
    assert [module.training for module in model.modules()] == [True, True, False]


def test_ranks_that_leak_are_worse_than_those_that_do_not(config):
    allowed = leak_probe.tolerance(config.precision.compute, uses_tf32=False)
    fine = leak_probe.Isolation(
        moved=0.0,
        alone=1e-7,
        alone_median=1e-8,
        rounding=1e-7,
        rounding_median=1e-8,
        leaking=1.0,
        loss_together=2.0,
        loss_apart=2.0,
        tokens_together=9,
        tokens_apart=9,
    )
    worse, broken = (
        leak_probe.Isolation(**{**vars(fine), name: value}) for name, value in (("moved", 0.3), ("alone", float("nan")))
    )
    ranks = [fine, broken, worse]
    assert max(ranks, key=lambda one: leak_probe._severity(one, allowed)) in (broken, worse)
    assert leak_probe._severity(broken, allowed)[1] == float("inf")
