"""One export: every form gives the same folder, dtypes, what it records, and what is refused with nothing left."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tunebook.checkpoint.export import run as exporting
from tunebook.checkpoint.export.write import compare, logits_of
from tunebook.config.frozen import load_config
from tunebook.config.schema import ModelConfig
from tunebook.errors import DataError, DifferenceError, RequestError
from tunebook.evaluate.target import find_target
from tunebook.files import sha256_file
from tunebook.model.weight_files import weights_fingerprint
from tunebook.record.model_origin import ORIGIN_FILE, check_bound

# peft asks transformers by a name that has a newer one
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")


def edit(checkpoint: Path, layouts: Any, change: Any, name: str = "model.safetensors") -> None:
    weights = load_file(checkpoint / name)
    change(weights)
    save_file(weights, checkpoint / name, metadata={"format": "pt"})
    layouts.write_record(checkpoint)


def left_in(run: Path) -> list[Path]:
    return list(run.glob("exports/*"))


def test_weights_in_16_bits_are_exported_in_32(layouts: Any, run: Path, export: Any) -> None:
    """As the gathered ones of mixed_precision=cast, whose base model was published in fp32."""
    layouts.write_checkpoint(run, "whole", "bfloat16")
    exported = export(run, dtype="fp32")
    assert (exported.origin.dtype, exported.origin.is_exact) == ("fp32", True)


@pytest.mark.parametrize("form", ["whole", "zero2", "zero3", "fsdp"])
def test_every_form_is_exported_as_the_same_weights(layouts: Any, run: Path, export: Any, form: str) -> None:
    layouts.write_checkpoint(run, form)
    folder = export(run).folder
    assert folder == run / "exports" / "checkpoint-3"
    found = load_file(folder / "model.safetensors")
    expected = layouts.trained(run, form)
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], expected[name].to(torch.bfloat16)) for name in expected)  # as the base
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert (model.config.eos_token_id, model.generation_config.eos_token_id) in ((2, 2), (2, [2]))
    assert AutoTokenizer.from_pretrained(folder).chat_template
    assert {path.name for path in folder.iterdir()} == {
        "README.md", "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors",
        "tokenizer.json", "tokenizer_config.json", ORIGIN_FILE,
    }  # fmt: skip


@pytest.mark.parametrize("form", ["adapter", "zero3_adapter", "fsdp_adapter"])
def test_an_adapter_stays_one_in_its_own_format(layouts: Any, lora_run: Path, export: Any, form: str) -> None:
    layouts.write_checkpoint(lora_run, form)
    exported = export(lora_run)
    found = load_file(exported.folder / "adapter_model.safetensors")
    expected = layouts.trained(lora_run, form)
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    settings = json.loads((exported.folder / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"]) == (4, 8)
    assert sorted(settings["target_modules"]) == ["down_proj", "q_proj"]
    assert (exported.origin.is_adapter, exported.origin.is_merged, exported.origin.is_exact) == (
        True, False, True,
    )  # fmt: skip


def test_a_merged_adapter_is_added_to_its_base(layouts: Any, lora_run: Path, base: Path, export: Any) -> None:
    layouts.write_checkpoint(lora_run, "adapter")
    exported = export(lora_run, merge=True, dtype="fp32")
    assert exported.folder.name == "checkpoint-3-merged-fp32"
    found = load_file(exported.folder / "model.safetensors")
    weights, adapter = load_file(base / "model.safetensors"), layouts.trained(lora_run, "adapter")
    name = "model.layers.1.self_attn.q_proj"
    first, second = (adapter[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
    torch.testing.assert_close(found[f"{name}.weight"], weights[f"{name}.weight"].float() + second @ first * (8 / 4))
    untouched = "model.layers.1.self_attn.k_proj.weight"
    assert torch.equal(found[untouched], weights[untouched].float())
    assert not (exported.folder / "adapter_config.json").exists()


def test_a_merged_model_stops_where_its_base_does(layouts: Any, tmp_path: Path, export: Any) -> None:
    base = layouts.write_base(tmp_path / "base", layouts.TINY, "bfloat16")
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 7], "temperature": 0.6}))
    run = layouts.write_run(tmp_path / "outputs" / "tiny" / "lora", base, peft="lora")
    layouts.write_checkpoint(run, "adapter")
    settings = json.loads((export(run, merge=True).folder / "generation_config.json").read_text())
    assert (settings["eos_token_id"], settings["do_sample"]) == ([0, 2, 7], True)


def test_tied_embeddings_that_were_trained_apart_are_written_separately(
    layouts: Any, base: Path, tmp_path: Path, export: Any
) -> None:
    assert json.loads((base / "config.json").read_text())["tie_word_embeddings"]
    run = layouts.write_run(
        tmp_path / "outputs" / "tiny" / "saved", base, peft="lora", modules_to_save=["embed_tokens"]
    )
    layouts.write_checkpoint(run, "adapter")
    exported = export(run, merge=True, dtype="fp32")
    found, adapter = load_file(exported.folder / "model.safetensors"), layouts.trained(run, "adapter")
    embeddings = load_file(base / "model.safetensors")["model.embed_tokens.weight"].float()
    assert torch.equal(found["model.embed_tokens.weight"], adapter["base_model.model.model.embed_tokens.weight"])
    assert torch.equal(found["lm_head.weight"], embeddings)
    assert json.loads((exported.folder / "config.json").read_text())["tie_word_embeddings"] is False


def test_an_adapter_whose_base_has_changed_is_exported_alone_and_not_merged(
    layouts: Any, tmp_path: Path, export: Any
) -> None:
    base = layouts.write_base(tmp_path / "base", layouts.TINY, "bfloat16")
    run = layouts.write_run(tmp_path / "outputs" / "tiny" / "lora", base, peft="lora")
    layouts.write_checkpoint(run, "adapter")
    fingerprint = weights_fingerprint(ModelConfig(path=str(base)))
    layouts.change_manifest(run, model={"weights_fingerprint": fingerprint})
    trained = layouts.trained(run, "adapter")
    weights = {name: value + 1 for name, value in load_file(base / "model.safetensors").items()}
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DataError) as raised:
        export(run, merge=True)
    assert raised.value.problem_id == "base-changed"
    assert left_in(run) == []
    shutil.rmtree(base)
    exported = export(run, dtype="bf16")
    found = load_file(exported.folder / "adapter_model.safetensors")
    assert found.keys() == trained.keys()
    assert all(torch.equal(found[name], trained[name].to(torch.bfloat16)) for name in trained)
    assert exported.origin.is_exact is False
    assert exported.origin.weights_fingerprint == fingerprint


@pytest.mark.parametrize("settings", [{"use_dora": True}, {"modules_to_save": ["k_proj", "lm_head"]}], ids=str)
def test_merged_weights_are_what_peft_makes_of_them_bit_for_bit(
    layouts: Any, tmp_path: Path, export: Any, same_bits: None, settings: dict[str, Any]
) -> None:
    base = layouts.write_base(tmp_path / "base", layouts.TINY | {"tie_word_embeddings": False}, "bfloat16")
    run = layouts.write_run(tmp_path / "outputs" / "tiny" / "lora", base, peft="lora", **settings)
    checkpoint = layouts.write_checkpoint(run, "adapter")
    found = load_file(export(run, merge=True).folder / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    expected = PeftModel.from_pretrained(model, str(checkpoint)).merge_and_unload().state_dict()
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    stored = load_file(base / "model.safetensors")
    changed = {name.split(".")[-2] for name in found if not torch.equal(found[name], stored[name])}
    assert changed == {"q_proj", "down_proj"} | set(settings.get("modules_to_save", []))


def test_a_requested_format_and_what_is_recorded(layouts: Any, run: Path, export: Any) -> None:
    layouts.write_checkpoint(run, "zero2")
    folder = export(run, dtype="fp32", to=run.parent / "elsewhere" / "deep").folder
    found, expected = load_file(folder / "model.safetensors"), layouts.trained(run, "zero2")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"
    origin = json.loads((folder / ORIGIN_FILE).read_text())
    recorded = {
        "format": 1, "recipe": "tiny", "run": "tiny/run", "source": "checkpoints/checkpoint-3", "step": 3,
        "dtype": "fp32", "is_exact": True, "num_parameters": sum(weight.numel() for weight in expected.values()),
        "files_sha256": {"model.safetensors": sha256_file(folder / "model.safetensors")},
    }  # fmt: skip
    assert {key: origin[key] for key in recorded} == recorded


def test_an_exported_folder_is_bound_to_what_its_run_was_trained_with(layouts: Any, run: Path, export: Any) -> None:
    """Wherever it is moved to, an evaluation compares it with the run's tokenizer and template."""
    layouts.write_checkpoint(run, "zero2")
    folder = export(run).folder.rename(run.parents[2] / "given away")
    shutil.rmtree(run)
    target = find_target(str(folder), run.parents[1])
    assert (target.run, target.folder) == (None, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert check_bound(target.origin, tokenizer, None) == {"to": "tiny/run", **layouts.trained_with()}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda weights: weights.pop("model.norm.weight"), "weights-incomplete"),
        (lambda weights: weights.update({"model.norm.weight": torch.zeros(31)}), "weights-incomplete"),
        (lambda weights: weights["model.norm.weight"].fill_(float("nan")), "export-differs"),
    ],
    ids=["missing", "misshapen", "nan"],
)
def test_wrong_tensors_are_refused_and_nothing_is_left(
    layouts: Any, run: Path, export: Any, change: Any, problem: str
) -> None:
    edit(layouts.write_checkpoint(run, "whole"), layouts, change)
    with pytest.raises((DifferenceError, RequestError)) as raised:
        export(run)
    assert raised.value.problem_id == problem
    assert left_in(run) == []


