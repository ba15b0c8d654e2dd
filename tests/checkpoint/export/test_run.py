"""One export: every form gives the same folder, dtypes, what it records, and what is refused with nothing left."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tunebook.checkpoint.export import run as exporting
from tunebook.checkpoint.export import write
from tunebook.config.frozen import config_to_yaml, load_config
from tunebook.config.schema import ModelConfig
from tunebook.errors import DataError, DifferenceError, DoesNotFitError, RequestError
from tunebook.evaluate.target import find_target
from tunebook.files import sha256_file
from tunebook.model.weight_files import weights_fingerprint
from tunebook.plan.architecture.base_model import read_facts
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


@pytest.mark.parametrize("form", ["adapter", "zero2_adapter", "zero3_adapter", "fsdp_adapter"])
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
    assert 0 < exported.origin.difference < exported.origin.allowed == 1e-4


def test_a_merged_model_and_an_adapter_stop_where_their_base_does(layouts: Any, tmp_path: Path, export: Any) -> None:
    base = layouts.write_base(tmp_path / "base", layouts.TINY, "bfloat16")
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 7], "temperature": 0.6}))
    run = layouts.write_run(tmp_path / "outputs" / "tiny" / "lora", base, peft="lora")
    layouts.write_checkpoint(run, "adapter")
    for options in ({"merge": True}, {}):
        folder = export(run, **options).folder
        settings = json.loads((folder / "generation_config.json").read_text())
        assert (settings["eos_token_id"], settings["do_sample"]) == ([0, 2, 7], True)


@pytest.mark.parametrize("saved", [["embed_tokens"], ["embed_tokens", "lm_head"]])
def test_a_tied_matrix_that_was_trained_apart_is_written_beside_the_other(
    layouts: Any, base: Path, tmp_path: Path, export: Any, saved: list[str]
) -> None:
    assert json.loads((base / "config.json").read_text())["tie_word_embeddings"]
    run = layouts.write_run(tmp_path / "outputs" / "tiny" / "saved", base, peft="lora", modules_to_save=saved)
    layouts.write_checkpoint(run, "adapter")
    exported = export(run, merge=True, dtype="fp32")
    found, adapter = load_file(exported.folder / "model.safetensors"), layouts.trained(run, "adapter")
    embeddings = load_file(base / "model.safetensors")["model.embed_tokens.weight"].float()
    assert torch.equal(found["model.embed_tokens.weight"], adapter["base_model.model.model.embed_tokens.weight"])
    head = adapter["base_model.model.lm_head.weight"] if "lm_head" in saved else embeddings
    assert torch.equal(found["lm_head.weight"], head)
    assert json.loads((exported.folder / "config.json").read_text())["tie_word_embeddings"] is False
    assert exported.origin.difference < exported.origin.allowed == 1e-4


@pytest.fixture
def lora_over(layouts: Any, tmp_path: Path) -> tuple[Path, Path]:
    """A run with an adapter whose manifest says which weights it was trained on, and the folder of those."""
    base = layouts.write_base(tmp_path / "base", layouts.TINY, "bfloat16")
    run = layouts.write_run(tmp_path / "outputs" / "tiny" / "lora", base, peft="lora")
    layouts.write_checkpoint(run, "adapter")
    layouts.change_manifest(run, model={"weights_fingerprint": weights_fingerprint(ModelConfig(path=str(base)))})
    return run, base


def lose_base(base: Path, how: str) -> None:
    if how == "changed":
        weights = {name: value + 1 for name, value in load_file(base / "model.safetensors").items()}
        save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    elif how == "weights removed":
        (base / "model.safetensors").unlink()
    else:
        shutil.rmtree(base)


LOST = ["changed", "weights removed", "removed"]


@pytest.mark.parametrize("how", LOST)
def test_an_adapter_is_not_merged_into_another_base(
    lora_over: tuple[Path, Path], tmp_path: Path, export: Any, how: str
) -> None:
    run, base = lora_over
    exported = export(run, merge=True, to=tmp_path / "first")
    assert exported.origin.weights_fingerprint == weights_fingerprint(ModelConfig(path=str(base)))
    lose_base(base, how)
    with pytest.raises(DataError) as raised:
        export(run, merge=True, to=tmp_path / "second")
    assert raised.value.problem_id == "base-changed"
    assert not (tmp_path / "second").exists()


@pytest.mark.parametrize("how", LOST)
@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_an_adapter_that_stays_one_needs_no_base(
    layouts: Any, lora_over: tuple[Path, Path], export: Any, how: str, dtype: str | None
) -> None:
    run, base = lora_over
    config = load_config(run / "run.yaml")
    config.model.facts = read_facts(config.model)
    (run / "run.yaml").write_text(config_to_yaml(config))
    trained = layouts.trained(run, "adapter")
    lose_base(base, how)
    exported = export(run, dtype=dtype)
    found = load_file(exported.folder / "adapter_model.safetensors")
    expected = {name: tensor.to(torch.bfloat16) if dtype else tensor for name, tensor in trained.items()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert (exported.origin.is_exact, exported.origin.logits) == (dtype is None, None)


SAVED_WHOLE = {"modules_to_save": ["k_proj", "lm_head"]}


@pytest.mark.parametrize(
    ("settings", "base_dtype", "dtype"),
    [
        ({}, "bfloat16", None),
        ({}, "bfloat16", "fp32"),
        ({}, "float32", None),
        ({"use_rslora": True}, "bfloat16", None),
        ({"use_dora": True}, "bfloat16", None),
        ({"rank_pattern": {"q_proj": 3}, "alpha_pattern": {"down_proj": 2.0}}, "bfloat16", None),
        ({"target_modules": []}, "bfloat16", None),
        (SAVED_WHOLE, "bfloat16", None),
    ],
    ids=["plain", "plain-to-fp32", "plain-of-fp32", "rslora", "dora", "patterns", "all-linear", "saved-whole"],
)
def test_merged_weights_are_what_peft_makes_of_them_bit_for_bit(
    layouts: Any, tmp_path: Path, export: Any, same_bits: None, settings: Any, base_dtype: str, dtype: str | None
) -> None:
    base = layouts.write_base(tmp_path / "base", layouts.TINY | {"tie_word_embeddings": False}, base_dtype)
    run = layouts.write_run(tmp_path / "outputs" / "tiny" / "lora", base, peft="lora", **settings)
    checkpoint = layouts.write_checkpoint(run, "adapter")
    found = load_file(export(run, merge=True, dtype=dtype).folder / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32 if dtype else getattr(torch, base_dtype))
    expected = PeftModel.from_pretrained(model, str(checkpoint)).merge_and_unload().state_dict()
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    stored = load_file(base / "model.safetensors")
    changed = {name.split(".")[-2] for name in found if not torch.equal(found[name].float(), stored[name].float())}
    everywhere = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    targets = set(settings.get("target_modules", ["q_proj", "down_proj"])) or everywhere
    assert changed == targets | set(settings.get("modules_to_save", []))


def test_the_format_asked_for_wins_and_the_folder_says_so(layouts: Any, run: Path, export: Any) -> None:
    layouts.write_checkpoint(run, "zero2")
    exported = export(run, dtype="fp32", to=run.parent / "elsewhere" / "deep")
    found = load_file(run.parent / "elsewhere" / "deep" / "model.safetensors")
    expected = layouts.trained(run, "zero2")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert json.loads((exported.folder / "config.json").read_text())["dtype"] == "float32"
    assert exported.origin.is_exact is True


def test_what_is_recorded(layouts: Any, run: Path, export: Any) -> None:
    layouts.write_checkpoint(run, "zero3")
    folder = export(run).folder
    origin = json.loads((folder / ORIGIN_FILE).read_text())
    assert {key: origin[key] for key in ("format", "recipe", "run", "source", "step", "dtype")} == {
        "format": 1, "recipe": "tiny", "run": "tiny/run", "source": "checkpoints/checkpoint-3", "step": 3,
        "dtype": "bf16",
    }  # fmt: skip
    assert origin["config_sha256"] == layouts.CONFIG_SHA256  # the checkpoint's own
    assert origin["files_sha256"] == {"model.safetensors": sha256_file(folder / "model.safetensors")}
    assert len(origin["tokenizer_sha256"]) == len(origin["chat_template_sha256"]) == 64
    assert origin["num_parameters"] == sum(weight.numel() for weight in layouts.trained(run, "zero3").values())
    assert not origin["is_exact"]
    assert 0 < origin["difference"] < origin["allowed"] == 16 * torch.finfo(torch.bfloat16).eps


def test_an_exported_folder_is_bound_to_what_its_run_was_trained_with(layouts: Any, run: Path, export: Any) -> None:
    """Wherever it is moved to, an evaluation compares it with the run's tokenizer and template."""
    layouts.write_checkpoint(run, "zero2")
    folder = export(run).folder.rename(run.parents[2] / "given away")
    shutil.rmtree(run)
    target = find_target(str(folder), run.parents[1])
    assert (target.run, target.folder) == (None, folder)
    trained = target.origin
    assert trained is not None and trained.run == "tiny/run"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert check_bound(trained, tokenizer, None) == {"to": "tiny/run", "mismatches": [], **layouts.trained_with()}
    assert check_bound(trained, tokenizer, "Be short.", ["system_prompt"])["mismatches"] == ["system_prompt"]
    tokenizer.chat_template += " "
    with pytest.raises(DataError, match="the chat template is not the one that the run tiny/run was trained with"):
        check_bound(trained, tokenizer, None)


