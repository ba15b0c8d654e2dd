"""Loading the initial model of a run: random and stored weights, which ranks read or draw them, and errors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tunebook.config.choices import Attention, Compute, MasterWeights, MixedPrecision, PeftMethod, Strategy, Weights
from tunebook.config.compose import compose
from tunebook.config.frozen import plain_config
from tunebook.config.model_facts import ModelFacts
from tunebook.config.schema import (
    AttentionConfig,
    FsdpConfig,
    ModelConfig,
    ParallelismConfig,
    PeftSettings,
    PrecisionConfig,
    RunConfig,
    ZeroConfig,
)
from tunebook.errors import RequestError
from tunebook.facts.sharing import Sharing, sharing_of, stays_whole
from tunebook.model.load import (
    architecture_from_facts,
    attention_option,
    begin_loading,
    finish_loading,
    load_architecture,
    load_model,
)

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
FACTS = ModelFacts(
    architecture="LlamaForCausalLM", num_parameters=1, num_layers=2, hidden_size=16, intermediate_size=24,
    num_attention_heads=2, num_key_value_heads=1, vocab_size=64, max_position_embeddings=64, dtype="float32",
    tie_word_embeddings=True,
)  # fmt: skip
SINGLE, DDP = ParallelismConfig(strategy=Strategy.single), ParallelismConfig(strategy=Strategy.ddp)
ZERO2, ZERO3 = ZeroConfig(strategy=Strategy.zero2), ZeroConfig(strategy=Strategy.zero3)
CAST = ZeroConfig(strategy=Strategy.zero2, mixed_precision=MixedPrecision.cast)
FSDP = FsdpConfig(strategy=Strategy.fsdp)
ALL_LOAD = FsdpConfig(strategy=Strategy.fsdp, cpu_ram_efficient_loading=False)
CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path, project_root: Path) -> Path:
    """The quickstart's architecture, much smaller, without weights."""
    copy = tmp_path / "model"
    shutil.copytree(project_root / "recipes" / "quickstart" / "model", copy)
    config = json.loads((copy / "config.json").read_text()) | SIZES | {"num_key_value_heads": 1}
    config.pop("layer_types", None)
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def run(folder: Path, parallelism: ParallelismConfig = SINGLE, **model: Any) -> RunConfig:
    """A run of the model in a folder, with random weights."""
    return plain_config(
        model=ModelConfig(**{"path": str(folder), "weights": Weights.random} | model),
        attention=AttentionConfig(implementation=Attention.sdpa),
        precision=PrecisionConfig(compute=Compute.fp32),
        parallelism=parallelism,
    )


@pytest.fixture
def stored(folder: Path) -> Path:
    """The same folder with weights."""
    load_model(run(folder)).save_pretrained(folder)
    return folder


def same(first: torch.nn.Module, second: torch.nn.Module) -> bool:
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    return all(torch.equal(tensor, other) for tensor, other in pairs)


@pytest.mark.parametrize("name", [None, "consolidated.safetensors", "model-00001-of-00002.safetensors"])
def test_a_folder_without_weights_is_refused(folder: Path, name: str | None) -> None:
    """Also one with weights that transformers does not look for: under another name, or shards without their index."""
    if name is not None:
        save_file({"weight": torch.zeros(2)}, folder / name)
    with pytest.raises(RequestError) as caught:
        load_model(run(folder, weights=Weights.pretrained))
    assert caught.value.problem_id == "model-without-weights"


def test_models_that_are_not_whole_or_not_the_planned_one_are_refused(stored: Path, tmp_path: Path) -> None:
    file = stored / "model.safetensors"
    weights = load_file(file)
    weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, file, metadata={"format": "pt"})
    for config, problem_id, key in (
        (run(stored, weights=Weights.pretrained), "weights-incomplete", r"model\.layers\.1\.mlp\.up_proj\.weight"),
        (run(stored, facts=FACTS), "model-facts", "vocab_size"),
        (run(tmp_path), "model-folder", "model.path"),
        (run(tmp_path / "nix"), "model-folder", "model.path"),
    ):
        with pytest.raises(RequestError, match=key) as caught:
            load_model(config)
        assert caught.value.problem_id == problem_id


@pytest.mark.parametrize(("file", "fix"), [("run.yaml", "model.run="), ("adapter_config.json", "export RUN --merge")])
def test_a_folder_of_a_run_or_an_adapter_is_answered_with_the_way_to_its_model(
    tmp_path: Path, file: str, fix: str
) -> None:
    (tmp_path / file).touch()
    with pytest.raises(RequestError, match=fix):
        load_model(run(tmp_path))


