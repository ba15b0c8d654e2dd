"""The typed configuration of a run: one dataclass per config group, composed by Hydra, read everywhere as `RunConfig`.

Rules of this file: every field says its unit and, where it has a default, why that one. `MISSING` means "a group file,
the recipe or the user must say"; `None` means "absent", or "decided by Tunebook" where the comment says so. Nothing
here checks across fields: that is `plan.rules`. Nothing here imports torch. A field that does not change the result
of a run says so in its metadata: `config.identity` leaves it out of the run's hash.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from tunebook.config.choices import (
    Attention,
    BadDocuments,
    Checkpointing,
    Compute,
    Contamination,
    Format,
    Fp8Scaling,
    Generation,
    LauncherName,
    MasterWeights,
    ModelPart,
    OptimizerName,
    Overlong,
    PackingMode,
    PeftMethod,
    Reasoning,
    ResumeAnyway,
    ScheduleName,
    Source,
    SpecialText,
    Switch,
    TrackerName,
    TrainOn,
    Weights,
)
from tunebook.config.launchers import LauncherConfig, RayConfig, SlurmConfig
from tunebook.config.methods import DpoConfig as DpoConfig
from tunebook.config.methods import MethodConfig as MethodConfig
from tunebook.config.model_facts import ModelFacts as ModelFacts  # part of the schema, whoever asks for it
from tunebook.config.parallelism import FsdpConfig as FsdpConfig
from tunebook.config.parallelism import ParallelismConfig as ParallelismConfig
from tunebook.config.parallelism import ZeroConfig as ZeroConfig
from tunebook.config.ranges import number

_SAME_RESULT = {"identity": False}
_SAME_LOSS = {"identity": False, "evidence": True}  # how a loss is computed: changes speed and memory


@dataclass(kw_only=True)
class ModelConfig:
    """Which model, tokenizer and chat template. `model=ORG/NAME` sets `name`, `model=FOLDER` sets `path`."""

    name: str | None = None  # on the hub: organization/name
    path: str | None = None  # a folder; `book:recipes/...` means inside this book
    revision: str | None = None  # commit or tag on the hub; null takes the newest and records which it was
    # Start from the model that a run has trained: its folder, or a recipe, whose newest run in `outputs` is taken
    run: str | None = field(default=None, metadata=_SAME_RESULT)
    weights: Weights = Weights.pretrained
    tokenizer: str | None = None  # another tokenizer's name or folder; null takes the model's own
    # `chatml` (for a base model), a Jinja file, `training` (TRL's version of the tokenizer's own, which marks answers)
    # or `trl:NAME` for one of TRL's; null takes the tokenizer's own
    chat_template: str | None = None
    # The date for templates that write today's, YYYY-MM-DD, so that runs can be repeated; Llama 3's own default
    template_date: str = "2024-07-26"
    pad_token: str | None = None  # the token that fills rows up; null takes the tokenizer's own
    eos_token: str | None = None  # the token that ends a text; null takes the tokenizer's own
    # Parts that are trained, of a model for images and text: language, vision (its tower), projector (between the two).
    # The others are frozen
    train: list[ModelPart] = field(default_factory=lambda: [ModelPart.language])
    trust_remote_code: bool = False  # runs code from the model's repository
    liger_kernel: bool = False  # fused RMSNorm, RoPE and SwiGLU by Triton; needs a GPU
    # torch.compile of each transformer block; null: where it was tested
    compile_layers: bool | None = None
    # Compute the output head's gradients together with its logits, in tiles of tokens; null: where it was tested
    one_pass_head: bool | None = field(default=None, metadata=_SAME_LOSS)
    # Stretch rotary positions this many times by YaRN, for documents longer than the model has positions for; null:
    # positions as published
    yarn_factor: float | None = number(None, above=1, at_most=1024)
    # The number of positions that yarn_factor multiplies; null: the model's
    yarn_original_positions: int | None = number(None, at_least=2, unit="tokens")
    facts: ModelFacts | None = None  # the model's sizes, for planning; null: read from its config.json


@dataclass(kw_only=True)
class SyntheticConfig:
    """Generated, learnable documents with a lognormal length distribution, for machines without a hub."""

    num_documents: int = number(20_000, at_least=1, unit="documents")  # documents that are generated
    # Mean of the natural logarithm of a document's length in tokens
    log_mean_tokens: float = number(5.8, at_least=0, at_most=20)
    # Standard deviation of that logarithm
    log_sigma_tokens: float = number(0.9, at_least=0, at_most=5)
    min_tokens: int = number(16, at_least=2, unit="tokens")  # the shortest document
    max_tokens: int = number(4096, at_least=2, unit="tokens")  # the longest document
    seed: int = number(0, at_least=0)  # equal seeds generate equal documents
    # Pairs for method=dpo: each document is a chosen side, and its rejected one has the same length and random tokens
    pairs: bool = False


@dataclass(kw_only=True)
class DatasetSource:
    """One place documents come from, and how they are written there."""

    source: Source = Source.files
    path: str | None = None  # files: a file, a folder or a glob, see data/files.py; `book:recipes/...` is in this book
    name: str | None = None  # hub: organization/name, or a folder in the hub's layout
    subset: str | None = None  # hub: the configuration of a data set that has several
    revision: str | None = None  # hub: commit or tag; null takes the newest and records which it was
    train_split: str = "train"  # hub: the split to train on
    # How a document is written; auto: detected from the first document's keys, and printed
    format: Format = Format.auto
    text_field: str = "text"  # format=text: the field that holds the document
    # format=fields: the question, as Jinja over the document's fields, such as "{{passage}} {{question}}?"
    question_template: str | None = None
    answer_template: str | None = None  # format=fields: the answer, such as "{{answer}}"
    # Keys of documents and of their turns that are left out, such as [tools]; others that mean something are refused
    ignore_keys: list[str] = field(default_factory=list)
    # Variables of the chat template, such as {enable_thinking: false}; those of a document come first
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    # Use only this many documents, from the first; null: all
    max_documents: int | None = number(None, at_least=1, unit="documents")
    synthetic: SyntheticConfig = field(default_factory=SyntheticConfig)  # source=synthetic: the generated documents


@dataclass(kw_only=True)
class MixturePart(DatasetSource):
    """One data set of a mixture."""

    # Share of the documents, relative to the other parts'; null in all: every document
    weight: float | None = number(None, above=0)


@dataclass(kw_only=True)
class DatasetConfig(DatasetSource):
    """The training documents, how they are masked and cut, and what is held out."""

    # Which tokens the loss counts; auto: the assistant's turns where there are roles, everything in plain text
    train_on: TrainOn = TrainOn.auto
    # What happens to a document longer than training.max_length; TRL cuts too, and the number is printed
    overlong: Overlong = Overlong.cut
    # The assistant's reasoning: keep all that the chat template writes, that after the last user turn, or drop all
    reasoning: Reasoning = Reasoning.keep
    # Documents that cannot be trained on: refuse the data, or leave them out (skip), counted by reason
    bad_documents: BadDocuments = BadDocuments.refuse
    # Share of a source's documents that bad_documents=skip may leave out; more is an error
    max_bad_share: float = number(0.01, at_least=0, at_most=1)
    # Images with more pixels are scaled down, in their proportions; null: to the limits of the model's processor alone
    max_image_pixels: int | None = number(None, at_least=784, unit="pixels")
    download_images: bool = False  # fetch images that documents name by URL, while the data is prepared
    system_prompt: str | None = None  # put before conversations that have no system turn of their own
    # The text of a special token, such as `</s>`, in a turn: refuse the document, keep it as the token, or as_text.
    # auto: as_text in conversations, whose tokens the chat template writes; keep in texts, which have theirs written
    special_tokens_in_content: SpecialText = SpecialText.auto
    # source=mixture: its data sets, by names of your own; each has the keys of a data set, such as parts.NAME.path
    parts: dict[str, MixturePart] = field(default_factory=dict)
    validation_split: str | None = None  # hub: the split to validate on
    validation_path: str | None = None  # the files to validate on
    # Share of the documents to validate on, chosen by a hash of their content
    validation_share: float = number(0.0, at_least=0, at_most=0.5)
    # Mean length of a document, for planning before the data is there
    mean_tokens: float | None = number(None, above=0, unit="tokens")
    # Number of documents, for planning before the data is there
    num_documents: int | None = number(None, at_least=1, unit="documents")
    # Processes that tokenize; null uses every core
    num_workers: int | None = number(None, at_least=1, metadata=_SAME_RESULT)


def sources_of(data: DatasetConfig) -> dict[str, DatasetSource]:
    """Where its documents come from, by the keys that it is typed under: its own source, or a mixture's parts."""
    if data.source is not Source.mixture:
        return {"dataset": data}
    return {f"dataset.parts.{name}": part for name, part in data.parts.items()}