def test_the_trained_model_comes_before_checkpoints(layouts: Any, run: Path, export: Any) -> None:
    checkpoint = layouts.write_checkpoint(run, "whole")
    shutil.copytree(checkpoint, run / "model")
    assert export(run).origin.source == "model"
    assert export(run, checkpoint="3").origin.source == "checkpoints/checkpoint-3"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda weights: weights.pop("model.norm.weight"), "weights-incomplete"),
        (lambda weights: weights.update({"model.norm.weight": torch.zeros(0)}), "weights-incomplete"),
        (lambda weights: weights.update({"extra": torch.zeros(1)}), "weights-incomplete"),
        (lambda weights: weights.update({"model.norm.weight": torch.zeros(31)}), "weights-incomplete"),
        (lambda weights: weights["model.norm.weight"].fill_(float("nan")), "export-weights"),
    ],
    ids=["missing", "empty", "unexpected", "misshapen", "nan"],
)
def test_wrong_tensors_are_refused_and_nothing_is_left(
    layouts: Any, run: Path, export: Any, change: Any, problem: str
) -> None:
    edit(layouts.write_checkpoint(run, "whole"), layouts, change)
    with pytest.raises(RequestError) as raised:
        export(run)
    assert raised.value.problem_id == problem
    assert "extra" in raised.value.message or "model.norm.weight" in raised.value.message
    assert left_in(run) == []


