"""The activations of a run: which fake step stands for it, and what was found of such steps before.

A step is run once for each way of computing, number of rows and length; the answers are kept in the cache folder.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tunebook.config.choices import Checkpointing, Compute, PackingMode, PeftMethod
from tunebook.config.schema import RunConfig, data_ranks, world_size
from tunebook.data.batch import PADDED_TOKENS_PER_PASS, largest_micro_batch, longest_side, shortest_row
from tunebook.facts.attention import attention_facts
from tunebook.facts.methods import method_facts
from tunebook.facts.strategies import strategy_facts
from tunebook.model.base_config import config_file
from tunebook.model.parameters import compute_dtype
from tunebook.parallel import deepspeed, fsdp
from tunebook.plan.answers import answered
from tunebook.plan.images import PlannedImages, planned_images
from tunebook.plan.memory.ledger import Moment
from tunebook.plan.memory.states import bytes_per_weight, offloads_parameters

if TYPE_CHECKING:
    from tunebook.plan.memory.fake_step import FakeStep

_FORMATS = {2: "bfloat16", 4: "float32"}  # by bytes
# Names of `attn_implementation`, by what a kernel gets: the boundaries of documents, or a mask.
BY_LENGTHS, BY_MASK = "tunebook_fake_lengths", "tunebook_fake_mask"


@dataclass(frozen=True, kw_only=True)
class Mode:
    """How a step computes. The run's configuration says the rest: the model and its adapters."""

    weights: str  # number format in which the layers see them: FSDP's gathered format
    adapters: str  # number format of trained weights of adapters
    autocast: bool
    attention: str  # BY_LENGTHS, BY_MASK or eager
    repeats_heads: bool = False
    keeps_documents: bool = False
    quantized: bool = False
    recomputed: bool = False
    memory_budget: float = 1.0  # of compiled blocks, 0 to 1
    compiled: bool = False
    offloaded: bool = False
    tile_tokens: int | None = None
    group_size: int = 1  # ranks that share a row
    one_pass_head: bool = True
    accumulates: bool = False  # gradients of earlier passes exist
    gradients: str = "held"  # until the step; "sent" one by one as they come (ZeRO), "unit" layer by layer (FSDP)
    zero3_linear: bool = False
    fp32_between_layers: bool = False  # FSDP's output_dtype
    liger: bool = False
    fp8: bool = False


# Fields that do not change how the layers are built and compiled.
RUN_TIME = ("one_pass_head", "accumulates", "gradients", "zero3_linear", "fp32_between_layers", "memory_budget")


@dataclass(frozen=True)
class Bytes:
    """Bytes at one moment."""

    live: float = 0.0  # all but parameters
    gradients: float = 0.0  # those of `live` that are gradients of parameters and stay until the optimizer step

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(self.live + other.live, self.gradients + other.gradients)

    def __sub__(self, other: Bytes) -> Bytes:
        return Bytes(self.live - other.live, self.gradients - other.gradients)


@dataclass(frozen=True)
class Activations:
    """What a step of all layers holds on the GPU at each moment, and what it offloads to the host."""

    at: dict[Moment, Bytes]
    offloaded: float


@dataclass(frozen=True, kw_only=True)
class ImageCost:
    """What one image takes."""

    tokens: int  # of a document
    features: int  # those of them in whose place the model puts what the tower for images computes
    flops: float  # of the tower's forward pass


def activations_of(config: RunConfig, *, accumulates: bool) -> Activations:
    """Run the step of a resolved configuration, or take what was found before."""
    mode, shape = mode_of(config, accumulates=accumulates), shape_of(config)
    images, number = planned_images(config), images_of_a_pass(config)

    def run() -> dict[str, Any]:
        pixels = images.inputs(number, compute_dtype(config)) if images is not None and number else {}
        features = number * image_cost(config, images).features if images is not None and number else 0
        found = _fake_step(config, mode, shape).run(mode, *shape, pixels, features)
        return {
            "at": {moment.name: [each.live, each.gradients] for moment, each in found.at.items()},
            "offloaded": found.offloaded,
        }

    notice = "estimating activations from a step of a few layers, once for each configuration"
    of_images = [images.size, images.processor] if images is not None and number else None
    found = answered("steps", [_built(config, mode), asdict(mode), shape, of_images, number], run, notice)
    moments = {Moment[name]: Bytes(*numbers) for name, numbers in found["at"].items()}
    return Activations(at=moments, offloaded=found["offloaded"])


def image_cost(config: RunConfig, images: PlannedImages) -> ImageCost:
    """What an image takes, by running the tower on it, or what was found before.

    The model's processor writes further tokens, if it is at hand.
    """
    mode, shape = mode_of(config, accumulates=False), shape_of(config)

    def run() -> dict[str, Any]:
        features, flops = _fake_step(config, mode, shape).run_tower(images.inputs(1, compute_dtype(config)))
        return {"tokens": images.tokens(config) or features, "features": features, "flops": flops}

    model = _built(config, mode)
    question = [model["facts"], model["config"], images.size, images.processor, images.folder]
    return ImageCost(**answered("images", question, run, "running the tower for images, once for each size of image"))


def images_of_a_pass(config: RunConfig) -> int:
    """Images in one rank's pass: those of each document that its row holds. Packed rows count as full of images."""
    images, (rows, tokens) = planned_images(config), shape_of(config)
    if images is None:
        return 0
    in_a_row = tokens // image_cost(config, images).tokens
    is_padded = config.packing.mode is PackingMode.padded
    return rows * min(in_a_row, images.number) if is_padded else in_a_row