def test_planned_facts_are_enough_for_random_weights_without_a_hub() -> None:
    architecture = load_architecture(ModelConfig(name="no/where", weights=Weights.random, facts=FACTS))
    assert (architecture.num_hidden_layers, architecture.vocab_size, architecture.model_type) == (2, 64, "llama")
    with pytest.raises(RequestError) as caught:
        load_architecture(ModelConfig(name="no/where", facts=FACTS))
    assert caught.value.problem_id == "hub-out-of-reach"


def test_a_kernel_is_requested_of_the_part_that_computes_text_only() -> None:
    """Gemma 4's part for sound has no sdpa."""
    facts = compose(None, ["model=gemma4_e2b"]).config.model.facts
    assert facts is not None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            architecture_from_facts(facts), attn_implementation=attention_option(Attention.sdpa)
        )
    tower = model.model.audio_tower.config
    assert (model.config.text_config._attn_implementation, tower._attn_implementation) == ("sdpa", "eager")


@pytest.mark.parametrize(
    ("parallelism", "compute", "sharing", "is_whole"),
    [
        (SINGLE, Compute.fp32, Sharing.each, True),
        (DDP, Compute.fp16, Sharing.each, True),
        (ZERO2, Compute.bf16, Sharing.each, True),
        (ZERO2, Compute.fp16, Sharing.each, False),  # which DeepSpeed casts on the GPU
        (CAST, Compute.bf16, Sharing.each, False),
        (CAST, Compute.fp32, Sharing.each, True),  # in fp32 nothing is cast
        (ZERO3, Compute.bf16, Sharing.scatter, False),
        (FSDP, Compute.bf16, Sharing.send, False),
        (ALL_LOAD, Compute.bf16, Sharing.each, False),
    ],
)
def test_which_ranks_read_and_what_stays_whole(
    parallelism: ParallelismConfig, compute: Compute, sharing: Sharing, is_whole: bool
) -> None:
    config = plain_config(parallelism=parallelism, precision=PrecisionConfig(compute=compute))
    assert (sharing_of(config), stays_whole(config)) == (sharing, is_whole)
    config.peft = PeftSettings(method=PeftMethod.qlora)  # quantized on the GPU of each rank while it is read
    assert sharing_of(config) is Sharing.each


@pytest.mark.parametrize(
    ("parallelism", "others_draw"), [(FSDP, False), (ZERO3, False), (DDP, False), (ALL_LOAD, True)]
)
def test_rank_0_draws_what_one_process_draws(folder: Path, parallelism: ParallelismConfig, others_draw: bool) -> None:
    config = run(folder, parallelism)
    alone = load_model(config)
    assert same(begin_loading(config, rank=0), alone)
    assert same(begin_loading(config, rank=1), alone) is others_draw
    config.training.seed += 1
    assert not same(load_model(config), alone)


@pytest.mark.parametrize("weights", [MasterWeights.fp32, MasterWeights.bf16])
def test_allocated_weights_have_own_addresses_and_real_buffers(folder: Path, weights: MasterWeights) -> None:
    """accelerate identifies parameters by their addresses, and buffers are never sent."""
    config = run(folder, FSDP)
    config.precision.master_weights = weights
    allocated, drawn = begin_loading(config, rank=1), begin_loading(config, rank=0)
    addresses = [parameter.data_ptr() for parameter in allocated.parameters()]
    assert 0 not in addresses and len(set(addresses)) == len(addresses)
    assert [(name, weight.shape, weight.dtype) for name, weight in allocated.named_parameters()] == [
        (name, weight.shape, weight.dtype) for name, weight in drawn.named_parameters()
    ]
    buffers, expected = dict(allocated.named_buffers()), dict(drawn.named_buffers())
    assert buffers.keys() == expected.keys() and buffers
    assert all(torch.equal(buffers[name], expected[name]) for name in buffers)
    assert allocated.get_output_embeddings().weight is allocated.get_input_embeddings().weight


def test_only_rank_0_reads_under_fsdp_and_every_rank_elsewhere(stored: Path) -> None:
    config, ddp = (run(stored, parallelism, weights=Weights.pretrained) for parallelism in (FSDP, DDP))
    begun = begin_loading(config, rank=1)
    assert finish_loading(config, begun, rank=1, device=CPU) is begun
    first = torch.rand(3)
    whole = finish_loading(config, begin_loading(config, rank=0), rank=0, device=CPU)
    assert torch.equal(torch.rand(3), first), "adapters are drawn next, by each rank for itself"
    assert same(whole, load_model(config))
    weights = load_file(stored / "model.safetensors")
    assert weights and all(torch.equal(whole.state_dict()[name], tensor) for name, tensor in weights.items())
    assert same(finish_loading(ddp, begin_loading(ddp, rank=1), rank=1, device=CPU), whole)