@dataclass(kw_only=True)
class ReferenceHardware:
    """The machine a recipe was published on, or one it fits: what is planned for where no GPU is found."""

    generation: Generation = Generation.cpu  # the GPU generation
    gpus_per_node: int = number(1, at_least=1, at_most=1024, unit="GPUs")  # GPUs of each machine
    memory_gib: float | None = number(None, above=0, unit="GiB")  # memory of one GPU; null: the generation's


@dataclass(kw_only=True)
class HardwareConfig:
    """The machine: `num_nodes` x `gpus_per_node` GPUs of one generation (on a CPU: ranks)."""

    # The GPU generation, which decides the image, the precision and the attention; auto: as found
    generation: Generation = Generation.auto
    num_nodes: int = number(1, at_least=1, at_most=100_000, unit="machines")  # machines of the run
    # GPUs of each machine, ranks on a CPU; null: all that are found, one for parallelism=single
    gpus_per_node: int | None = number(None, at_least=1, at_most=1024, unit="GPUs")
    # Memory of one GPU; null: as found, or the generation's usual size
    memory_gib: float | None = number(None, above=0, unit="GiB", metadata=_SAME_RESULT)
    # Memory of one machine; null: this machine's where the ranks start here, else unknown
    host_memory_gib: float | None = number(None, above=0, unit="GiB", metadata=_SAME_RESULT)
    # The machine a recipe was published on, or one it fits
    reference: ReferenceHardware = field(default_factory=ReferenceHardware)