def test_an_adapter_with_a_wrong_tensor_is_refused(layouts: Any, lora_run: Path, export: Any) -> None:
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    checkpoint = layouts.write_checkpoint(lora_run, "adapter")
    edit(checkpoint, layouts, lambda weights: weights.pop(name), "adapter_model.safetensors")
    with pytest.raises(RequestError) as raised:
        export(lora_run)
    assert raised.value.problem_id == "weights-incomplete"
    assert left_in(lora_run) == []


def test_a_weight_too_large_for_fp16_is_named(layouts: Any, run: Path, export: Any) -> None:
    edit(layouts.write_checkpoint(run, "whole"), layouts, lambda weights: weights["model.norm.weight"].fill_(7e4))
    with pytest.raises(RequestError, match=r"not finite in fp16: model\.norm\.weight") as raised:
        export(run, dtype="fp16")
    assert raised.value.problem_id == "export-weights"
    assert left_in(run) == []


def test_tied_weights_that_differ_are_refused(layouts: Any, run: Path, export: Any) -> None:
    def add_head(weights: dict[str, torch.Tensor]) -> None:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()

    checkpoint = layouts.write_checkpoint(run, "whole")
    edit(checkpoint, layouts, add_head)
    assert "lm_head.weight" not in load_file(export(run, to=run / "same").folder / "model.safetensors")
    edit(checkpoint, layouts, lambda weights: weights["lm_head.weight"].add_(1))
    with pytest.raises(RequestError) as raised:
        export(run)
    assert raised.value.problem_id == "export-weights"


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


