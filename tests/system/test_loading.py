"""Every strategy's way to its weights, on real ranks over gloo: the same weights arrive, and damaged ones never do.

The ranks run tests/bench/loading_memory.py, which measures the same at full size. FSDP goes by accelerate's own
preparation there, because its Accelerator takes FSDP for a GPU's only.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from tunebook.model.random_weights import draw_weights

STRATEGIES = ("ddp", "zero2", "zero3", "fsdp")
SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 832, "max_position_embeddings": 1024,
}  # fmt: skip
INDEX = "model.safetensors.index.json"
FAULTS = ("missing", "unexpected", "misshapen", "file missing", "file cut off")


@pytest.fixture(scope="module")
def bench(load_module: Callable[[Path], ModuleType], project_root: Path) -> ModuleType:
    return load_module(project_root / "tests" / "bench" / "loading_memory.py")


def make(folder: Path, kind: str, **sizes: object) -> Path:
    """An architecture of random bf16 weights in several files."""
    torch.manual_seed(5)
    architecture = AutoConfig.for_model(kind, **(SIZES | sizes))
    model = AutoModelForCausalLM.from_config(architecture, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen2 with tied embeddings."""
    return make(tmp_path_factory.mktemp("models") / "whole", "qwen2", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def damaged(whole: Path) -> list[Path]:
    """One copy for each of FAULTS."""
    copies = [whole.with_name(fault.replace(" ", "_")) for fault in FAULTS]
    for copy, fault in zip(copies, FAULTS, strict=True):
        shutil.copytree(whole, copy)
        place = copy / json.loads((copy / INDEX).read_text())["weight_map"]["model.layers.1.mlp.up_proj.weight"]
        weights = load_file(place)
        if fault == "missing":
            del weights["model.layers.1.mlp.up_proj.weight"]
        elif fault == "unexpected":
            weights["model.layers.2.mlp.up_proj.weight"] = torch.zeros(2)
        elif fault == "misshapen":
            weights["model.layers.1.mlp.up_proj.weight"] = torch.zeros(64, 128)
        save_file(weights, place, metadata={"format": "pt"})
        if fault == "file missing":
            place.unlink()
        elif fault == "file cut off":
            place.write_bytes(place.read_bytes()[:-100])
    return copies


def words(bench: ModuleType, model: Path, strategy: str, ranks: int, *more: str) -> list[str]:
    return [*bench.overrides(model, ranks), f"parallelism={strategy}", "precision=fp32", *more]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_stored_weights_arrive_and_damaged_ones_are_refused_on_every_rank(
    bench: ModuleType, whole: Path, damaged: list[Path], tmp_path: Path, strategy: str, ranks: int
) -> None:
    code, lines, output = bench.launch(
        tmp_path / "run",
        words(bench, whole, strategy, ranks),
        ranks,
        sums=True,
        refused=[str(path) for path in damaged],
    )
    assert (code, len(lines)) == (0, ranks), output
    stored = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32)
    expected = {name: weight.double().sum().item() for name, weight in stored.named_parameters()}
    for line in lines:
        assert line["sums"] == pytest.approx(expected, rel=1e-6, abs=1e-5)
        by_fault = dict(zip(FAULTS, line["refused"], strict=True))
        assert {fault: (code, problem) for fault, (code, problem, _) in by_fault.items()} == {
            "missing": (2, "weights-incomplete"),
            "unexpected": (2, "weights-incomplete"),
            "misshapen": (2, "weights-incomplete"),
            "file missing": (2, "weights-file-missing"),
            "file cut off": (2, "weights-file-damaged"),
        }
        assert "1 missing keys such as model.layers.1.mlp.up_proj.weight" in by_fault["missing"][2]
        assert "1 unexpected keys such as model.layers.2.mlp.up_proj.weight" in by_fault["unexpected"][2]
        shapes = "model.layers.1.mlp.up_proj.weight of shape [64, 128], where the model has [128, 64]"
        assert f"1 mismatched keys such as {shapes}" in by_fault["misshapen"][2]


@pytest.mark.parametrize("strategy", ["ddp", "zero3", "fsdp"])
def test_rank_0_draws_and_the_others_get_the_same(
    bench: ModuleType, whole: Path, tmp_path: Path, strategy: str
) -> None:
    random = words(bench, whole, strategy, 2, "model.weights=random", "training.seed=7")
    code, lines, output = bench.launch(tmp_path / "run", random, 2, sums=True)
    assert (code, len(lines)) == (0, 2), output
    with no_init_weights():
        drawn = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(whole), dtype=torch.float32)
    drawn.tie_weights()
    draw_weights(drawn, seed=7)
    expected = {name: weight.double().sum().item() for name, weight in drawn.named_parameters()}
    for line in lines:
        assert line["sums"] == pytest.approx(expected, rel=1e-6, abs=1e-5)


def test_a_tied_weight_that_is_stored_under_the_heads_name(bench: ModuleType, whole: Path, tmp_path: Path) -> None:
    """Some converters write the head and leave out the embeddings that it is tied to."""
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    index = json.loads((folder / INDEX).read_text())
    place = index["weight_map"].pop("model.embed_tokens.weight")
    weights = load_file(folder / place)
    weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
    save_file(weights, folder / place, metadata={"format": "pt"})
    index["weight_map"]["lm_head.weight"] = place
    (folder / INDEX).write_text(json.dumps(index))
    stored = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32)
    expected = stored.get_input_embeddings().weight.double().sum().item()
    for strategy in ("zero3", "fsdp"):
        code, lines, output = bench.launch(tmp_path / strategy, words(bench, folder, strategy, 2), 2, sums=True)
        assert code == 0, output
        assert [line["sums"]["model.embed_tokens.weight"] for line in lines] == pytest.approx([expected] * 2, rel=1e-6)


def test_a_run_with_a_file_cut_off_ends_before_any_rank_starts(run, damaged: list[Path], tmp_path: Path) -> None:
    model = [f"model.path={damaged[FAULTS.index('file cut off')]}", "model.weights=pretrained", "model.facts=null"]
    ended = run(["tunebook", "train", "quickstart", *model, "evaluation=none", "hardware=cpu", f"outputs={tmp_path}"])
    assert ended.exit_code == 2, ended.output
    assert "was cut off. Copy or download it again" in ended.output
    assert "Traceback" not in ended.output


def test_a_run_with_a_weight_missing_ends_with_2_on_two_ranks(run, damaged: list[Path], tmp_path: Path) -> None:
    model = [f"model.path={damaged[0]}", "model.weights=pretrained", "model.facts=null", "model.tokenizer=DIR"]
    model[-1] = f"model.tokenizer={Path(__file__).parents[2] / 'recipes' / 'quickstart' / 'model'}"
    ranks = ["hardware=cpu", "hardware.gpus_per_node=2", "parallelism=ddp", "training.max_steps=1"]
    ended = run(["tunebook", "train", "quickstart", *model, *ranks, "evaluation=none", f"outputs={tmp_path}"])
    assert ended.exit_code == 2, ended.output
    assert "1 missing keys such as model.layers.1.mlp.up_proj.weight" in ended.output
    assert "Traceback" not in ended.output