_MOST_STEPS = 8  # that are kept in memory
_steps: dict[str, FakeStep] = {}  # by what they were built for


def _fake_step(config: RunConfig, mode: Mode, shape: tuple[int, int]) -> FakeStep:
    from tunebook.plan.memory.fake_step import FakeStep

    # A budget is a share of all that a block keeps. If casts of weights are part of that, it depends on the row length
    # with which a block is compiled.
    casts_weights = mode.autocast and mode.weights != "bfloat16"
    compiled_with = shape if mode.memory_budget < 1 and casts_weights else None
    key = json.dumps([_built(config, mode), compiled_with], sort_keys=True, default=str)
    if key not in _steps:
        if len(_steps) == _MOST_STEPS:
            _steps.clear()
        _steps[key] = FakeStep(config, architecture_of(config), mode)
    return _steps[key]


def _built(config: RunConfig, mode: Mode) -> dict[str, Any]:
    """What the layers of a step are built for."""
    model = config.model
    stated = asdict(model.facts) if model.facts is not None else {}
    stated.pop("measured", None)
    file = config_file(model)
    return {
        "facts": stated,
        "train": [part.name for part in model.train],
        "config": file.read_text(encoding="utf-8") if file is not None and file.is_file() else None,
        "peft": asdict(config.peft) if config.peft.method is not PeftMethod.full else None,
        "fp8_scaling": config.precision.fp8_scaling.name if mode.fp8 else None,
        "mode": {name: value for name, value in asdict(mode).items() if name not in RUN_TIME},
    }


def architecture_of(config: RunConfig) -> Any:
    """The run's transformers config, by its config.json or else its facts."""
    from transformers import AutoConfig

    from tunebook.model.load import planned_architecture

    model = config.model
    file = config_file(model)
    if file is None or not file.is_file():
        return planned_architecture(model)
    stated = AutoConfig.from_pretrained(file.parent, trust_remote_code=model.trust_remote_code)
    num_layers = stated.get_text_config(decoder=True).num_hidden_layers
    is_shortened = model.facts is not None and model.facts.num_layers != num_layers
    return planned_architecture(model) if is_shortened else stated


def shape_of(config: RunConfig) -> tuple[int, int]:
    """Rows and tokens of one rank's pass with full rows. Packed rows are concatenated into one.

    An unset micro batch of padded rows counts as the largest that may be chosen.
    """
    rows, length = config.training.micro_batch_size, config.packing.row_length
    if config.packing.mode is PackingMode.padded:
        documents, side = rows or _padded_rows(config), longest_side(config)
        return documents * method_facts(config).rows_per_document, min(length or side, side)
    return 1, math.ceil((rows or 1) * (length or shortest_row(config)) / config.parallelism.sequence_group_size)


def _padded_rows(config: RunConfig) -> int:
    samples, ranks = config.training.global_samples, data_ranks(config)
    length = shortest_row(config)
    if samples is None or samples < ranks:
        return max(1, PADDED_TOKENS_PER_PASS // max(1, length))
    return largest_micro_batch(samples // ranks, length)


def is_recomputed(config: RunConfig) -> bool:
    """Whether activation checkpointing recomputes whole layers."""
    return config.activation.checkpointing is Checkpointing.enabled


def mode_of(config: RunConfig, *, accumulates: bool) -> Mode:
    """How the layers of a resolved run compute."""
    strategy, kernel, budget = strategy_facts(config), attention_facts(config), config.activation.memory_budget
    is_16_bit = config.precision.compute is not Compute.fp32
    is_full, is_qlora = config.peft.method is PeftMethod.full, config.peft.method is PeftMethod.qlora
    stored = _FORMATS[bytes_per_weight(config)]
    weights = "bfloat16" if strategy.is_fsdp and is_16_bit else stored
    adapters = weights if strategy.is_fsdp else stored if strategy.is_zero else "float32"
    attention = "eager" if kernel.keeps_softmax else BY_MASK if kernel.mask_bytes != 0 else BY_LENGTHS
    tile, (rows, tokens) = config.activation.mlp_tile_tokens, shape_of(config)
    return Mode(
        weights=weights,
        adapters=stored if is_full else adapters,
        autocast=is_16_bit and (strategy.is_copied or fsdp.uses_autocast(config) or deepspeed.uses_autocast(config)),
        attention=attention,
        repeats_heads=kernel.repeats_heads,
        keeps_documents=kernel.keeps_documents,
        quantized=is_qlora,
        recomputed=is_recomputed(config),
        memory_budget=1.0 if budget is None else budget,
        compiled=bool(config.model.compile_layers),
        offloaded=bool(config.activation.offload),
        tile_tokens=tile if tile is not None and rows * tokens > tile else None,
        group_size=config.parallelism.sequence_group_size,
        one_pass_head=bool(config.model.one_pass_head),
        accumulates=accumulates and not strategy.divides_gradients,
        gradients="unit" if strategy.is_fsdp else "sent" if strategy.zero_stage in (2, 3) else "held",
        # A single rank that fetches its parameters from the host held no more than with PyTorch's function: measured.
        zero3_linear=strategy.is_zero3 and (world_size(config) > 1 or not offloads_parameters(config)),
        fp32_between_layers=strategy.is_fsdp and fsdp.uses_autocast(config),
        liger=config.model.liger_kernel,
        fp8=config.precision.compute is Compute.fp8,
    )