@dataclass(kw_only=True)
class PrecisionConfig:
    """Number formats."""

    compute: Compute = Compute.auto
    # The number format of the weights. bf16 halves the memory and loses small updates of what is trained; a frozen base
    # published in bf16 loses nothing
    master_weights: MasterWeights = MasterWeights.auto
    tf32: Switch = Switch.auto  # TensorFloat-32 for fp32 products; cc >= 8.0
    # compute=fp8 of trained weights: one scale per tensor is faster, one per row is more exact. A frozen base has one
    # per row
    fp8_scaling: Fp8Scaling = Fp8Scaling.tensorwise


@dataclass(kw_only=True)
class AttentionConfig:
    """The attention kernel."""

    implementation: Attention = Attention.auto


@dataclass(kw_only=True)
class PackingConfig:
    """Whether several documents share a row."""

    mode: PackingMode = PackingMode.auto
    # Length of a packed row; null: that of the longest document, or of both sides of a pair
    row_length: int | None = number(None, at_least=2, unit="tokens")


@dataclass(kw_only=True)
class ActivationConfig:
    """What is kept of the forward pass for the backward pass."""

    # Recompute each layer whole (enabled: saves most activations, costs about a third in speed), or not (disabled)
    checkpointing: Checkpointing = Checkpointing.auto
    # Share of the activations of compiled blocks that is kept: at 1 all that the compiler keeps; below, the operations
    # that take the least time to recompute are recomputed first; at 0 whole blocks; null: the highest that fits where
    # checkpointing is auto, else 1
    memory_budget: float | None = number(None, at_least=0, at_most=1, metadata=_SAME_LOSS)
    # Keep activations in host memory; null: where layers would be recomputed whole otherwise, with adapters on one GPU
    offload: bool | None = None
    # Compute the MLP of each recomputed layer this many tokens at a time, for rows that do not fit otherwise, and once
    # more in the backward pass; null: all tokens of a pass at once
    mlp_tile_tokens: int | None = number(None, at_least=1, unit="tokens", metadata=_SAME_LOSS)