def test_what_was_written_wrong_is_found_and_removed(
    layouts: Any, run: Path, export: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of 26 tensors is changed before the written file is loaded again."""
    compare = exporting.compare

    def damaged(folder: Path, *others: Any) -> Any:
        weights = load_file(folder / "model.safetensors")
        weights["model.layers.0.mlp.up_proj.weight"] *= -1
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return compare(folder, *others)

    monkeypatch.setattr(exporting, "compare", damaged)
    layouts.write_checkpoint(run, "zero1")
    with pytest.raises(DifferenceError) as raised:
        export(run)
    assert raised.value.problem_id == "export-differs"
    assert left_in(run) == []


def test_sums_in_another_order_may_move_the_logits_by_one_rounding(layouts: Any, run: Path, export: Any) -> None:
    """One rounding of bf16 is 2**-7."""
    layouts.write_checkpoint(run, "whole")
    folder, config = export(run).folder, load_config(run / "run.yaml")
    own = logits_of(AutoModelForCausalLM.from_pretrained(folder, dtype="auto"))
    assert compare(folder, own, own * (1 + 2**-9), config).is_exact
    with pytest.raises(DifferenceError):
        compare(folder, own, own * (1 + 2**-5), config)


def test_an_adapter_of_random_weights_is_exported_merged_only(layouts: Any, lora_run: Path, export: Any) -> None:
    """Its base is in no folder and on no hub."""
    layouts.write_checkpoint(lora_run, "adapter")
    settings = lora_run / "run.yaml"
    settings.write_text(settings.read_text().replace("weights: pretrained", "weights: random"))
    with pytest.raises(RequestError) as refused:
        export(lora_run)
    assert refused.value.problem_id == "export-merge"
    assert export(lora_run, merge=True).origin.is_merged


def test_merge_of_a_whole_model_and_another_template_than_in_training_are_refused(
    layouts: Any, run: Path, export: Any
) -> None:
    layouts.write_checkpoint(run, "whole")
    with pytest.raises(RequestError) as refused:
        export(run, merge=True)
    assert refused.value.problem_id == "export-merge"
    layouts.change_manifest(run, chat_template_sha256="0" * 64)
    with pytest.raises(DataError) as changed:
        export(run)
    assert changed.value.problem_id == "template-changed"


def test_qlora_is_merged_only_with_bitsandbytes(layouts: Any, base: Path, tmp_path: Path, export: Any) -> None:
    run = layouts.write_run(tmp_path / "outputs" / "tiny" / "qlora", base, peft="qlora")
    layouts.write_checkpoint(run, "adapter")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, "bitsandbytes", None)
        with pytest.raises(RequestError) as raised:
            export(run, merge=True)
        assert raised.value.problem_id == "export-package"
    assert "4 bits" in (export(run).folder / "README.md").read_text()
