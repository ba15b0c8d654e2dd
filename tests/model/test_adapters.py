"""Adapters: how a quantized base is stored for each strategy, and that an adapter is only merged whole."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tunebook.config.choices import Compute, MasterWeights, PeftMethod, Strategy
from tunebook.config.frozen import plain_config
from tunebook.config.model_facts import ModelFacts
from tunebook.config.schema import (
    FsdpConfig,
    ModelConfig,
    ParallelismConfig,
    PeftSettings,
    PrecisionConfig,
    RunConfig,
    ZeroConfig,
)
from tunebook.errors import RequestError
from tunebook.model.adapters import (
    adapter_config,
    four_bit,
    freeze_parts,
    keep_in_fp32,
    require_known_layers,
    require_known_modules,
    require_known_parameters,
    trains_in_fp32,
    with_adapter,
)

from .conftest import SMALL, small_config

WEIGHTS = "adapter_model.safetensors"
NAME = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"


def base(dtype: torch.dtype = torch.float32, *, is_tied: bool = False) -> PreTrainedModel:
    torch.manual_seed(0)
    architecture = AutoConfig.for_model("llama", **SMALL | {"tie_word_embeddings": is_tied})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(architecture, dtype=dtype)
    return model.eval()


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """A LoRA of rank 4 on q_proj, away from zero."""
    adapted = get_peft_model(base(), LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"]))
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.ones_(weight)
    adapted.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_a_whole_adapter_is_merged(adapter: Path) -> None:
    stored = load_file(adapter / WEIGHTS)
    first, second = stored[NAME], stored[NAME.replace("lora_A", "lora_B")]
    merged = with_adapter(base(), adapter, PeftMethod.lora)
    expected = base().model.layers[1].self_attn.q_proj.weight + second @ first * (8 / 4)  # peft's alpha of 8
    torch.testing.assert_close(merged.model.layers[1].self_attn.q_proj.weight, expected)
    tied = with_adapter(base(is_tied=True), adapter, PeftMethod.lora)
    assert tied.config.tie_word_embeddings is True and tied.all_tied_weights_keys


@pytest.mark.parametrize(
    ("edit", "name"),
    [
        (lambda weights: weights.pop(NAME), NAME),
        (lambda weights: weights.update({"extra.weight": torch.zeros(1)}), "extra.weight"),
        (lambda weights: weights.update({NAME: torch.zeros(2, 32)}), f"{NAME} of shape [2, 32]"),
    ],
    ids=["missing", "unexpected", "misshapen"],
)
def test_an_adapter_that_is_not_whole_is_refused(adapter: Path, edit: Any, name: str) -> None:
    file = adapter / WEIGHTS
    weights = load_file(file)
    edit(weights)
    save_file(weights, file)
    with pytest.raises(RequestError, match=re.escape(name)) as raised:
        with_adapter(base(), adapter, PeftMethod.lora)
    assert raised.value.problem_id == "weights-incomplete"


def test_an_adapter_without_weights_or_with_damaged_ones_is_refused(adapter: Path) -> None:
    file = adapter / WEIGHTS
    file.write_bytes(file.read_bytes()[:-1])
    for _ in range(2):
        with pytest.raises(RequestError) as raised:
            with_adapter(base(), adapter, PeftMethod.lora)
        assert raised.value.problem_id == "weights-file-damaged"
        file.unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("parallelism", "compute", "storage"),
    [
        (ZeroConfig(strategy=Strategy.zero2), Compute.bf16, torch.uint8),
        (ZeroConfig(strategy=Strategy.zero3), Compute.fp16, torch.float16),
        (FsdpConfig(strategy=Strategy.fsdp), Compute.bf16, torch.bfloat16),
        (FsdpConfig(strategy=Strategy.hsdp), Compute.fp32, torch.float32),
    ],
)
def test_a_sharded_base_is_stored_in_the_format_of_the_computation(
    monkeypatch: pytest.MonkeyPatch, parallelism: ParallelismConfig, compute: Compute, storage: torch.dtype
) -> None:
    """FSDP2 would convert another float format, and would not shard bytes."""
    monkeypatch.setattr(transformers, "BitsAndBytesConfig", SimpleNamespace)  # the real one asks for bitsandbytes
    settings = four_bit(plain_config(parallelism=parallelism, precision=PrecisionConfig(compute=compute)))
    assert settings.bnb_4bit_quant_storage is storage
    assert settings.load_in_4bit


@pytest.mark.parametrize(
    ("method", "strategy", "weights", "is_fp32"),
    [
        (PeftMethod.qlora, Strategy.single, MasterWeights.bf16, True),
        (PeftMethod.lora, Strategy.zero2, MasterWeights.fp32, True),
        (PeftMethod.lora, Strategy.zero2, MasterWeights.bf16, False),  # DeepSpeed casts the whole model
        (PeftMethod.full, Strategy.single, MasterWeights.fp32, False),
    ],
)
def test_adapters_are_in_fp32_whatever_the_base_is_in(
    method: PeftMethod, strategy: Strategy, weights: MasterWeights, is_fp32: bool
) -> None:
    kind = ZeroConfig if strategy is Strategy.zero2 else ParallelismConfig
    config = plain_config(
        peft=PeftSettings(method=method),
        parallelism=kind(strategy=strategy),
        precision=PrecisionConfig(master_weights=weights),
    )
    assert trains_in_fp32(config) is is_fp32


def test_adapter_is_not_merged_into_16_bits(
    tmp_path: Path, relative_difference: Callable[[torch.Tensor, torch.Tensor], float]
) -> None:
    """Merging would lose small updates. lm-eval ties the weights again, which must not fail."""
    in_bf16 = partial(base, torch.bfloat16, is_tied=True)
    targets = ["q_proj", "up_proj", "down_proj"]
    lora = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=targets, modules_to_save=["lm_head"])
    trained: Any = get_peft_model(in_bf16(), lora)
    keep_in_fp32(trained)
    for name, weight in trained.named_parameters():
        if weight.requires_grad and "lora_A" not in name:
            torch.nn.init.normal_(weight, std=0.5)
    trained.save_pretrained(tmp_path / "adapter")
    loaded = with_adapter(in_bf16(), tmp_path / "adapter", PeftMethod.lora)
    loaded.tie_weights()
    kept = {name: weight for name, weight in loaded.named_parameters() if "lora_" in name or "modules_to_save" in name}
    learned = {name: weight for name, weight in trained.named_parameters() if weight.requires_grad}
    assert kept.keys() == learned.keys() != set()
    assert {weight.dtype for weight in learned.values()} == {torch.float32}
    for name, weight in kept.items():
        assert weight.dtype is (torch.float32 if "lora_" in name else torch.bfloat16), name
        assert torch.equal(weight, learned[name].to(weight.dtype)), name
    row, rounding = torch.arange(12)[None], torch.finfo(torch.bfloat16).eps / 2  # of one number; two passes differ less
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        answered = loaded.eval()(row).logits
        assert relative_difference(answered, trained.eval()(row).logits) < rounding
        assert relative_difference(answered, in_bf16().eval()(row).logits) > 10 * rounding


@pytest.mark.parametrize(
    "trained",
    [{"modules_to_save": ["lm_head"]}, {"target_modules": ["q_proj", "embed_tokens"]}],
    ids=["head", "adapter_on_embeddings"],
)
def test_adapter_on_one_matrix_of_a_tied_pair_is_kept(tmp_path: Path, trained: dict[str, list[str]]) -> None:
    tied, row = partial(base, is_tied=True), torch.arange(12)[None]
    adapted: Any = get_peft_model(
        tied(), LoraConfig(**{"task_type": "CAUSAL_LM", "r": 4, "target_modules": ["q_proj"]} | trained)
    )
    for weight in adapted.parameters():
        if weight.requires_grad:
            torch.nn.init.normal_(weight, std=0.1)
    adapted.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        expected = adapted.eval()(row).logits
        assert (expected - tied()(row).logits).abs().max() > 0.01
        model = with_adapter(tied(), tmp_path / "adapter", PeftMethod.lora)
        model.tie_weights()  # as lm-eval does
        # One product more or less per weight: fp32's eps is 1.2e-7, of logits of about 1.
        torch.testing.assert_close(model(row).logits, expected, atol=1e-5, rtol=1e-5)
        assert model.config.tie_word_embeddings is False
        model.save_pretrained(tmp_path / "merged")
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        assert torch.equal(loaded(row).logits, model(row).logits)


def test_unreached_parts_are_frozen_and_get_no_adapter() -> None:
    model: Any = AutoModelForCausalLM.from_config(small_config("Gemma3ForConditionalGeneration", **SMALL))
    facts = ModelFacts(unreached=["model.vision_tower", "model.multi_modal_projector"])
    config = plain_config(model=ModelConfig(facts=facts), peft=PeftSettings(method=PeftMethod.lora))
    freeze_parts(config, model)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {
        name for name, _ in model.named_parameters() if name.startswith(("model.language_model.", "lm_head."))
    }
    adapted: Any = get_peft_model(model, adapter_config(config))  # type: ignore[arg-type]
    adapters = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    assert len(adapters) == 2 * 7 * 2 and all("language_model.layers" in name for name in adapters)


def test_a_layer_can_have_a_rank_and_an_alpha_of_its_own() -> None:
    peft = PeftSettings(method=PeftMethod.lora, rank_pattern={"q_proj": 2}, alpha_pattern={"q_proj": 6})
    adapted = get_peft_model(base(), adapter_config(plain_config(peft=peft)))
    layer = adapted.base_model.model.model.layers[1].self_attn
    assert (layer.q_proj.lora_A["default"].out_features, layer.q_proj.scaling["default"]) == (2, 6 / 2)
    assert (layer.k_proj.lora_A["default"].out_features, layer.k_proj.scaling["default"]) == (16, 32 / 16)


def test_an_adapter_names_the_revision_of_its_base() -> None:
    """Without it, PEFT would load the newest."""
    model = ModelConfig(name="org/base", revision="v1.0")
    found: Any = adapter_config(plain_config(model=model, peft=PeftSettings(method=PeftMethod.lora)))
    assert found.revision == "v1.0"


EXPERTS = ["1.mlp.experts.gate_up_proj", "1.mlp.experts.down_proj"]


def _gpt_oss() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = SMALL | {"num_hidden_layers": 3, "num_local_experts": 4, "num_experts_per_tok": 2}
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt_oss", **sizes))
    return model


@pytest.mark.parametrize(
    ("key", "known", "unknown"),
    [
        ("target_modules", ["k_proj", "layers.1.self_attn.q_proj"], "layers.9.self_attn.q_proj"),
        ("target_modules", ["model.layers.0.mlp.up_proj"], "model.layers.*.q_proj"),
        ("rank_pattern", {"layers.[01].self_attn.q_proj": 4}, "layers.9.self_attn.q_proj"),
        ("alpha_pattern", {"q_proj": 4.0}, "self_attn.up_proj"),
    ],
)
def test_a_layer_that_the_model_lacks_is_refused_before_adapters_are_made(key: str, known: Any, unknown: str) -> None:
    def with_layers(layers: Any) -> RunConfig:
        settings: Any = {"method": PeftMethod.lora, key: layers}
        return plain_config(peft=PeftSettings(**settings))

    require_known_layers(with_layers(known), base())
    with pytest.raises(RequestError, match=rf"peft\.{key}: .*{re.escape(unknown)}") as raised:
        require_known_layers(
            with_layers([*known, unknown] if isinstance(known, list) else known | {unknown: 2}), base()
        )
    assert raised.value.problem_id == "adapter-module-unknown"


def test_an_adapter_on_the_experts_of_some_layers_is_merged_and_unknown_names_are_refused(
    tmp_path: Path,
) -> None:
    peft = PeftSettings(method=PeftMethod.lora, rank=2, dropout=0.0, target_parameters=EXPERTS)
    config = plain_config(peft=peft)
    adapted: Any = get_peft_model(_gpt_oss(), adapter_config(config))  # type: ignore[arg-type]
    require_known_parameters(config, adapted)
    trained = {name: weight for name, weight in adapted.named_parameters() if weight.requires_grad}
    of_experts = {name for name in trained if "experts" in name}
    assert len(of_experts) == 4 and all("layers.1." in name for name in of_experts)
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.5)
    row = torch.arange(2, 14)[None]
    out = adapted(input_ids=row, labels=row)
    out.loss.backward()
    assert all(weight.grad is not None and weight.grad.abs().max() > 0 for weight in trained.values())
    adapted.save_pretrained(tmp_path / "adapter")
    loaded: Any = with_adapter(_gpt_oss(), tmp_path / "adapter", PeftMethod.lora)
    torch.testing.assert_close(loaded(row).logits, out.logits, rtol=0, atol=1e-4)
    assert (_gpt_oss()(row).logits - out.logits).abs().max() > 1e-2
    for key, names, require in (
        ("target_parameters", [*EXPERTS, "9.mlp.experts.down_proj"], require_known_parameters),
        ("modules_to_save", ["lm_head", "nom"], require_known_modules),
    ):
        settings: Any = {"method": PeftMethod.lora, key: names}
        with pytest.raises(RequestError, match=rf"peft\.{key}: .*{names[-1]}") as raised:
            require(plain_config(peft=PeftSettings(**settings)), adapted)
        assert raised.value.problem_id == "adapter-module-unknown"
