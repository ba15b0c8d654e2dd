"""A case for every rule: the smallest change to a sound configuration that breaks it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from tunebook.config.choices import (
    Attention,
    Checkpointing,
    Compute,
    DpoLoss,
    Format,
    Generation,
    LauncherName,
    MasterWeights,
    ModelPart,
    Offload,
    OptimizerName,
    Overlong,
    PackingMode,
    PeftMethod,
    ScheduleName,
    Source,
    Strategy,
    Switch,
    TrainOn,
    Weights,
)
from tunebook.config.launchers import RayConfig, SlurmConfig
from tunebook.config.schema import DpoConfig, FsdpConfig, MethodConfig, MixturePart, ParallelismConfig, ZeroConfig

from ..memory.layers import measured as traced

ON_CPU = {
    "hardware.generation": Generation.cpu,
    "precision.compute": Compute.fp32,
    "precision.tf32": Switch.disabled,
    "attention.implementation": Attention.sdpa,
}
ON_VOLTA = {**ON_CPU, "hardware.generation": Generation.volta}
ON_8 = {"hardware.gpus_per_node": 8}


@dataclass(frozen=True)
class Case:
    """Changes to a sound configuration that break one rule, and the key that it names."""

    id: str
    key: str
    values: dict[str, Any]
    background: dict[str, Any] = field(default_factory=dict)  # by itself sound


def zero(strategy: Strategy, **settings: Any) -> dict[str, Any]:
    return {"parallelism": ZeroConfig(strategy=strategy, **settings), **ON_8}


def fsdp(strategy: Strategy, **settings: Any) -> dict[str, Any]:
    return {"parallelism": FsdpConfig(strategy=strategy, **settings), **ON_8}


def folder(name: str) -> dict[str, Any]:
    return {"model.name": None, "model.path": name}


def mixture(**parts: MixturePart) -> dict[str, Any]:
    return {"dataset.source": Source.mixture, "dataset.name": None, "dataset.parts": parts}


SAMPLES, TOKENS = "training.global_samples", "training.global_tokens"
METRIC = "training.best_metric"
EVALUATE, SAVE = "training.evaluate_every_steps", "training.save_every_steps"
COMPUTE, KERNEL, CHECKPOINTING = "precision.compute", "attention.implementation", "activation.checkpointing"
BUDGET = "activation.memory_budget"
STRATEGY, GROUP = "parallelism.strategy", "parallelism.sequence_group_size"
PARAMETERS, OPTIMIZER = "parallelism.offload_parameters", "parallelism.offload_optimizer"
TARGETS, HELD_OUT = "peft.target_modules", "dataset.validation_share"
FLOOR, WARM_UP = "schedule.min_learning_rate", "schedule.warmup_steps"

LONG = {"training.max_length": 40_000, "packing.row_length": 40_000}
FP8 = {"precision.compute": Compute.fp8}
COMPILED = {"model.compile_layers": True, "attention.implementation": Attention.varlen_attention}
TILED = {"activation.mlp_tile_tokens": 4096, "activation.checkpointing": Checkpointing.enabled}
DDP = {"parallelism": ParallelismConfig(strategy=Strategy.ddp), **ON_8}
MEASURED = traced(num_layers=2, parameters=1, attention=["eager", "flash_attention_2"])
LEAKING = {
    "model.facts.architecture": "BloomForCausalLM",
    "model.facts.measured": traced(num_layers=2, parameters=1, isolates={"mask": False, "lengths": False}),
}
WITH_EXPERTS = traced(
    num_layers=2, parameters=900, active_parameters=300, expert_adapters={"down_proj": [20, 10]},
    attention=["eager", "sdpa", "flash_attention_2"],
)  # fmt: skip
LORA = {"peft.method": PeftMethod.lora}
HEAD_TOO = {"peft.modules_to_save": ["lm_head"]}
OF_IMAGES = LORA | {
    "model.facts.unreached": ["tower", "projector"],
    "model.facts.measured": traced(num_layers=2, parameters=1, adapters={"q": [1, 1]}, vision_adapters={"q": [1, 1]}),
}
WITH_VISION = {"model.train": [ModelPart.language, ModelPart.vision]}
GPT2 = {"model.facts.architecture": "GPT2LMHeadModel", "model.facts.measured": MEASURED}
PADDED = {"packing.mode": PackingMode.padded, "training.micro_batch_size": None}
PADDED_DDP = {**DDP, **PADDED}
IN_TOKENS = {TOKENS: 65_536, SAMPLES: None}
IN_FP16 = {COMPUTE: Compute.fp16, "model.facts.dtype": "float16"}
BF16_WEIGHTS = {"precision.master_weights": MasterWeights.bf16}
QLORA = {"peft.method": PeftMethod.qlora}
ONE_TARGET = LORA | {TARGETS: ["q_proj"]}
ON_EXPERTS = LORA | {"model.facts.measured": WITH_EXPERTS, "peft.dropout": 0.0}
EXPERTS = ["7.mlp.experts.down_proj"]
ON_PARAMETERS = LORA | {"peft.dropout": 0.0, "peft.target_parameters": EXPERTS}
PLAIN_TEXT = {"dataset.format": Format.text}
GENERATED = {"dataset.source": Source.synthetic, "dataset.name": None}
SDPA, VARLEN = {KERNEL: Attention.sdpa}, {KERNEL: Attention.varlen_attention}
FLASH_2, FLASH_4 = {KERNEL: Attention.flash_attention_2}, {KERNEL: Attention.flash_attention_4}
BY_DOCUMENT = {KERNEL: Attention.sdpa_by_document}
SHARED_ROWS = {**DDP, GROUP: 2, **VARLEN}
MUON, PAGED = {"optimizer.name": OptimizerName.muon}, {"optimizer.name": OptimizerName.paged_adamw_32bit}
WITH_FLOOR = {"schedule.name": ScheduleName.cosine_with_min_lr, FLOOR: 0.0}
VALIDATED = {"dataset.validation_share": 0.1}
BEST, PATIENT = {"training.load_best_at_end": True}, {"training.early_stopping_patience": 3}
ON_NVME = zero(Strategy.zero3, offload_parameters=Offload.nvme, nvme_path="/disk")
SLURM = {"launcher": SlurmConfig(name=LauncherName.slurm)}
RAY = {"launcher": RayConfig(name=LauncherName.ray)}
ON_TWO_NODES = {**DDP, "hardware.num_nodes": 2, "hardware.gpus_per_node": 4}


def dpo(**settings: Any) -> dict[str, Any]:
    """Preference training with the padded rows and without the dropout that it needs."""
    method = DpoConfig(name="dpo", **settings)
    return {**PADDED, "method": method, "peft.dropout": 0.0, "model.one_pass_head": False}


CASES = [
    Case("out-of-range", "optimizer.learning_rate", {"optimizer.learning_rate": math.nan}),
    Case("out-of-range", "model.facts.vocab_size", {"model.facts.vocab_size": 0}),
    # model
    Case("model-not-named", "model", {"model.name": None}),
    Case("model-not-named", "model", {"model.path": "book:recipes/quickstart/model"}),
    Case("model-folder", "model.path", folder("not/there")),
    Case("model-not-causal", "model.path", folder("masked")),
    Case("adapter-part-empty", "model.train", {"model.train": [ModelPart.language, ModelPart.projector]}, OF_IMAGES),
    Case("model-parts", "model.train", {"model.train": []}),
    Case("model-parts", "model.train", WITH_VISION),
    Case("length-beyond-model", "training.max_length", LONG),
    Case("yarn-not-possible", "model.yarn_original_positions", {"model.yarn_original_positions": 1024}),
    Case("yarn-not-possible", "model.yarn_factor", {"model.yarn_factor": 2.0}, GPT2),
    Case("chat-template-not-found", "model.chat_template", {"model.chat_template": "not/there.jinja"}),
    Case("chat-template-not-found", "model.chat_template", {"model.chat_template": "trl:nonesuch"}),
    # data
    Case("dataset-source", "dataset.name", {"dataset.name": None}),
    Case("dataset-source", "dataset.path", {"dataset.source": Source.files, "dataset.name": None}),
    Case("dataset-source", "dataset.parts.chat.path", mixture(chat=MixturePart())),
    Case("dataset-source", "dataset.parts.all.parts", mixture(all=MixturePart(source=Source.mixture))),
    Case("field-templates", "dataset.question_template", {"dataset.question_template": "{{a}}"}),
    Case("validation-source", HELD_OUT, {"dataset.validation_split": "test", "dataset.validation_share": 0.1}),
    Case("validation-source", HELD_OUT, {"dataset.validation_split": "train"}),
    Case("validation-source", HELD_OUT, {"dataset.validation_path": "a.jsonl"}, GENERATED),
    Case("train-on-without-roles", "dataset.train_on", {"dataset.train_on": TrainOn.assistant}, PLAIN_TEXT),
    # method
    Case("method-settings-mismatch", "method.name", {"method": MethodConfig(name="dpo")}, dpo()),
    Case("method-without-sequence-groups", GROUP, {GROUP: 2}, {**DDP, **dpo()}),
    Case("method-without-one-pass-head", "model.one_pass_head", {"model.one_pass_head": True}, dpo()),
    Case("method-without-dropout", "peft.dropout", {"peft.dropout": 0.05}, dpo()),
    Case("pairs-settings", "dataset.train_on", {"dataset.train_on": TrainOn.everything}, dpo()),
    Case("pairs-settings", "dataset.overlong", {"dataset.overlong": Overlong.split}, dpo()),
    Case("best-metric-unknown", METRIC, {METRIC: "validation_reward_accuracy"}, PATIENT | VALIDATED | {EVALUATE: 100}),
    Case("dpo-label-smoothing", "method.label_smoothing", dpo(label_smoothing=0.1, loss_type=DpoLoss.ipo)),
    Case("dpo-label-smoothing", "method.label_smoothing", dpo(loss_type=DpoLoss.exo_pair)),
    # batch
    Case("batch-one-way", SAMPLES, {TOKENS: 65_536}),
    Case("batch-not-divisible", SAMPLES, {SAMPLES: 530}, PADDED_DDP),
    Case("batch-not-divisible", TOKENS, {TOKENS: 9 * 2048, SAMPLES: None}, DDP),
    Case("batch-too-small", SAMPLES, {SAMPLES: 4}, DDP),
    Case("batch-too-small", TOKENS, {TOKENS: 2048, SAMPLES: None}, DDP),
    Case("tokens-need-packing", TOKENS, IN_TOKENS, PADDED),
    Case("batch-larger-than-data", SAMPLES, {"dataset.max_documents": 10}),
    Case("row-shorter-than-document", "packing.row_length", {"packing.row_length": 1024}),
    Case(
        "row-shorter-than-document",
        "packing.row_length",
        {**dpo(), "packing.mode": PackingMode.isolated, "packing.row_length": 4095, "training.micro_batch_size": 1},
    ),
    # precision
    Case("needs-gpu", COMPUTE, {COMPUTE: Compute.fp16}, {**ON_CPU, "model.facts.dtype": "float16"}),
    Case("needs-gpu", KERNEL, {KERNEL: Attention.flex_attention}, ON_CPU),
    Case("needs-gpu", "optimizer.name", {"optimizer.name": OptimizerName.adamw_8bit}, ON_CPU),
    Case("needs-gpu", "parallelism.strategy", ON_CPU, fsdp(Strategy.fsdp)),
    Case("bf16-on-volta", COMPUTE, {COMPUTE: Compute.bf16}, ON_VOLTA),
    Case("fp16-with-bf16-base", COMPUTE, {COMPUTE: Compute.fp16}),
    Case("fp8-without-hardware", COMPUTE, FP8, {"hardware.generation": Generation.ampere, **COMPILED}),
    Case("fp8-with-adapters", "peft.method", {"peft.method": PeftMethod.qlora}, {**LORA, **COMPILED, **FP8}),
    Case("fp8-with-adapters", "peft.use_dora", {"peft.use_dora": True}, LORA | FP8),
    Case("fp8-with-adapters", "peft.target_parameters", FP8, ON_PARAMETERS),
    Case("fp8-with-adapters", STRATEGY, zero(Strategy.zero2), {**LORA, **COMPILED, **FP8, **DDP}),
    Case("fp8-with-adapters", STRATEGY, fsdp(Strategy.fsdp), {**LORA, **COMPILED, **FP8, **DDP}),
    Case("fp8-with-deepspeed", COMPUTE, FP8, {**zero(Strategy.zero3), **COMPILED}),
    Case("tf32-without-hardware", "precision.tf32", {"precision.tf32": Switch.enabled}, ON_VOLTA),
    Case("bf16-weights-not-possible", "precision.master_weights", BF16_WEIGHTS, ON_VOLTA),
    Case("bf16-weights-not-possible", "precision.master_weights", BF16_WEIGHTS, zero(Strategy.zero2)),
    # attention
    Case("attention-not-in-model", KERNEL, SDPA, {"model.facts.measured": MEASURED}),
    Case("flash-attention-below-ampere", KERNEL, FLASH_2, {**ON_VOLTA, **IN_FP16}),
    Case("flash-attention-below-ampere", KERNEL, FLASH_4, {"hardware.generation": Generation.ampere}),
    Case("flash-attention-in-fp32", KERNEL, {COMPUTE: Compute.fp32}),
    Case("flash-attention-not-deterministic", KERNEL, {"training.deterministic": True}),
    Case("varlen-attention-padded", KERNEL, VARLEN, PADDED),
    # blocks
    Case("compiled-layers-not-possible", "model.compile_layers", {"model.compile_layers": True}),
    Case("compiled-layers-not-possible", "model.compile_layers", {"model.compile_layers": True}, BY_DOCUMENT),
    Case("compiled-layers-not-possible", "model.compile_layers", {"model.liger_kernel": True}, COMPILED),
    Case("compiled-layers-not-possible", "model.compile_layers", zero(Strategy.zero3), LORA | COMPILED),
    Case("compiled-layers-not-possible", "model.compile_layers", {"peft.use_dora": True}, LORA | COMPILED),
    Case("compiled-layers-not-possible", "model.compile_layers", fsdp(Strategy.fsdp), QLORA | COMPILED),
    Case("one-pass-head-in-fp16", "model.one_pass_head", {"model.one_pass_head": True}, IN_FP16),
    Case("memory-budget-not-possible", BUDGET, {BUDGET: 0.5}),
    Case("memory-budget-not-possible", BUDGET, {BUDGET: 0.5, CHECKPOINTING: Checkpointing.enabled}, COMPILED),
    Case("mlp-tiles-not-possible", "activation.mlp_tile_tokens", {"activation.mlp_tile_tokens": 4096}),
    Case("mlp-tiles-not-possible", "activation.mlp_tile_tokens", TILED, COMPILED),
    Case("mlp-tiles-not-possible", "activation.mlp_tile_tokens", TILED, {"model.facts.measured": WITH_EXPERTS}),
    Case("mlp-tiles-not-possible", "activation.mlp_tile_tokens", TILED, zero(Strategy.zero3)),
    # parallelism
    Case("strategy-settings-mismatch", STRATEGY, {STRATEGY: Strategy.zero2}, fsdp(Strategy.fsdp)),
    Case("strategy-settings-mismatch", STRATEGY, {STRATEGY: Strategy.auto}, fsdp(Strategy.fsdp)),
    Case("single-needs-one-gpu", STRATEGY, ON_8),
    Case("hsdp-group", "parallelism.shard_group_size", fsdp(Strategy.hsdp)),
    Case("hsdp-group", "parallelism.shard_group_size", fsdp(Strategy.hsdp, shard_group_size=3)),
    Case("packing-leaks", "packing.mode", LEAKING),
    Case("sequence-group-size", GROUP, {"hardware.gpus_per_node": 7}, SHARED_ROWS),
    Case("sequence-group-size", GROUP, {GROUP: 4}, SHARED_ROWS),
    Case("sequence-group-size", GROUP, {"packing.row_length": 4099}, SHARED_ROWS),
    Case("sequence-group-architecture", GROUP, {"model.facts.architecture": "GptOssForCausalLM"}, SHARED_ROWS),
    Case("sequence-group-attention", KERNEL, FLASH_2, SHARED_ROWS),
    Case("offload-not-possible", PARAMETERS, {PARAMETERS: Offload.cpu}, zero(Strategy.zero2)),
    Case("offload-not-possible", PARAMETERS, {PARAMETERS: Offload.nvme}, fsdp(Strategy.fsdp)),
    Case("offload-not-possible", PARAMETERS, QLORA, ON_NVME),
    Case("offload-not-possible", OPTIMIZER, {OPTIMIZER: Offload.nvme}, zero(Strategy.zero1)),
    Case("nvme-path-missing", "parallelism.nvme_path", {OPTIMIZER: Offload.nvme}, zero(Strategy.zero3)),
    # adapters
    Case("adapter-on-output-head", TARGETS, {TARGETS: ["q_proj", "lm_head"]}, LORA),
    Case("adapter-module-unknown", TARGETS, {TARGETS: ["q_poj", "self_attn.v_proj"]}, LORA),
    Case("adapter-module-unknown", "peft.rank_pattern", {"peft.rank_pattern": {"q_poj": 8, "k_proj": 4}}, LORA),
    Case("adapter-module-unknown", "peft.alpha_pattern", {"peft.alpha_pattern": {"down_proj": 8.0}}, ONE_TARGET),
    Case("adapter-dropout-on-experts", "peft.dropout", {"peft.dropout": 0.05}, ON_EXPERTS),
    Case("adapter-dropout-on-experts", "peft.dropout", {"peft.target_parameters": EXPERTS}, LORA),
    Case("trained-head-under-fsdp", "peft.modules_to_save", HEAD_TOO, LORA | fsdp(Strategy.fsdp)),
    Case("dora-not-tested", "peft.use_dora", {"peft.use_dora": True}, LORA | zero(Strategy.zero3)),
    Case("dora-not-tested", "peft.use_dora", {"peft.use_dora": True}, ON_EXPERTS),
    Case("adapter-on-parameters", "peft.target_parameters", {"peft.use_dora": True}, ON_PARAMETERS),
    Case("adapter-on-parameters", "peft.target_parameters", COMPILED, ON_PARAMETERS),
    Case("qlora-random-weights", "peft.method", {"model.weights": Weights.random}, QLORA),
    Case("quantized-base", "peft.method", folder("gptq")),
    Case("quantized-base", "peft.method", folder("four_bit"), LORA),
    Case("quantized-base", "peft.method", folder("gptq"), QLORA),
    # optimizer
    Case("optimizer-without-bf16", "optimizer.name", MUON, ON_VOLTA),
    Case("optimizer-with-fsdp", "optimizer.name", PAGED, fsdp(Strategy.fsdp)),
    Case("optimizer-with-zero", "optimizer.name", MUON, zero(Strategy.zero3)),
    Case("optimizer-offloaded", "optimizer.name", PAGED, zero(Strategy.zero2, offload_optimizer=Offload.cpu)),
    Case("optimizer-offloaded", "optimizer.name", MUON, fsdp(Strategy.fsdp, offload_parameters=Offload.cpu)),
    Case("floor-without-its-schedule", FLOOR, {FLOOR: 0.0}),
    Case("floor-without-its-schedule", FLOOR, {"schedule.name": ScheduleName.cosine_with_min_lr}),
    Case("schedule-set-twice", WARM_UP, {WARM_UP: 10, "schedule.warmup_share": 0.1}),
    Case("schedule-set-twice", FLOOR, {"schedule.min_learning_rate_share": 0.1}, WITH_FLOOR),
    # running
    Case("validation-missing", "training.evaluate_every_steps", {"training.evaluate_every_steps": 10}),
    Case("best-needs-evaluations", "training.early_stopping_patience", PATIENT, VALIDATED),
    Case("best-needs-evaluations", "training.load_best_at_end", BEST, VALIDATED),
    Case("best-needs-evaluations", SAVE, BEST | {EVALUATE: 100, SAVE: 150}, VALIDATED),
    Case("best-needs-evaluations", SAVE, BEST | {EVALUATE: 100}, VALIDATED),
    Case("resume-not-found", "training.resume", {"training.resume": "atuo"}),
    Case("resume-not-found", "training.resume", {"training.resume": "outputs/gone"}),
    Case("task-file-not-found", "evaluation.tasks", {"evaluation.tasks": ["gsm8k", "mine.yaml"]}),
    # launcher
    Case("launcher-settings-mismatch", "launcher.name", {"launcher.name": LauncherName.slurm}),
    Case("node-rank-range", "launcher.node_rank", {"launcher.node_rank": 2}, ON_TWO_NODES),
    Case("node-rank-range", "launcher.master_address", {"launcher.node_rank": 1}, ON_TWO_NODES),
    *(
        Case("sbatch-option-reserved", "launcher.extra_args", {"launcher.extra_args": [option, "--qos=x"]}, SLURM)
        for option in ("--array=0-3", "-N3", "--nodes 3")
    ),
    Case("ray-settings-form", "launcher.address", {"launcher.address": "ray://head:10001"}, RAY),
    Case("control-characters", "launcher.partition", {"launcher.partition": "main\n#x"}, SLURM),
    # ignored
    *(
        Case("setting-ignored", key, {key: value}, background)
        for key, value, background in (
            ("dataset.train_split", "test", GENERATED),
            ("dataset.system_prompt", "Be brief.", PLAIN_TEXT),
            ("peft.target_modules", ["q_proj"], {}),
            ("peft.rank", 8, {}),
            ("schedule.warmup_share", 0.1, {"schedule.name": ScheduleName.constant}),
            ("parallelism.max_live_parameters", 1_000_000, zero(Strategy.zero2)),
            (METRIC, "validation_reward_accuracy", dpo()),
            ("parallelism.shard_group_size", 4, fsdp(Strategy.fsdp)),
        )
    ),
]