@dataclass(kw_only=True)
class PeftSettings:
    """Full fine-tuning, LoRA or QLoRA."""

    method: PeftMethod = PeftMethod.full
    rank: int = number(16, at_least=1)  # rank of the adapters
    alpha: float = number(32.0, above=0)  # the update is scaled by alpha / rank
    dropout: float = number(0.05, at_least=0, below=1)  # share of an adapter's inputs that is set to zero
    # Adapted layers; empty: every linear one but the output head
    target_modules: list[str] = field(default_factory=list)
    # Also on parameters that are no linear layer, by the ends of their names: [7.mlp.experts.down_proj]
    target_parameters: list[str] = field(default_factory=list)
    modules_to_save: list[str] = field(default_factory=list)  # modules trained whole and saved with the adapter
    use_rslora: bool = False  # scale the update by alpha / sqrt(rank)
    # Ranks of single linear layers, by name: {q_proj: 32}
    rank_pattern: dict[str, int] = number(dict, at_least=1)
    # Alphas of single linear layers, by name: {q_proj: 64}
    alpha_pattern: dict[str, float] = number(dict, above=0)
    use_dora: bool = False  # also train the length of each output's weights (DoRA, arXiv:2402.09353)


@dataclass(kw_only=True)
class OptimizerConfig:
    """The optimizer and its step size."""

    name: OptimizerName = OptimizerName.adamw  # set by optimizer=NAME
    # the highest of the schedule; 2e-4 with adapters, 1e-6 with method=dpo
    learning_rate: float = number(MISSING, above=0, at_most=1)
    weight_decay: float = number(0.0, at_least=0, at_most=1)  # decoupled from the gradient
    beta1: float = number(0.9, at_least=0, below=1)  # decay of the mean of the gradients
    beta2: float = number(0.999, at_least=0, below=1)  # decay of the mean of their squares
    epsilon: float = number(1e-8, above=0, at_most=1)  # added to the divisor of a step


@dataclass(kw_only=True)
class ScheduleConfig:
    """The learning rate over the optimizer steps. At most one of the two warm-ups and one of the two floors."""

    name: ScheduleName = ScheduleName.cosine  # set by schedule=NAME
    # Steps in which the learning rate rises
    warmup_steps: int | None = number(None, at_least=0, unit="optimizer steps")
    warmup_share: float | None = number(None, at_least=0, below=1)  # the warm-up as a share of all optimizer steps
    # cosine_with_min_lr: the lowest learning rate
    min_learning_rate: float | None = number(None, at_least=0, at_most=1)
    # cosine_with_min_lr: the lowest as a share of optimizer.learning_rate
    min_learning_rate_share: float | None = number(None, at_least=0, at_most=1)


@dataclass(kw_only=True)
class TrackingConfig:
    """Where curves are also sent; `metrics.jsonl` and the report are always written."""

    name: TrackerName = TrackerName.none  # set by tracking=NAME
    project: str = "tunebook"  # the tracker's project


@dataclass(kw_only=True)
class EvaluationConfig:
    """lm-evaluation-harness before and after the training."""

    tasks: list[str] = MISSING  # harness names, or YAML files; empty (evaluation=none): no evaluation
    before: bool = False  # also evaluate the untrained model, to compare with
    after: bool = True  # evaluate the trained model
    limit: int | None = number(None, at_least=1, unit="items")  # items of each task, from the first; null: all
    # Requests computed at once, or fewer if the memory does not take them; null: the most that it takes
    batch_size: int | None = number(16, at_least=1, unit="requests")
    # Examples before each item; null: the task's own
    num_fewshot: int | None = number(None, at_least=0, unit="examples")
    # Look for the items of the tasks and of the validation part in the training documents, before training; report
    # counts them, disabled does not look
    contamination: Contamination = field(default=Contamination.report, metadata=_SAME_RESULT)


