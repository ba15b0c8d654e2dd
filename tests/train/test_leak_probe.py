"""The leak probe with the trainer of a tiny model: isolated rows pass, and every known leak is refused."""

from __future__ import annotations

import inspect
import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, Qwen2Model
from transformers.models.lfm2 import modeling_lfm2
from transformers.models.qwen3_5 import modeling_qwen3_5

from tunebook.config.choices import Attention, Compute, PackingMode
from tunebook.errors import InvalidTrainingError
from tunebook.record.manifest import read_manifest, start_manifest
from tunebook.train import leak_probe
from tunebook.train.leak_probe import LeakProbe, TrainingForward
from tunebook.train.methods.sft import RecipeTrainer

from .conftest import losses, outcome

NIGHTLY = pytest.mark.nightly


@pytest.fixture
def probed(config, changed, run, tmp_path, monkeypatch):
    """Make one trainer, and a function that probes it: the manifest's entry, and the id of the refusal."""

    def build(**groups):
        held = {}

        def remember(probe, args, state, control, **kwargs):
            held.update(probe=probe, call=(args, state, control))
            raise InvalidTrainingError("the trainer is complete")

        probe_once = LeakProbe.on_train_begin
        probed_config = changed(config, **groups)
        with monkeypatch.context() as patch:
            patch.setattr(LeakProbe, "on_train_begin", remember)
            folder, _, _ = run(probed_config)
        start_manifest(folder, probed_config, world_size=1, command=["tunebook"])

        def call():
            refused = None
            try:
                probe_once(held["probe"], *held["call"])
            except InvalidTrainingError as error:
                refused = error.problem_id
            return read_manifest(folder).get("leak_probe"), refused

        return call

    return build


def test_isolated_rows_pass_and_what_was_measured_is_recorded(whole):
    entry = read_manifest(whole[0])["leak_probe"]
    assert entry["checked"] is entry["sees_leaks"] is True
    assert (entry["ranks"], entry["worst_rank"]) == (1, 0)
    assert entry["moved"] <= entry["alone"] <= entry["tolerance"]["logits"] == 32 * 128 * 2.0**-24
    assert entry["moved"] <= entry["tolerance"]["moved"] == 2.0**-20
    assert entry["leaking"] > 1000 * entry["tolerance"]["logits"]
    assert entry["loss_difference"] <= entry["tolerance"]["loss"]
    assert entry["tokens_together"] == entry["tokens_apart"] == 78


def with_a_mask(monkeypatch):
    """A mask of ones, with which transformers does not look for documents."""
    inputs_of = TrainingForward._inputs

    def masked(self, documents):
        inputs = inputs_of(self, documents)
        return inputs | {"attention_mask": torch.ones_like(inputs["input_ids"])}

    monkeypatch.setattr(TrainingForward, "_inputs", masked)


def with_a_cache(monkeypatch):
    forward = Qwen2Model.forward
    monkeypatch.setattr(Qwen2Model, "forward", lambda self, **inputs: forward(self, **inputs | {"use_cache": True}))


def with_positions_of_the_row(monkeypatch):
    prepare = RecipeTrainer._prepare_inputs

    def counted_through(self, inputs):
        inputs = prepare(self, inputs)
        return inputs | {"position_ids": torch.arange(inputs["input_ids"].shape[1])[None]}

    monkeypatch.setattr(RecipeTrainer, "_prepare_inputs", counted_through)


def with_positions_reset_one_token_late(monkeypatch):
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


def test_every_known_leak_is_refused(probed, monkeypatch):
    probe = probed(attention={"implementation": Attention.eager})
    entry, refused = probe()
    assert refused is None and entry["moved"] <= entry["tolerance"]["moved"]
    for leak in (with_a_mask, with_a_cache, with_positions_of_the_row, with_positions_reset_one_token_late):
        with monkeypatch.context() as patch:
            leak(patch)
            entry, refused = probe()
        assert (refused, entry["moved"] > 0.01) == ("leak", True), leak.__name__
    measure = leak_probe.measure_isolation
    monkeypatch.setattr(
        leak_probe, "measure_isolation", lambda *arguments: replace(measure(*arguments), leaking=2.0**-20)
    )
    entry, refused = probe()
    assert (refused, entry["sees_leaks"]) == ("leak-not-seen", False)


