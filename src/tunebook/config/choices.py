"""The closed sets of words a configuration may use; each member is named exactly as a user types it.

Hydra matches an Enum by member *name*, so the names are the user's words and the values repeat them.
"""

from enum import Enum

RESUME_WORDS = ("auto", "never")  # what `training.resume` may be besides a folder


class Generation(Enum):
    """A GPU generation, which decides the image, the precision and the attention (see `facts.generations`)."""

    auto = "auto"
    cpu = "cpu"
    volta = "volta"
    turing = "turing"
    ampere = "ampere"
    ada = "ada"
    hopper = "hopper"
    blackwell = "blackwell"


class Weights(Enum):
    """Where a model's weights come from: its folder or hub, or the seed."""

    pretrained = "pretrained"
    random = "random"


class ModelPart(Enum):
    """A part of a model for images and text."""

    language = "language"
    vision = "vision"
    projector = "projector"


class Source(Enum):
    """Where documents come from."""

    files = "files"
    hub = "hub"
    synthetic = "synthetic"
    mixture = "mixture"


class Format(Enum):
    """How one document is written down."""

    auto = "auto"
    sharegpt = "sharegpt"
    messages = "messages"
    alpaca = "alpaca"
    prompt_completion = "prompt_completion"
    pairs = "pairs"
    text = "text"
    fields = "fields"
    pretokenized = "pretokenized"


class TrainOn(Enum):
    """Which tokens the loss counts: the assistant's turns (completions), or every token."""

    auto = "auto"
    assistant = "assistant"
    everything = "everything"


class Overlong(Enum):
    """What happens to a document longer than `training.max_length`."""

    cut = "cut"
    drop = "drop"
    split = "split"
    refuse = "refuse"


class Reasoning(Enum):
    """Which reasoning of the assistant is written into the text, and so trained on."""

    keep = "keep"
    last = "last"
    drop = "drop"


class BadDocuments(Enum):
    """What happens to documents that cannot be trained on."""

    refuse = "refuse"
    skip = "skip"


class SpecialText(Enum):
    """How the text of a special token, such as `</s>`, in a document is treated."""

    auto = "auto"
    refuse = "refuse"
    keep = "keep"
    as_text = "as_text"


class Strategy(Enum):
    """How a model is distributed over the GPUs."""

    auto = "auto"
    single = "single"
    ddp = "ddp"
    zero1 = "zero1"
    zero2 = "zero2"
    zero3 = "zero3"
    fsdp = "fsdp"
    fsdp_grad_op = "fsdp_grad_op"
    hsdp = "hsdp"


class Offload(Enum):
    """Where a state lives that does not stay on the GPU."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class MixedPrecision(Enum):
    """What a sharded model computes in bf16: its matrix products, as single and ddp do, or everything."""

    autocast = "autocast"
    cast = "cast"


class Compute(Enum):
    """The number format of the matrix products."""

    auto = "auto"
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"
    fp8 = "fp8"


class Fp8Scaling(Enum):
    """What shares one scale when a tensor is turned into fp8: all of it, or each row."""

    tensorwise = "tensorwise"
    rowwise = "rowwise"


class MasterWeights(Enum):
    """The number format in which the model's weights are kept; adapters over bf16 weights are in fp32."""

    auto = "auto"
    fp32 = "fp32"
    bf16 = "bf16"


class Switch(Enum):
    """On, off, or decided by Tunebook with a printed reason."""

    auto = "auto"
    enabled = "enabled"
    disabled = "disabled"


class Checkpointing(Enum):
    """Whether layers are recomputed in the backward pass instead of keeping their results."""

    auto = "auto"
    disabled = "disabled"
    enabled = "enabled"  # every layer, whole


class Attention(Enum):
    """The attention kernel, by the name that transformers knows it by."""

    auto = "auto"
    eager = "eager"
    sdpa = "sdpa"
    flex_attention = "flex_attention"
    flash_attention_2 = "flash_attention_2"
    flash_attention_3 = "flash_attention_3"
    flash_attention_4 = "flash_attention_4"
    varlen_attention = "varlen_attention"  # ours: see model.varlen_attention
    sdpa_by_document = "sdpa_by_document"  # ours: see model.varlen_attention


class PackingMode(Enum):
    """Whether several documents share a row, each attending only to itself."""

    auto = "auto"
    isolated = "isolated"
    padded = "padded"


class PeftMethod(Enum):
    """Which weights are trained: all of them, or low-rank adapters on a frozen (quantized) base."""

    full = "full"
    lora = "lora"
    qlora = "qlora"


class DpoLoss(Enum):
    """The loss of a pair, by TRL's names: those that are a mean over pairs."""

    sigmoid = "sigmoid"
    sigmoid_norm = "sigmoid_norm"
    hinge = "hinge"
    ipo = "ipo"
    robust = "robust"
    exo_pair = "exo_pair"
    nca_pair = "nca_pair"
    bco_pair = "bco_pair"
    sppo_hard = "sppo_hard"
    apo_zero = "apo_zero"
    apo_down = "apo_down"
    discopop = "discopop"


class OptimizerName(Enum):
    """The optimizers, by the name transformers uses for `optim`; `adamw` and `muon` are torch's."""

    adamw = "adamw"
    adamw_8bit = "adamw_8bit"
    paged_adamw_32bit = "paged_adamw_32bit"
    paged_adamw_8bit = "paged_adamw_8bit"
    adafactor = "adafactor"
    muon = "muon"


class ScheduleName(Enum):
    """The learning-rate curves, by the name transformers uses for `lr_scheduler_type`."""

    constant = "constant"
    constant_with_warmup = "constant_with_warmup"
    linear = "linear"
    cosine = "cosine"
    cosine_with_min_lr = "cosine_with_min_lr"


class LauncherName(Enum):
    """What starts the ranks."""

    local = "local"
    slurm = "slurm"
    ray = "ray"


class ContainerRuntime(Enum):
    """What runs a container on the nodes of a Slurm cluster."""

    pyxis = "pyxis"
    docker = "docker"


class TrackerName(Enum):
    """Where curves are sent in addition to `metrics.jsonl`."""

    none = "none"
    trackio = "trackio"
    tensorboard = "tensorboard"
    wandb = "wandb"


class Contamination(Enum):
    """Whether items of the evaluation are looked for in the training documents: see `evaluate.contamination`."""

    report = "report"  # count them
    disabled = "disabled"  # do not look


class ResumeAnyway(Enum):
    """What may differ between a checkpoint and the run that resumes from it, although it changes the result."""

    config = "config"
    data = "data"
    template = "template"
    world_size = "world_size"
    best = "best"  # its best checkpoint is missing: rank the remaining ones