@dataclass(kw_only=True)
class TrainingConfig:
    """Batch, length, duration, saving and logging. At most one of `global_samples` and `global_tokens`."""

    # Documents per optimizer step over all GPUs, packed or not; null: 64, if global_tokens is null too
    global_samples: int | None = number(None, at_least=1, unit="documents")
    # Tokens per optimizer step over all GPUs, at most
    global_tokens: int | None = number(None, at_least=1, unit="tokens")
    # Rows per GPU and pass; null: the largest the rules allow
    micro_batch_size: int | None = number(None, at_least=1, unit="rows")
    # The longest document; dataset.overlong decides what happens to a longer one
    max_length: int = number(MISSING, at_least=2, unit="tokens")
    num_epochs: float = number(1.0, above=0, at_most=1_000_000, unit="epochs")  # passes over the documents
    # The last optimizer step; null: as many as the epochs take
    max_steps: int | None = number(None, at_least=1, unit="optimizer steps")
    max_grad_norm: float | None = number(1.0, above=0)  # gradients are clipped to this norm; null: they are not
    seed: int = number(42, at_least=0, at_most=2**32 - 1)  # decides random weights, dropout and document order
    deterministic: bool = False  # deterministic kernels: the same bits in every run, slower
    log_every_steps: int = number(1, at_least=1, unit="optimizer steps")  # how often metrics are written
    # How often a checkpoint is saved; null: only at the end
    save_every_steps: int | None = number(None, at_least=1, unit="optimizer steps")
    # The newest checkpoints that are kept, in addition to the best
    keep_checkpoints: int = number(2, at_least=1, unit="checkpoints")
    # Training waits for a checkpoint's writing alone, not for its flushing and hashing
    save_in_background: bool = field(default=True, metadata=_SAME_RESULT)
    # How often the validation loss is computed; null: at the end, if there are documents to validate on
    evaluate_every_steps: int | None = number(None, at_least=1, unit="optimizer steps")
    load_best_at_end: bool = False  # model/ is the saved step with the best validation; false: the last step
    # What the best validation and early stopping go by; of method=dpo also validation_reward_accuracy and others
    best_metric: str = "validation_loss"
    # Stop after this many validations without improvement; null: never stop early
    early_stopping_patience: int | None = number(None, at_least=1, unit="validations")
    # A checkpoint folder, auto (the newest unfinished run of this configuration) or never (a new run)
    resume: str = field(default="auto", metadata=_SAME_RESULT)
    # What may differ from the checkpoint that is resumed
    resume_anyway: list[ResumeAnyway] = field(default_factory=list, metadata=_SAME_RESULT)


@dataclass(kw_only=True)
class RunConfig:
    """One run, whole: what `run.yaml` holds and every rank reads."""

    recipe: str | None = None  # set by the command line
    title: str = field(default="", metadata=_SAME_RESULT)  # one line for lists and reports
    model: ModelConfig = MISSING
    dataset: DatasetConfig = MISSING
    method: MethodConfig = field(default_factory=MethodConfig)
    parallelism: ParallelismConfig = MISSING
    hardware: HardwareConfig = MISSING
    precision: PrecisionConfig = MISSING
    attention: AttentionConfig = MISSING
    packing: PackingConfig = MISSING
    activation: ActivationConfig = MISSING
    peft: PeftSettings = MISSING
    optimizer: OptimizerConfig = MISSING
    schedule: ScheduleConfig = MISSING
    launcher: LauncherConfig = field(default=MISSING, metadata=_SAME_RESULT)
    tracking: TrackingConfig = field(default=MISSING, metadata=_SAME_RESULT)
    evaluation: EvaluationConfig = MISSING
    training: TrainingConfig = MISSING
    # Folder that run folders are made in; relative to where the command is typed
    outputs: str = field(default="outputs", metadata=_SAME_RESULT)


def world_size(config: RunConfig) -> int:
    """The number of ranks of a resolved configuration."""
    return config.hardware.num_nodes * (config.hardware.gpus_per_node or 1)


def data_ranks(config: RunConfig) -> int:
    """The number of ranks that get different rows: a sequence group counts as one."""
    return max(1, world_size(config) // config.parallelism.sequence_group_size)


GROUPS = (
    "model", "dataset", "method", "parallelism", "hardware", "precision", "attention", "packing", "activation", "peft",
    "optimizer", "schedule", "launcher", "tracking", "evaluation",
)  # fmt: skip

# The schema of each choice of the groups whose choices have keys of their own.
CHOICE_SCHEMAS: dict[str, dict[str, type]] = {
    "parallelism": {
        **dict.fromkeys(("single", "ddp"), ParallelismConfig),
        **dict.fromkeys(("zero1", "zero2", "zero3"), ZeroConfig),
        **dict.fromkeys(("fsdp", "fsdp_grad_op", "hsdp"), FsdpConfig),
    },
    "method": {"sft": MethodConfig, "dpo": DpoConfig},
    "launcher": {"local": LauncherConfig, "slurm": SlurmConfig, "ray": RayConfig},
}


def starts_elsewhere(config: RunConfig) -> bool:
    """Whether the launcher starts the ranks on other machines than this one."""
    return config.launcher.name is not LauncherName.local
