"""The arithmetic peak for computing a GPU's utilization: its model's, or else that of its generation's reference GPU.

All numbers are dense (NVIDIA's "with sparsity" figures halved), in TFLOP/s, with fp32 accumulation, as training uses
them. A wrong peak makes a utilization meaningless, so the result names the GPU that the peak belongs to.
"""

from __future__ import annotations

from dataclasses import dataclass

from tunebook.config.choices import Compute, Generation
from tunebook.facts.generations import GENERATIONS


@dataclass(frozen=True, kw_only=True)
class Peak:
    """A peak in dense TFLOP/s, and the GPU model that has it."""

    tflops: float
    gpu: str  # the generation's reference GPU stands in for an unlisted model


@dataclass(frozen=True, kw_only=True)
class _Model:
    name: tuple[str, ...]  # all must be in NVML's name of the GPU
    fp32: float
    tf32: float | None = None
    half: float | None = None  # bf16 and fp16
    fp8: float | None = None


# The first match wins, so specific models come before general ones. Sources: each model's datasheet or whitepaper; for
# Ada appendix A of the architecture's, for B200 an eighth of the HGX board.
_MODELS: tuple[_Model, ...] = (
    _Model(name=("V100", "PCIE"), fp32=14.0, half=112.0),
    _Model(name=("V100",), fp32=15.7, half=125.0),
    _Model(name=("T4",), fp32=8.1, half=65.0),
    _Model(name=("A100",), fp32=19.5, tf32=156.0, half=312.0),
    _Model(name=("A800",), fp32=19.5, tf32=156.0, half=312.0),
    _Model(name=("A6000",), fp32=38.7, tf32=77.4, half=154.8),
    _Model(name=("A40",), fp32=37.4, tf32=74.8, half=149.7),
    _Model(name=("A30",), fp32=10.3, tf32=82.0, half=165.0),
    _Model(name=("A10G",), fp32=35.0, tf32=35.0, half=70.0),
    _Model(name=("A10",), fp32=31.2, tf32=62.5, half=125.0),
    _Model(name=("3090", "Ti"), fp32=40.0, tf32=40.0, half=80.0),
    _Model(name=("3090",), fp32=35.6, tf32=35.6, half=71.0),
    _Model(name=("RTX 6000 Ada",), fp32=91.1, tf32=182.1, half=364.2, fp8=728.5),
    _Model(name=("L40S",), fp32=91.6, tf32=183.0, half=362.0, fp8=733.0),
    _Model(name=("L40",), fp32=90.5, tf32=90.5, half=181.0, fp8=362.0),
    _Model(name=("L4",), fp32=30.3, tf32=60.0, half=121.0, fp8=242.5),
    _Model(name=("4090",), fp32=82.6, tf32=82.6, half=165.2, fp8=330.3),
    _Model(name=("H20",), fp32=44.0, tf32=74.0, half=148.0, fp8=296.0),
    _Model(name=("H100", "PCIe"), fp32=51.0, tf32=378.0, half=756.0, fp8=1513.0),
    _Model(name=("H100", "NVL"), fp32=60.0, tf32=417.5, half=835.0, fp8=1671.0),
    _Model(name=("H200", "NVL"), fp32=60.0, tf32=417.5, half=835.0, fp8=1671.0),
    _Model(name=("H100",), fp32=67.0, tf32=494.7, half=989.0, fp8=1979.0),
    _Model(name=("H200",), fp32=67.0, tf32=494.7, half=989.0, fp8=1979.0),
    _Model(name=("GH200",), fp32=67.0, tf32=494.7, half=989.0, fp8=1979.0),
    _Model(name=("B200",), fp32=75.0, tf32=1125.0, half=2250.0, fp8=4500.0),
    _Model(name=("5090",), fp32=104.8, tf32=104.8, half=209.5, fp8=419.0),
)


def _has_word(name: str, word: str) -> bool:
    """Whether `name` contains `word` without a letter or digit on either side, so that L4 does not match L40."""
    return f" {word.lower()} " in f" {name.lower().replace('-', ' ')} "


def _model_of(name: str) -> _Model | None:
    return next((model for model in _MODELS if all(_has_word(name, word) for word in model.name)), None)


def peak_of(generation: Generation, compute: Compute, *, gpu_name: str | None, uses_tf32: bool) -> Peak | None:
    """The peak of a GPU in a number format; None if there is none (a CPU, an unsupported format, a MIG slice).

    `gpu_name` is NVML's name; None means the generation's reference GPU.
    """
    facts = GENERATIONS[generation]
    name = gpu_name or facts.reference_gpu
    if _has_word(name, "MIG"):
        return None  # its name does not give the exact share of the GPU that a slice has
    model = _model_of(name)
    if model is None:
        name, model = facts.reference_gpu, _model_of(facts.reference_gpu)
    if model is None or (compute is Compute.bf16 and not facts.has_bf16):
        return None
    fp32 = (model.tf32 or model.fp32) if uses_tf32 else model.fp32
    tflops = {Compute.fp32: fp32, Compute.fp8: model.fp8}.get(compute, model.half)
    return None if tflops is None else Peak(tflops=tflops, gpu=name)
