"""Which ranks read or draw the weights with each strategy, and how the others get them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from tunebook.config.choices import Compute, Generation, PeftMethod, Weights
from tunebook.config.compose import compose
from tunebook.config.schema import RunConfig
from tunebook.facts.sharing import Sharing, sharing_of, stays_whole
from tunebook.model.load import begin_loading, finish_loading, load_model

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture
def config_of(project_root: Path, tmp_path: Path):
    """`config_of("zero3", ...)`: the quickstart under a strategy, with a much smaller model."""
    folder = tmp_path / "model"
    shutil.copytree(project_root / "recipes" / "quickstart" / "model", folder)
    content = json.loads((folder / "config.json").read_text()) | SIZES | {"num_key_value_heads": 1}
    content.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(content))

    def configure(choice: str, *words: str) -> RunConfig:
        config = compose(
            "quickstart", [f"model.path={folder}", "attention=sdpa", f"parallelism={choice}", *words]
        ).config
        config.hardware.generation, config.precision.compute = Generation.cpu, Compute.fp32
        return config

    return configure


@pytest.mark.parametrize(
    ("choice", "sharing"),
    [
        ("single", "each"), ("ddp", "each"), ("zero1", "each"), ("zero2", "each"), ("zero2_offload", "each"),
        ("zero3", "scatter"), ("zero3_offload", "scatter"), ("zero3_nvme", "scatter"),
        ("fsdp", "send"), ("fsdp_grad_op", "send"), ("hsdp", "send"), ("fsdp_offload", "send"),
        ("fsdp_all_ranks_load", "each"),
    ],
)  # fmt: skip
def test_who_reads(config_of, choice: str, sharing: str) -> None:
    config = config_of(choice)
    assert sharing_of(config) is Sharing[sharing]
    config.peft.method = PeftMethod.lora
    assert sharing_of(config) is Sharing[sharing]
    config.peft.method = PeftMethod.qlora  # quantized on the GPU of each rank while it is read
    assert sharing_of(config) is Sharing.each


@pytest.mark.parametrize(
    ("choice", "words", "whole"),
    [
        ("ddp", [], True),
        ("zero2", [], True),
        ("zero2_offload", [], True),
        ("zero2", ["parallelism.mixed_precision=cast"], True),  # in fp32 nothing is cast
        ("zero3", [], False),
        ("fsdp", [], False),
        ("fsdp_all_ranks_load", [], False),
    ],
)
def test_what_stays_whole_on_a_gpu(config_of, choice: str, words: list[str], whole: bool) -> None:
    assert stays_whole(config_of(choice, *words)) is whole


def test_cast_weights_are_fp32_on_the_gpu_first(config_of) -> None:
    config = config_of("zero2", "parallelism.mixed_precision=cast")
    config.precision.compute = Compute.bf16
    assert not stays_whole(config)
    config = config_of("zero2")
    config.precision.compute = Compute.bf16
    assert stays_whole(config)


def test_fp16_is_cast_by_deepspeed(config_of) -> None:
    config = config_of("zero2")
    config.precision.compute = Compute.fp16
    assert not stays_whole(config)
    config = config_of("ddp")
    config.precision.compute = Compute.fp16
    assert stays_whole(config)


def same(first: torch.nn.Module, second: torch.nn.Module) -> bool:
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize(("choice", "others_draw"), [("fsdp", False), ("zero3", False), ("ddp", False),
                                                     ("fsdp_all_ranks_load", True)])  # fmt: skip
def test_rank_0_draws_what_one_process_draws(config_of, choice: str, others_draw: bool) -> None:
    config = config_of(choice)
    alone = load_model(config)
    assert same(begin_loading(config, rank=0), alone)
    assert same(begin_loading(config, rank=1), alone) is others_draw


def test_allocated_weights_have_own_addresses_and_real_buffers(config_of) -> None:
    """accelerate identifies parameters by their addresses, and buffers are never sent."""
    config = config_of("fsdp")
    room, drawn = begin_loading(config, rank=1), begin_loading(config, rank=0)
    addresses = [parameter.data_ptr() for parameter in room.parameters()]
    assert 0 not in addresses and len(set(addresses)) == len(addresses)
    assert {name: weight.shape for name, weight in room.named_parameters()} == {
        name: weight.shape for name, weight in drawn.named_parameters()
    }
    buffers, expected = dict(room.named_buffers()), dict(drawn.named_buffers())
    assert buffers.keys() == expected.keys() and buffers
    assert all(torch.equal(buffers[name], expected[name]) for name in buffers)
    assert room.get_output_embeddings().weight is room.get_input_embeddings().weight


def test_only_rank_0_reads_under_fsdp_and_every_rank_elsewhere(config_of, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("fsdp")
    load_model(config).save_pretrained(config.model.path)
    config.model.weights = Weights.pretrained
    begun = begin_loading(config, rank=1)
    assert finish_loading(config, begun, rank=1, device=torch.device("cpu")) is begun
    whole = finish_loading(config, begin_loading(config, rank=0), rank=0, device=torch.device("cpu"))
    assert same(whole, load_model(config))
    ddp = config_of("ddp")
    ddp.model.weights = Weights.pretrained
    assert same(finish_loading(ddp, begin_loading(ddp, rank=1), rank=1, device=torch.device("cpu")), whole)


def test_a_gpu_is_read_into_directly(config_of, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    asked: list[object] = []
    original = AutoModelForCausalLM.from_pretrained

    def note(*words, **options):
        asked.append(options.pop("device_map", None))
        return original(*words, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", note)
    gpu = torch.device("cuda", 3)
    for choice in ("ddp", "zero2", "fsdp_all_ranks_load"):
        config = config_of(choice)
        load_model(config).save_pretrained(config.model.path)
        config.model.weights = Weights.pretrained
        finish_loading(config, begin_loading(config, rank=1), rank=1, device=gpu)
    assert asked == [{"": gpu}, {"": gpu}, None]


def test_ranks_have_the_same_random_state_afterwards(config_of) -> None:
    """Adapters are drawn next, by each rank for itself."""
    config, next_ones = config_of("fsdp"), []
    for rank in (0, 1):
        finish_loading(config, begin_loading(config, rank=rank), rank=rank, device=torch.device("cpu"))
        next_ones.append(torch.rand(3))
    assert torch.equal(*next_ones)