@pytest.mark.parametrize(("moved", "is_kept"), [(2**-9, True), (2**-5, False)])
def test_logits_that_another_order_of_sums_has_moved_are_those_of_the_same_weights(
    layouts: Any, run: Path, export: Any, monkeypatch: pytest.MonkeyPatch, moved: float, is_kept: bool
) -> None:
    """As on a machine whose kernels do not repeat themselves to the bit: less than one rounding of bf16, 2**-7."""
    logits_of = write.logits_of
    monkeypatch.setattr(exporting, "logits_of", lambda model: logits_of(model) * (1 + moved))
    layouts.write_checkpoint(run, "zero1")
    export(run)  # the checkpoint's own may differ by all of its rounding to bf16
    passes = iter(range(9))
    monkeypatch.setattr(write, "logits_of", lambda model: logits_of(model) * (1 + moved * (next(passes) == 0)))
    if is_kept:
        exported = export(run, to=run / "other")
        assert exported.origin.is_exact is False
    else:
        with pytest.raises(DifferenceError):
            export(run, to=run / "other")
        assert not (run / "other").exists()


def test_a_disk_that_fills_up_leaves_nothing(
    layouts: Any, run: Path, export: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill_up(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    layouts.write_checkpoint(run, "whole")
    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", fill_up)
    with pytest.raises(DoesNotFitError, match=r"--to") as raised:
        export(run)
    assert raised.value.problem_id == "disk-full"
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(total=2**40, free=2**10))
    with pytest.raises(DoesNotFitError, match=r"1 KiB free and the export takes about \d+\.\d+ KiB"):
        export(run)
    assert left_in(run) == []


def test_an_interrupted_export_leaves_nothing(
    layouts: Any, run: Path, export: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    layouts.write_checkpoint(run, "whole")
    monkeypatch.setattr(exporting, "card", interrupt)
    with pytest.raises(KeyboardInterrupt):
        export(run)
    assert left_in(run) == []


def test_merge_of_a_whole_model_is_refused(layouts: Any, run: Path, export: Any) -> None:
    layouts.write_checkpoint(run, "whole")
    with pytest.raises(RequestError) as raised:
        export(run, merge=True)
    assert raised.value.problem_id == "export-merge"


def test_another_template_than_in_training_is_refused(layouts: Any, run: Path, export: Any) -> None:
    layouts.write_checkpoint(run, "whole")
    layouts.change_manifest(run, chat_template_sha256="0" * 64)
    with pytest.raises(DataError) as raised:
        export(run)
    assert raised.value.problem_id == "template-changed"


def test_qlora_is_merged_only_with_bitsandbytes(layouts: Any, base: Path, tmp_path: Path, export: Any) -> None:
    run = layouts.write_run(tmp_path / "outputs" / "tiny" / "qlora", base, peft="qlora")
    layouts.write_checkpoint(run, "adapter")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, "bitsandbytes", None)
        with pytest.raises(RequestError) as raised:
            export(run, merge=True)
        assert raised.value.problem_id == "export-package"
    assert "4 bits" in (export(run).folder / "README.md").read_text()