def test_a_leak_ends_the_run_with_7_before_its_first_step(config, run, monkeypatch):
    with_a_mask(monkeypatch)
    folder, code, lines = run(config)
    assert (code, lines) == (7, [])
    assert "documents that share a packed row affect each other" in outcome(folder)["reason"]
    assert "packing=padded" in outcome(folder)["reason"]
    assert not (folder / "model").exists()


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


def test_a_leak_that_rounding_in_16_bits_could_hide_is_refused(probed, small_model):
    """Bloom's attention uses no positions, so it treats packed documents as one."""
    bloom = small_model("bloom", hidden_size=64, n_head=4, n_layer=4)
    eager = {"implementation": Attention.eager}
    entry, refused = probed(model=bloom, precision={"compute": Compute.bf16}, attention=eager)()
    assert refused == "leak"
    assert entry["tolerance"]["moved"] < entry["moved"] < entry["tolerance"]["logits"]


SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
HYBRIDS = {
    "lfm2": {"layer_types": ["conv", "full_attention"], "num_key_value_heads": 4},
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention"], "num_key_value_heads": 4, "head_dim": 16,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    },
}  # fmt: skip
STATES = {
    "lfm2": (modeling_lfm2, "causal_conv1d_fn"),
    "qwen3_5_text": (modeling_qwen3_5, "torch_chunk_gated_delta_rule"),
}


@pytest.fixture(params=[pytest.param("lfm2", marks=NIGHTLY), "qwen3_5_text"])
def hybrid(request, small_model, monkeypatch):
    """A small model whose layers carry a state along the row; afterwards its functions are transformers' own again."""
    for file, _ in STATES.values():
        for name, value in list(vars(file).items()):
            if inspect.isfunction(value):
                monkeypatch.setattr(file, name, value)
    return request.param, small_model(request.param, **SIZES, **HYBRIDS[request.param])


def test_states_are_kept_apart_on_a_cpu(probed, hybrid):
    entry, refused = probed(model=hybrid[1])()
    assert refused is None and entry["moved"] == 0.0 < entry["leaking"]


def test_states_that_go_on_into_the_next_document_are_refused(probed, hybrid, monkeypatch):
    file, name = STATES[hybrid[0]]
    reference = getattr(file, name).__wrapped__

    def along_the_row(*args, seq_idx=None, cu_seqlens=None, **kwargs):
        return reference(*args, **kwargs)

    monkeypatch.setattr(file, name, along_the_row)
    entry, refused = probed(model=hybrid[1])()
    assert refused == "leak" and entry["moved"] > 10 * entry["tolerance"]["moved"]


def test_states_that_refuse_packed_rows_end_the_run(probed, hybrid, monkeypatch):
    monkeypatch.setattr("tunebook.train.build.isolate_documents", lambda model, **_: None)
    assert probed(model=hybrid[1])() == (None, "leak")


def test_padded_rows_need_no_proof(config, changed, tmp_path):
    start_manifest(tmp_path, config, world_size=1, command=["tunebook"])
    probe = LeakProbe(changed(config, packing={"mode": PackingMode.padded}), None, tmp_path)
    probe.on_train_begin(SimpleNamespace(), SimpleNamespace(is_world_process_zero=True), SimpleNamespace())
    assert read_manifest(tmp_path)["leak_probe"] == {"checked": False, "why": "padded rows hold one document each"}


def test_the_run_is_the_same_with_the_probe_and_without(whole, config, run, monkeypatch):
    monkeypatch.setattr(LeakProbe, "on_train_begin", lambda *args, **kwargs: None)
    _, code, without = run(config)
    assert code == 0
    assert losses(without) == losses(whole[1])
    assert [line["grad_norm"] for line in without] == [line["grad_norm"] for line in whole[1]]
