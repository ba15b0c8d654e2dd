"""Shards within the limit, with the names of published files; what is wrong with tensors is named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from tunebook.checkpoint.export.stored_weights import file_weights, held_weights
from tunebook.checkpoint.export.write import as_stored, layer_of, write_weights
from tunebook.errors import RequestError
from tunebook.files import sha256_file

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
WEIGHTS = {"a": torch.arange(6.0), "b": torch.full((4,), 2.5), "c": torch.tensor([1, 2]), "d": torch.ones(2, 3)}


def test_shards_are_cut_at_the_limit_of_what_is_written(tmp_path: Path) -> None:
    """In bf16 a takes 12 bytes, b 8 and d 12; c, whole numbers, is not cast and takes 16."""
    hashes = write_weights(held_weights(WEIGHTS), tmp_path, dtype=torch.bfloat16, place="x", shard_bytes=20)
    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert [sorted(load_file(tmp_path / name)) for name in names] == [["a", "b"], ["c"], ["d"]]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index == {
        "metadata": {"total_size": 48},
        "weight_map": {"a": names[0], "b": names[0], "c": names[1], "d": names[2]},
    }
    assert hashes == {name: sha256_file(tmp_path / name) for name in names}
    found = file_weights([tmp_path / name for name in names])
    read = {name: found[name].load() for name in "dacb"}
    assert {name: tensor.dtype for name, tensor in read.items()} == dict.fromkeys("abd", torch.bfloat16) | {
        "c": torch.int64
    }
    assert all(torch.equal(read[name].double(), WEIGHTS[name].double()) for name in WEIGHTS)


@pytest.mark.parametrize("is_in_memory", [True, False])
def test_only_weights_that_do_not_stay_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_in_memory: bool
) -> None:
    """A second copy of a merged model's weights would be as large as the model, or a shard of it."""
    written: dict[str, int] = {}
    save = safetensors.torch.save_file

    def note(tensors: dict[str, torch.Tensor], *words: Any, **settings: Any) -> None:
        written.update({name: tensor.data_ptr() for name, tensor in tensors.items()})
        save(tensors, *words, **settings)

    monkeypatch.setattr("tunebook.checkpoint.export.write.save_file", note)
    weights = {name: replace(one, is_in_memory=is_in_memory) for name, one in held_weights(WEIGHTS).items()}
    write_weights(weights, tmp_path, dtype=None, place="x")
    same = [name for name, tensor in WEIGHTS.items() if written[name] == tensor.data_ptr()]
    assert same == (list(WEIGHTS) if is_in_memory else [])
    found = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(found[name], WEIGHTS[name]) for name in WEIGHTS)


def test_one_shard_has_no_index_and_others_may_read_it(tmp_path: Path) -> None:
    write_weights(held_weights({"a": WEIGHTS["a"]}), tmp_path, stem="adapter_model", dtype=None, place="x")
    (file,) = tmp_path.iterdir()
    assert file.name == "adapter_model.safetensors"
    (tmp_path / "plain").touch()
    assert file.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_every_tensor_that_is_not_finite_is_named_wherever_it_is(tmp_path: Path) -> None:
    broken = {f"n{number}": torch.tensor([1.0, float("nan") if number % 2 else 1.0]) for number in range(14)}
    with pytest.raises(RequestError, match=r"7 not finite: n1, n3, n5, n7, n9 and 2 more;"):
        write_weights(held_weights(broken), tmp_path, dtype=None, place="x", shard_bytes=8)


EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "head_dim": 16,
}  # fmt: skip


@pytest.fixture
def base(layouts: Any, tmp_path: Path) -> Path:
    """Two layers of four experts, each with three matrices of its own in the file, and with two for all in memory."""
    folder: Path = layouts.write_base(tmp_path / "base", layouts.TINY | EXPERTS, "float32")
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    assert len([name for name in load_file(folder / "model.safetensors") if ".experts." in name]) == 2 * 4 * 3
    return folder


@pytest.mark.parametrize("form", ["zero2", "zero3", "fsdp"])
def test_shards_of_experts_are_exported_as_published(
    layouts: Any, base: Path, tmp_path: Path, export: Any, form: str
) -> None:
    run = layouts.write_run(tmp_path / "outputs" / "tiny" / "run", base)
    layouts.write_checkpoint(run, form)
    folder = export(run).folder
    published, found = (load_file(place / "model.safetensors") for place in (base, folder))
    assert {name: value.shape for name, value in found.items()} == {
        name: value.shape for name, value in published.items()
    }
    loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    expected = layouts.trained(run, form)
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


@pytest.mark.parametrize("form", ["adapter", "zero3_adapter"])
def test_adapters_on_both_parameters_of_experts_are_exported_and_merged(
    layouts: Any, base: Path, tmp_path: Path, export: Any, form: str
) -> None:
    run = layouts.write_run(tmp_path / "outputs" / "tiny" / "lora", base, peft="lora", target_modules=[], dropout=0.0)
    layouts.write_checkpoint(run, form)
    expected = layouts.trained(run, form)
    assert any(".experts.base_layer.lora_A." in name for name in expected)  # the adapter that another one is put on
    adapter = load_file(export(run).folder / "adapter_model.safetensors")
    assert set(adapter) == set(expected) and all(torch.equal(adapter[name], expected[name]) for name in expected)
    merged = load_file(export(run, merge=True, dtype="fp32").folder / "model.safetensors")
    published = load_file(base / "model.safetensors")
    assert set(merged) == set(published)
    changed = {name for name in merged if not torch.equal(merged[name], published[name])}
    assert changed == {name for name in published if ".experts." in name or "_proj" in name or ".gate." in name}


def test_what_is_named_as_in_a_file_stays_so(base: Path) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base))
    assert as_stored(model, list(load_file(base / "model.safetensors"))) is None
    assert as_stored(model, list(model.state_dict())) is not None


def test_no_layer_is_cut_where_tensors_are_put_together(base: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base)
    weights = held_weights(dict(model.state_dict()))
    convert = as_stored(model, weights)
    del weights["lm_head.weight"]  # which is tied
    (tmp_path / "out").mkdir()
    hashes = write_weights(weights, tmp_path / "out", dtype=None, place="here", shard_bytes=1000, convert=convert)
    assert len(hashes) > 2
    by_file = [set(load_file(tmp_path / "out" / file)) for file in hashes]
    for number in range(2):
        assert sum(any(layer_of(name) == f"model.layers.{number}" for name in names) for names in by_file) == 1
    assert set().union(*by_file) == set(load_file(base / "model.safetensors"))
    reloaded = {name: value for file in hashes for name, value in load_file(tmp_path / "out" / file).items()}
    published = load_file(base / "model.safetensors")
    assert all(torch.equal(reloaded[name], published[name]) for name in published)


def test_a_layers_tensors_have_its_name_in_common() -> None:
    assert layer_of("model.layers.3.mlp.experts.7.up_proj.weight") == "model.layers.3"
    assert layer_of("lm_head.weight") == "lm_head.weight"
