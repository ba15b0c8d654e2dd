"""Every strategy's way to its weights, on real ranks over gloo: the same weights arrive, and damaged ones never do.

The ranks run `loading_rank.py`.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from tunebook.model.random_weights import draw_weights

STRATEGIES = ("ddp", "zero2", "zero3", "fsdp")
SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 832, "max_position_embeddings": 1024,
}  # fmt: skip
INDEX = "model.safetensors.index.json"
FAULTS = ("missing", "unexpected", "misshapen", "file missing", "file cut off")


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


def words(model: Path, strategy: str, ranks: int, *more: str) -> list[str]:
    """The overrides of a run of a model in a folder."""
    return [
        f"model={model}", "dataset=synthetic", "training.global_samples=16", "attention=sdpa",
        "packing=isolated", "activation=stored", "training.max_length=512", "optimizer.learning_rate=1e-4",
        f"hardware.gpus_per_node={ranks}", f"parallelism={strategy}", "precision=fp32", *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def tied(whole: Path) -> Path:
    """A copy whose tied weight is stored under the head's name; some converters leave out the embeddings."""
    folder = whole.with_name("tied")
    shutil.copytree(whole, folder)
    index = json.loads((folder / INDEX).read_text())
    place = index["weight_map"].pop("model.embed_tokens.weight")
    weights = load_file(folder / place)
    weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
    save_file(weights, folder / place, metadata={"format": "pt"})
    index["weight_map"]["lm_head.weight"] = place
    (folder / INDEX).write_text(json.dumps(index))
    return folder


@dataclass(frozen=True)
class Loaded:
    """What the ranks of one start loaded, one model after the other."""

    stored: list[dict[str, float]]  # sums of each rank
    refused: list[list[Any]]  # of each rank, how each damaged model was refused
    tied: list[dict[str, float]]
    drawn: list[dict[str, float]]


@pytest.fixture(scope="module")
def loaded(
    run_forked, whole: Path, damaged: list[Path], tied: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, int], Loaded]:
    """Load on so many ranks, once for each strategy."""

    @functools.cache
    def load(strategy: str, ranks: int) -> Loaded:
        folder = tmp_path_factory.mktemp("loaded")
        random = words(whole, strategy, ranks, "model.weights=random", "training.seed=7")
        models = [words(whole, strategy, ranks), words(tied, strategy, ranks), random]
        (folder / "request.json").write_text(json.dumps({"models": models, "refused": [*map(str, damaged)]}))
        ended = run_forked([str(Path(__file__).with_name("loading_rank.py")), str(folder)], ranks=ranks)
        lines = [json.loads(file.read_text()) for file in sorted(folder.glob("rank-*.json"))]
        assert (ended.exit_code, len(lines)) == (0, ranks), ended.output
        stored, tied_sums, drawn = ([line["sums"][model] for line in lines] for model in range(3))
        return Loaded(stored, [line["refused"] for line in lines], tied_sums, drawn)

    return load


# One rank of those that keep whole weights loads as each of two does.
@pytest.mark.parametrize(("strategy", "ranks"), [*product(STRATEGIES, [2]), ("zero3", 1), ("fsdp", 1)])
def test_stored_weights_arrive_and_damaged_ones_are_refused_on_every_rank(
    loaded: Callable[[str, int], Loaded], whole: Path, strategy: str, ranks: int
) -> None:
    expected = sums_of(AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32))
    found = loaded(strategy, ranks)
    for sums, refused in zip(found.stored, found.refused, strict=True):
        assert sums == pytest.approx(expected, rel=1e-6, abs=1e-5)
        by_fault = dict(zip(FAULTS, refused, strict=True))
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


def sums_of(model: PreTrainedModel) -> dict[str, float]:
    """The sum of each weight."""
    return {name: weight.double().sum().item() for name, weight in model.named_parameters()}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rank_0_draws_and_the_others_get_the_same(
    loaded: Callable[[str, int], Loaded], whole: Path, strategy: str
) -> None:
    with no_init_weights():
        drawn = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(whole), dtype=torch.float32)
    drawn.tie_weights()
    draw_weights(drawn, seed=7)
    found = loaded(strategy, 2).drawn
    assert len(found) == 2
    for sums in found:
        assert sums == pytest.approx(sums_of(drawn), rel=1e-6, abs=1e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_tied_weight_that_is_stored_under_the_heads_name(
    loaded: Callable[[str, int], Loaded], whole: Path, strategy: str
) -> None:
    expected = sums_of(AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32))
    found = loaded(strategy, 2).tied
    assert len(found) == 2
    for sums in found:
        assert sums == pytest.approx(expected, rel=1e-6, abs=1e-5)
