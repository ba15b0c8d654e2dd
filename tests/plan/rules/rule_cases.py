"""A case for every rule: the smallest change to a sound configuration that breaks it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from tunebook.config.choices import (
    Attention,
    Checkpointing,
    Compute,
    Format,
    Fp8Scaling,
    Generation,
    LauncherName,
    MasterWeights,
    Offload,
    OptimizerName,
    PackingMode,
    PeftMethod,
    ScheduleName,
    Source,
    SpecialText,
    Strategy,
    Switch,
    TrainOn,
    Weights,
    WrapPolicy,
)
from tunebook.config.schema import (
    FsdpConfig,
    MixturePart,
    ParallelismConfig,
    RayConfig,
    SlurmConfig,
    ZeroConfig,
)

from ..memory.layers import measured as traced

ON_CPU = {
    "hardware.generation": Generation.cpu,
    "precision.compute": Compute.fp32,
    "precision.tf32": Switch.disabled,
    "attention.implementation": Attention.sdpa,
}
ON_VOLTA = {**ON_CPU, "hardware.generation": Generation.volta}
ON_1 = {"hardware.gpus_per_node": 1}
ON_8 = {"hardware.gpus_per_node": 8}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Changes to a sound configuration that break one rule, and what its message must hold."""

    id: str
    match: str
    values: dict[str, Any]
    background: dict[str, Any] = field(default_factory=dict)  # by itself sound


def case(id: str, match: str, values: dict[str, Any], background: dict[str, Any] | None = None) -> Case:
    return Case(id=id, match=match, values=values, background=background or {})


def zero(strategy: Strategy, **settings: Any) -> dict[str, Any]:
    return {"parallelism": ZeroConfig(strategy=strategy, **settings), **ON_8}


def fsdp(strategy: Strategy, **settings: Any) -> dict[str, Any]:
    return {"parallelism": FsdpConfig(strategy=strategy, **settings), **ON_8}


def folder(name: str) -> dict[str, Any]:
    return {"model.name": None, "model.path": name}


def mixture(**parts: MixturePart) -> dict[str, Any]:
    return {"dataset.source": Source.mixture, "dataset.name": None, "dataset.parts": parts}


FP8 = {"precision.compute": Compute.fp8}
COMPILED = {"model.compile_layers": True, "attention.implementation": Attention.varlen_attention}
TILED = {"activation.mlp_tile_tokens": 4096, "activation.checkpointing": Checkpointing.enabled}
DDP = {"parallelism": ParallelismConfig(strategy=Strategy.ddp), **ON_8}
MEASURED = traced(
    num_layers=2, parameters=1, linear_inputs=1, adapter_parameters=1, attention=["eager", "flash_attention_2"]
)
LEAKING = {
    "model.facts.architecture": "BloomForCausalLM",
    "model.facts.measured": traced(
        num_layers=2, parameters=1, linear_inputs=1, adapter_parameters=1, isolates={"mask": False, "lengths": False}
    ),
}
GPT_OSS = {
    "model.facts.architecture": "GptOssForCausalLM",
    "model.facts.measured": traced(
        num_layers=2, parameters=1, linear_inputs=1, adapter_parameters=1, isolates={"mask": False},
        attention=["eager", "flex_attention", "flash_attention_4", "varlen_attention"],
    ),
    "attention.implementation": Attention.eager,
}  # fmt: skip
WITH_EXPERTS = traced(
    num_layers=2, parameters=900, active_parameters=300, linear_inputs=10, expert_adapters={"down_proj": [20, 10]},
    attention=["eager", "sdpa", "flash_attention_2"],
)  # fmt: skip
WITH_REFUSED = traced(num_layers=2, parameters=900, adapters={"in_proj": [8, 8]}, not_adapted=["out_proj"])
SHARED_ROWS = {**DDP, "parallelism.sequence_group_size": 2, "attention.implementation": Attention.varlen_attention}
PADDED = {"packing.mode": PackingMode.padded, "training.micro_batch_size": None}
BIG = {"training.global_samples": 2000}
PADDED_DDP = {**DDP, **PADDED}
IN_TOKENS = {"training.global_tokens": 65_536, "training.global_samples": None}
LORA = {"peft.method": PeftMethod.lora}
QLORA = {"peft.method": PeftMethod.qlora}
EXPERTS = ["7.mlp.experts.down_proj"]
PLAIN_TEXT = {"dataset.format": Format.text}
SDPA = {"attention.implementation": Attention.sdpa}
VARLEN = {"attention.implementation": Attention.varlen_attention}
BY_DOCUMENT = {"attention.implementation": Attention.sdpa_by_document}
BY_SIZE = fsdp(Strategy.fsdp, wrap_policy=WrapPolicy.size, wrap_min_num_parameters=1_000_000)
GENERATED = {"dataset.source": Source.synthetic, "dataset.name": None}
SLURM = {"launcher": SlurmConfig(name=LauncherName.slurm)}
RAY = {"launcher": RayConfig(name=LauncherName.ray)}
ONE_DAY = {"launcher": SlurmConfig(name=LauncherName.slurm, time_limit="1-0")}
ON_TWO_NODES = {**DDP, "hardware.num_nodes": 2, "hardware.gpus_per_node": 4}

CASES = [
    # numbers
    case("out-of-range", "0.0 must be above 0", {"optimizer.learning_rate": 0.0}),
    case("out-of-range", "nan must be", {"optimizer.learning_rate": math.nan}),
    case("out-of-range", "inf must be at most", {"hardware.memory_gib": math.inf}),
    case("out-of-range", "0 must be at least 2", {"model.facts.vocab_size": 0}),
    # sources
    case("model-not-named", "no model is named", {"model.name": None}),
    case("model-not-named", "name two models", {"model.path": "book:recipes/quickstart/model"}),
    case("model-name-is-folder", "is a folder, not a name", {"model.name": "./mine"}),
    case(
        "model-revision-ignored",
        "v1 is not used with model.path",
        {"model.revision": "v1"},
        folder("book:recipes/quickstart/model") | {"training.max_length": 1024},
    ),
    case("model-name-form", "'a/b/c' does not have the form", {"model.name": "a/b/c"}),
    case("model-folder", "not/there does not exist", folder("not/there")),
    case("model-not-causal", "is made for masked LM", folder("masked")),
    case(
        "model-not-causal",
        "Mistral3.* is a model of images or sound and text: AutoModelForCausalLM of transformers loads no "
        r"model_type=mistral3; name a causal language model, .* text part alone \(model_type=mistral\)",
        folder("images"),
    ),
    case(
        "unknown-architecture",
        "loads no Qwen3VLForConditionalGeneration",
        {"model.facts.architecture": "Qwen3VLForConditionalGeneration", "model.facts.measured": MEASURED},
    ),
    case("length-beyond-model", "40000 .* 32768", {"training.max_length": 40_000, "packing.row_length": 40_000}),
    case(
        "length-beyond-model",
        "140000 .* 32768 .* stretched to 131072",
        {"training.max_length": 140_000, "packing.row_length": 140_000, "model.yarn_factor": 4.0},
    ),
    case("yarn-not-possible", "means nothing without a factor", {"model.yarn_original_positions": 1024}),
    case(
        "yarn-not-possible",
        "65536 original positions are more than the 32768",
        {"model.yarn_factor": 4.0, "model.yarn_original_positions": 65_536},
    ),
    case(
        "yarn-not-possible",
        "not been tested with GPT2LMHeadModel",
        {"model.yarn_factor": 2.0, "model.facts.architecture": "GPT2LMHeadModel", "model.facts.measured": MEASURED},
    ),
    case(
        "yarn-not-possible",
        "Llama 3.1 and later",
        {
            "model.yarn_factor": 2.0,
            "model.facts.architecture": "LlamaForCausalLM",
            "model.facts.max_position_embeddings": 131_072,
            "model.facts.measured": MEASURED,
        },
    ),
    case("dataset-source", "source=hub needs dataset.name", {"dataset.name": None}),
    case("dataset-source", "source=files needs", {"dataset.source": Source.files, "dataset.name": None}),
    case("dataset-name-form", "'a/b/c' is neither a folder nor", {"dataset.name": "a/b/c"}),
    case(
        "dataset-name-form",
        "'./not there' is neither a folder nor",
        mixture(chat=MixturePart(source=Source.hub, name="./not there")),
    ),
    case("tokenizer-name-form", "'a/b/c' is neither a folder nor", {"model.tokenizer": "a/b/c"}),
    case("dataset-source", "at least one part", mixture()),
    case("dataset-source", "parts.chat.source=files needs dataset.parts.chat.path", mixture(chat=MixturePart())),
    case(
        "dataset-source",
        "mixture inside a mixture",
        mixture(all=MixturePart(source=Source.mixture, path="a.jsonl")),
    ),
    case("dataset-field-ignored", "source=hub does not read dataset.path", {"dataset.path": "a.jsonl"}),
    case(
        "dataset-field-ignored",
        "parts.all.source=files does not read dataset.parts.all.train_split",
        {"dataset.parts": {"all": MixturePart(path="a.jsonl", train_split="test")}},
        mixture(all=MixturePart(path="a.jsonl")),
    ),
    case("dataset-field-ignored", "generated documents have no keys", {"dataset.ignore_keys": ["tools"]}, GENERATED),
    case(
        "dataset-field-ignored",
        "each part of a mixture has its own",
        {"dataset.ignore_keys": ["tools"]},
        mixture(all=MixturePart(path="a.jsonl")),
    ),
    case(
        "dataset-field-ignored",
        "the documents are tokens already",
        {"dataset.special_tokens_in_content": SpecialText.keep},
        {"dataset.format": Format.pretokenized},
    ),
    case(
        "dataset-field-ignored",
        "each part of a mixture has its own: dataset.parts.NAME.text_field",
        {"dataset.text_field": "body"},
        {"dataset.source": Source.mixture, "dataset.name": None, "dataset.parts": {"all": MixturePart(path="a.jsonl")}},
    ),
    case(
        "dataset-field-ignored",
        "each part of a mixture has its own: dataset.parts.NAME.answer_template",
        {"dataset.answer_template": "{{a}}"},
        mixture(all=MixturePart(path="a.jsonl")),
    ),
    case(
        "dataset-field-ignored", "generated documents have no fields", {"dataset.answer_template": "{{a}}"}, GENERATED
    ),
    case("field-templates", "need a question and an answer", {"dataset.question_template": "{{a}}"}),
    case("validation-twice", "both hold", {"dataset.validation_split": "test", "dataset.validation_share": 0.1}),
    case("validation-source", "that is trained on", {"dataset.validation_split": "train"}),
    case(
        "validation-source",
        "source=files has no splits",
        {"dataset.validation_split": "test"},
        {"dataset.source": Source.files, "dataset.path": "a.jsonl", "dataset.name": None},
    ),
    case("validation-source", "tokens of their own", {"dataset.validation_path": "a.jsonl"}, GENERATED),
    case("train-on-without-roles", "asks for turns", {"dataset.train_on": TrainOn.assistant}, PLAIN_TEXT),
    case("system-prompt-ignored", "not used", {"dataset.system_prompt": "Be brief."}, PLAIN_TEXT),
    case("chat-template-not-found", "there is no file", {"model.chat_template": "not/there.jinja"}),
    case("template-date-form", "'25 Nov 2026' is not a date", {"model.template_date": "25 Nov 2026"}),
    case("template-date-form", "'2026-02-30' is not a date", {"model.template_date": "2026-02-30"}),
    # batch
    case("batch-one-way", "both set", {"training.global_tokens": 65_536}),
    case("batch-one-way", "step is not set", {"training.global_samples": None}),
    case("batch-not-divisible", "530 .* 528 and 536 are the nearest", {"training.global_samples": 530}, PADDED_DDP),
    case("batch-not-divisible", "4 .* 8 is the smallest", {"training.global_samples": 4}, PADDED_DDP),
    case("batch-not-divisible", "8 GPUs x micro batch 3 = 24", {"training.micro_batch_size": 3}, PADDED_DDP),
    case(
        "batch-not-divisible",
        "make 9 rows of 2048, .* 16384 and 32768",
        {"training.global_tokens": 9 * 2048, "training.global_samples": None},
        DDP,
    ),
    case("batch-too-small", "4 documents a step are fewer than the 8 GPUs", {"training.global_samples": 4}, DDP),
    case(
        "batch-too-small",
        "8 rows x 2048 tokens = 16384",
        {"training.global_tokens": 2048, "training.global_samples": None},
        DDP,
    ),
    case("tokens-need-packing", "packed rows", IN_TOKENS, PADDED),
    case("batch-larger-than-data", "64 .* 10", {"dataset.max_documents": 10}),
    case("row-shorter-than-document", "rows of 1024 tokens", {"packing.row_length": 1024}),
    # precision
    case("bf16-on-volta", r"volta \(compute capability 7.0\)", {"precision.compute": Compute.bf16}, ON_VOLTA),
    case(
        "bf16-on-volta",
        r"turing \(compute capability 7.5\)",
        {"precision.compute": Compute.bf16},
        {**ON_VOLTA, "hardware.generation": Generation.turing},
    ),
    case("fp16-with-bf16-base", "overflows on Qwen2ForCausalLM", {"precision.compute": Compute.fp16}),
    case("fp16-with-bf16-base", "overflows", {"precision.compute": Compute.fp16}, ON_VOLTA),
    case("fp16-on-cpu", "needs a GPU", {"precision.compute": Compute.fp16}, {**ON_CPU, "model.facts.dtype": "float16"}),
    case(
        "fp8-without-hardware",
        "ampere .*fp8 starts at 8.9",
        {"precision.compute": Compute.fp8},
        {"hardware.generation": Generation.ampere, **COMPILED},
    ),
    *(
        case("fp8-with-adapters", f"method={method.name}", FP8, {"peft.method": method, **COMPILED})
        for method in (PeftMethod.lora, PeftMethod.qlora)
    ),
    case("fp8-with-deepspeed", "under zero1", FP8, {**zero(Strategy.zero1), **COMPILED}),
    case("fp8-with-deepspeed", "under zero3", FP8, {**zero(Strategy.zero3), **COMPILED}),
    case("fp8-with-deepspeed", "under zero2", FP8, {**zero(Strategy.zero2, offload_optimizer=Offload.cpu), **COMPILED}),
    case("fp8-scaling-ignored", "rowwise changes nothing .*bf16", {"precision.fp8_scaling": Fp8Scaling.rowwise}),
    case("tf32-without-hardware", "volta", {"precision.tf32": Switch.enabled}, ON_VOLTA),
    case("tf32-without-hardware", "a CPU", {"precision.tf32": Switch.enabled}, ON_CPU),
    case("bf16-weights-without-bf16", "compute=fp32", {"precision.master_weights": MasterWeights.bf16}, ON_VOLTA),
    # attention
    case(
        "flash-attention-below-ampere",
        "flash_attention_2 needs compute capability 8.0; volta has 7.0",
        {"attention.implementation": Attention.flash_attention_2, "precision.compute": Compute.fp16},
        {**ON_VOLTA, "model.facts.dtype": "float16"},
    ),
    case(
        "flash-attention-below-ampere",
        "flash_attention_4 needs compute capability 9.0; ampere has 8.0",
        {"attention.implementation": Attention.flash_attention_4},
        {"hardware.generation": Generation.ampere},
    ),
    case(
        "flash-attention-below-ampere",
        "this is a CPU",
        {"attention.implementation": Attention.flash_attention_2},
        {**ON_CPU, "precision.compute": Compute.bf16},
    ),
    case(
        "attention-not-in-model",
        "Qwen2ForCausalLM cannot attend by sdpa; it can by eager, flash_attention_2",
        {"attention.implementation": Attention.sdpa},
        {"model.facts.measured": MEASURED},
    ),
    case("flash-attention-in-fp32", "fp16 or bf16 only", {"precision.compute": Compute.fp32}),
    case("flex-attention-on-cpu", "cannot train", {"attention.implementation": Attention.flex_attention}, ON_CPU),
    case("flash-attention-not-deterministic", "last bits", {"training.deterministic": True}),
    case("packing-leaks", "BloomForCausalLM cannot keep", LEAKING),
    case("packing-leaks", "cannot keep", LEAKING, {**DDP, **IN_TOKENS}),
    case("packing-leaks", "with eager, whose mask does not know them", GPT_OSS),
    case("liger-without-gpu", "need a GPU", {"model.liger_kernel": True}, ON_CPU),
    case("one-pass-head-without-gpu", "on a GPU only", {"model.one_pass_head": True}, ON_CPU),
    case(
        "one-pass-head-in-fp16",
        "after the loss is scaled",
        {"model.one_pass_head": True},
        {"precision.compute": Compute.fp16, "model.facts.dtype": "float16"},
    ),
    case("compiled-layers-with-flash-attn", "compiled separately", {"model.compile_layers": True}),
    case("compiled-layers-with-flash-attn", "compiled separately", {"model.compile_layers": True}, PADDED),
    case(
        "compiled-layers-with-liger",
        "cannot be compiled",
        {"model.liger_kernel": True, "model.compile_layers": True},
        VARLEN,
    ),
    case("varlen-attention-padded", "packed rows only", VARLEN, PADDED),
    case("varlen-attention-padded", "packed rows only", BY_DOCUMENT, PADDED),
    case("compiled-layers-by-document", "cannot be compiled as one", {"model.compile_layers": True}, BY_DOCUMENT),
    case(
        "selective-without-compiled-blocks",
        "only compiled blocks",
        {"activation.checkpointing": Checkpointing.selective},
    ),
    case(
        "mlp-tiles-without-checkpointing",
        "activation.checkpointing is disabled",
        {"activation.mlp_tile_tokens": 4096},
    ),
    case("mlp-tiles-compiled", "once more for each number", TILED, COMPILED),
    case(
        "mlp-tiles-not-in-model",
        "sends tokens to experts",
        TILED,
        {"model.facts.measured": traced(parameters=2, active_parameters=1)},
    ),
    case(
        "mlp-tiles-not-in-model",
        "has no MLPs that compute each token alone",
        TILED,
        {"model.facts.measured": traced(saved={mode: [0, 1, 0, 0, 1, 0] for mode in ("a", "a/tiled")})},
    ),
    case("mlp-tiles-compiled", "fp8 scale of its own", TILED, {**FP8, **COMPILED}),
    case("activation-offload-without-gpu", "no GPU memory", {"activation.offload": True}, ON_CPU),
    # parallelism
    case("strategy-settings-mismatch", "FSDP settings", {"parallelism.strategy": Strategy.zero2}, fsdp(Strategy.fsdp)),
    case("strategy-settings-mismatch", "no settings", {"parallelism.strategy": Strategy.zero3}, DDP),
    case("single-needs-one-gpu", "8 are asked for", ON_8),
    case("fsdp-on-cpu", "silently become ddp", ON_CPU, fsdp(Strategy.fsdp)),
    case("hsdp-group", "groups of 8 do not split 8", fsdp(Strategy.hsdp)),
    case("hsdp-group", "groups of 3 do not split 8", fsdp(Strategy.hsdp, shard_group_size=3)),
    case("sequence-group-size", "groups of 2 do not divide the 7", {"hardware.gpus_per_node": 7}, SHARED_ROWS),
    case(
        "sequence-group-heads",
        "4 GPUs cannot share 14 heads and 2",
        {"parallelism.sequence_group_size": 4},
        SHARED_ROWS,
    ),
    case(
        "sequence-group-architecture",
        "GptOssForCausalLM has an attention sink for each head",
        {"model.facts.architecture": "GptOssForCausalLM"},
        SHARED_ROWS,
    ),
    case(
        "sequence-group-architecture",
        "FalconForCausalLM is not known to attend only by",
        {"model.facts.architecture": "FalconForCausalLM"},
        SHARED_ROWS,
    ),
    case(
        "sequence-group-attention",
        "rows with flash_attention_2 cannot be shared by 2",
        {"attention.implementation": Attention.flash_attention_2},
        SHARED_ROWS,
    ),
    case("sequence-group-attention", "padded rows cannot be shared by 2", {**SDPA, **PADDED}, SHARED_ROWS),
    case("sequence-group-row", "rows of 4099 tokens", {"packing.row_length": 4099}, SHARED_ROWS),
    case(
        "parallelism-setting-ignored",
        "1000000 is not used by zero2",
        {"parallelism.max_live_parameters": 1_000_000},
        zero(Strategy.zero2),
    ),
    case("parallelism-setting-ignored", "/disk is not used", {"parallelism.nvme_path": "/disk"}, zero(Strategy.zero3)),
    case("parallelism-setting-ignored", "false", {"parallelism.gather_weights_on_save": False}, zero(Strategy.zero2)),
    case("parallelism-setting-ignored", "4 is not used", {"parallelism.shard_group_size": 4}, fsdp(Strategy.fsdp)),
    case("parallelism-setting-ignored", "9 is", {"parallelism.wrap_min_num_parameters": 9}, fsdp(Strategy.fsdp)),
    case("parallelism-setting-ignored", "is not used", {"parallelism.wrap_classes": ["Block"]}, BY_SIZE),
    case(
        "bf16-weights-under-zero",
        "zero2 keeps fp32 weights",
        {"precision.master_weights": MasterWeights.bf16},
        zero(Strategy.zero2),
    ),
    case("offload-not-possible", "whole", {"parallelism.offload_parameters": Offload.cpu}, zero(Strategy.zero2)),
    case(
        "offload-not-possible",
        "zero1 cannot offload to nvme",
        {"parallelism.offload_optimizer": Offload.nvme},
        zero(Strategy.zero1, offload_optimizer=Offload.cpu),
    ),
    case("offload-not-possible", "fsdp cannot", {"parallelism.offload_parameters": Offload.nvme}, fsdp(Strategy.fsdp)),
    case("nvme-path-missing", "local NVMe", {"parallelism.offload_optimizer": Offload.nvme}, zero(Strategy.zero3)),
    case("qlora-without-gpu", "on GPUs", QLORA, ON_CPU),
    case(
        "qlora-parameters-on-nvme",
        "DeepSpeed's files",
        QLORA,
        zero(Strategy.zero3, offload_parameters=Offload.nvme, nvme_path="/disk"),
    ),
    case("launcher-settings-mismatch", "slurm is set", {"launcher.name": LauncherName.slurm}),
    case("launcher-settings-mismatch", "local is set", {"launcher": RayConfig(name=LauncherName.local)}),
    # optimizing
    case(
        "adapter-on-output-head",
        "lm_head would never be trained",
        {"peft.target_modules": ["q_proj", "lm_head"]},
        LORA,
    ),
    case(
        "adapter-dropout-on-experts",
        "adapters on the experts of .* have no dropout, and peft.dropout is 0.05",
        {"peft.dropout": 0.05},
        LORA | {"model.facts.measured": WITH_EXPERTS, "peft.dropout": 0.0},
    ),
    case(
        "activation-offload-with-flex",
        "does not take what was offloaded",
        {"activation.offload": True},
        {"attention.implementation": Attention.flex_attention},
    ),
    case(
        "whole-tied-head-under-fsdp",
        "lm_head is the embeddings",
        {"peft.modules_to_save": ["lm_head", "embed_tokens"]},
        fsdp(Strategy.fsdp) | LORA,
    ),
    case("adapter-without-targets", "self_attn, mlp leave no", {"peft.modules_to_save": ["self_attn", "mlp"]}, LORA),
    case(
        "adapter-module-unknown",
        "has no q_poj; it has down_proj, embed_tokens, gate_proj",
        {"peft.target_modules": ["q_poj", "self_attn.v_proj"]},
        LORA,
    ),
    case("adapter-module-unknown", "has no nonesuch", {"peft.modules_to_save": ["nonesuch", "norm"]}, LORA),
    case(
        "adapter-module-unknown",
        "all-linear is no module; an empty list means every linear layer",
        {"peft.target_modules": ["all-linear"]},
        LORA,
    ),
    case(
        "adapter-pattern-unmatched",
        "q_poj is the name of no linear layer that gets an adapter; a key is one of down_proj, gate_proj",
        {"peft.rank_pattern": {"q_poj": 8, "k_proj": 4}},
        LORA,
    ),
    case(
        "adapter-pattern-unmatched",
        "down_proj is the name of no .*; a key is one of q_proj",
        {"peft.alpha_pattern": {"down_proj": 8.0}},
        LORA | {"peft.target_modules": ["q_proj"]},
    ),
    case(
        "dora-not-tested",
        "weights that parallelism=zero3 divides",
        {"peft.use_dora": True},
        LORA | zero(Strategy.zero3),
    ),
    case("adapter-settings-ignored", "method=full", {"peft.target_modules": ["q_proj"]}),
    case("adapter-settings-ignored", "method=full", {"peft.use_dora": True}),
    case("adapter-settings-ignored", "method=full", {"peft.use_rslora": True}),
    case("adapter-settings-ignored", "method=full", {"peft.target_parameters": EXPERTS}),
    case(
        "adapter-module-refused",
        "PEFT has no adapter for out_proj of",
        {"peft.target_modules": []},
        LORA | {"model.facts.measured": WITH_REFUSED, "peft.target_modules": ["in_proj"]},
    ),
    case("adapter-dropout-on-experts", "parameters .* no dropout", {"peft.target_parameters": EXPERTS}, LORA),
    case(
        "adapter-on-parameters",
        "99.mlp.experts.down_proj is of no layer: the model has",
        {"peft.target_parameters": ["99.mlp.experts.down_proj", *EXPERTS]},
        LORA | {"peft.dropout": 0.0},
    ),
    case(
        "adapter-on-parameters",
        "no DoRA for parameters",
        {"peft.use_dora": True},
        LORA | {"peft.dropout": 0.0, "peft.target_parameters": EXPERTS},
    ),
    case(
        "adapter-on-parameters",
        "over a base in 4 bits",
        QLORA,
        LORA | {"peft.dropout": 0.0, "peft.target_parameters": EXPERTS},
    ),
    case(
        "adapter-on-parameters",
        "parallelism=zero3 divides them",
        {"peft.target_parameters": EXPERTS},
        LORA | zero(Strategy.zero3) | {"peft.dropout": 0.0},
    ),
    case(
        "adapter-on-parameters",
        "which compiled blocks do not allow",
        {"peft.target_parameters": EXPERTS},
        LORA
        | {"peft.dropout": 0.0, "model.compile_layers": True, "attention.implementation": Attention.varlen_attention},
    ),
    case("qlora-random-weights", "has none", {"model.weights": Weights.random}, QLORA),
    case("optimizer-without-gpu", "needs a GPU", {"optimizer.name": OptimizerName.adamw_8bit}, ON_CPU),
    case(
        "optimizer-with-fsdp",
        "sharded tensors of fsdp",
        {"optimizer.name": OptimizerName.paged_adamw_32bit},
        fsdp(Strategy.fsdp),
    ),
    case(
        "optimizer-offloaded",
        "runs on the GPU",
        {"optimizer.name": OptimizerName.adamw_8bit},
        zero(Strategy.zero2, offload_optimizer=Offload.cpu),
    ),
    case(
        "optimizer-offloaded",
        "parallelism.offload_parameters moves",
        {"optimizer.name": OptimizerName.muon},
        fsdp(Strategy.fsdp, offload_parameters=Offload.cpu),
    ),
    case("optimizer-with-fsdp", "sharded tensors", {"optimizer.name": OptimizerName.adafactor}, fsdp(Strategy.fsdp)),
    case("optimizer-with-zero", "flat slices", {"optimizer.name": OptimizerName.muon}, zero(Strategy.zero3)),
    case("optimizer-with-zero", "flat slices", {"optimizer.name": OptimizerName.adafactor}, zero(Strategy.zero1)),
    case("optimizer-without-bf16", "which volta lacks", {"optimizer.name": OptimizerName.muon}, ON_VOLTA),
    case("optimizer-settings-ignored", "beta2", {"optimizer.beta2": 0.95}, {"optimizer.name": OptimizerName.adafactor}),
    case("two-warm-ups", "both set", {"schedule.warmup_steps": 10, "schedule.warmup_share": 0.1}),
    case(
        "two-floors",
        "both set",
        {"schedule.min_learning_rate_share": 0.1},
        {"schedule.name": ScheduleName.cosine_with_min_lr, "schedule.min_learning_rate": 0.0},
    ),
    case("floor-without-its-schedule", "cosine has no floor", {"schedule.min_learning_rate": 0.0}),
    case("schedule-without-floor", "it ends at", {"schedule.name": ScheduleName.cosine_with_min_lr}),
    case("warm-up-longer-than-run", "100 .*=20", {"schedule.warmup_steps": 100}, {"training.max_steps": 20}),
    case("warm-up-ignored", "no warm-up", {"schedule.warmup_share": 0.1}, {"schedule.name": ScheduleName.constant}),
    # quantized
    case("quantized-base-in-full", "gptq; name the model without", folder("gptq")),
    case("quantized-base-in-full", "_4bit, and only an adapter", folder("four_bit")),
    case("quantized-base-in-full", "mxfp4; name the model without", folder("mxfp4")),
    case("quantized-base-in-full", "gptq", folder("gptq"), {**FP8, **COMPILED}),
    case("quantized-base-in-full", "_4bit, and only", folder("four_bit"), FP8 | COMPILED),
    case("quantized-base-not-trainable", "over mxfp4", folder("mxfp4"), LORA),
    case("quantized-base-not-trainable", "over gptq", folder("gptq"), LORA),
    case("quantized-base-not-trainable", "what peft=qlora", folder("four_bit"), LORA),
    case("quantized-twice", "by bitsandbytes_4bit, .*by gptq", folder("gptq"), QLORA),
    case("quantized-twice", "is quantized by mxfp4", folder("mxfp4"), QLORA),
    # running
    case("validation-missing", "none are held out", {"training.evaluate_every_steps": 10}),
    case(
        "best-needs-evaluations",
        "interval is not set",
        {"training.early_stopping_patience": 3},
        {"dataset.validation_share": 0.1},
    ),
    case(
        "best-needs-checkpoints",
        "150 is not a multiple of training.evaluate_every_steps=100",
        {"training.save_every_steps": 150},
        {
            "dataset.validation_share": 0.1,
            "training.evaluate_every_steps": 100,
            "training.save_every_steps": 200,
            "training.load_best_at_end": True,
        },
    ),
    case(
        "best-needs-checkpoints",
        "nothing is saved",
        {"training.load_best_at_end": True},
        {"dataset.validation_share": 0.1, "training.evaluate_every_steps": 100},
    ),
    case("resume-not-found", "'atuo' is neither", {"training.resume": "atuo"}),
    case("resume-not-found", "there is no folder", {"training.resume": "outputs/gone"}),
    *(
        case("hub-name-form", f"'{name}' does not have the form", {"training.push_to_hub": name})
        for name in ("mymodel", "me/a--b", "me/model.git", "me/modèle")
    ),
    case("task-file-not-found", "there is no file", {"evaluation.tasks": ["gsm8k", "mine.yaml"]}),
    case("task-file-not-found", "there is no file", {"evaluation.tasks": ["gsm8k", "humaneval@gone.jsonl"]}),
    case("evaluation-never-runs", "both off", {"evaluation.after": False}, {"evaluation.tasks": ["gsm8k"]}),
    case("evaluation-never-runs", "no tasks", {"evaluation.before": True}),
    case("time-limit-form", "'tomorrow' is not", {"launcher.time_limit": "tomorrow"}, SLURM),
    # launching
    case("node-rank-range", "2 is beyond the last of 2 nodes", {"launcher.node_rank": 2}, ON_TWO_NODES),
    case("master-address-missing", "needs the name", {"launcher.node_rank": 1}, ON_TWO_NODES),
    case("node-settings-ignored", "does not read this", {"launcher.master_port": 3000}, SLURM),
    case("sbatch-option-reserved", "same run folder", {"launcher.extra_args": ["--array=0-3"]}, SLURM),
    case("sbatch-option-reserved", "num_nodes says it", {"launcher.extra_args": ["-N 4", "--qos=x"]}, SLURM),
    case("sbatch-option-reserved", "time_limit says it", {"launcher.extra_args": ["--time=1"]}, SLURM),
    *(
        case("sbatch-option-reserved", f"^{option}: ", {"launcher.extra_args": [option, "--qos=x"]}, SLURM)
        for option in ("-N3", "-t60", "-ofile", "--no-requeue", "--nodes 3")
    ),
    case("container-settings", "no launcher.container_image", {"launcher.container_mounts": ["/data"]}, SLURM),
    case(
        "container-settings",
        "'data' is not the absolute path",
        {"launcher.container_mounts": ["/a", "data"]},
        SLURM | {"launcher.container_image": "host#image"},
    ),
    case("ray-variable-form", "'NCCL_DEBUG' is not of the form", {"launcher.env_vars": ["A=1", "NCCL_DEBUG"]}, RAY),
    case("control-characters", r"main\\n#x holds a line break", {"launcher.partition": "main\n#x"}, SLURM),
    case("ray-address-form", "neither auto, local nor HOST:PORT", {"launcher.address": "ray://head:10001"}, RAY),
]
