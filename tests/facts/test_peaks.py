"""What a utilization is divided by."""

import pytest

from tunebook.config.choices import Compute, Generation
from tunebook.facts.generations import GENERATIONS
from tunebook.facts.peaks import peak_of


@pytest.mark.parametrize(
    ("name", "generation", "compute", "uses_tf32", "tflops"),
    [
        ("NVIDIA H200", Generation.hopper, Compute.bf16, True, 989.0),
        ("NVIDIA H200", Generation.hopper, Compute.fp32, True, 494.7),
        ("NVIDIA L4", Generation.ada, Compute.bf16, True, 121.0),
        ("Tesla V100-PCIE-16GB", Generation.volta, Compute.fp32, False, 14.0),
    ],
)
def test_known_models_have_their_own_peak(name, generation, compute, uses_tf32, tflops):
    peak = peak_of(generation, compute, gpu_name=name, uses_tf32=uses_tf32)
    assert peak is not None
    assert (peak.tflops, peak.gpu) == (tflops, name)


def test_an_unlisted_model_borrows_its_generations_peak_and_says_whose():
    peak = peak_of(Generation.ampere, Compute.bf16, gpu_name="NVIDIA RTX A2000", uses_tf32=True)
    assert peak is not None
    assert (peak.tflops, peak.gpu) == (312.0, "A100-SXM4-80GB")


@pytest.mark.parametrize("generation", [name for name in GENERATIONS if name is not Generation.cpu])
def test_the_reference_gpu_has_a_peak_in_each_format_of_its_generation(generation):
    facts = GENERATIONS[generation]

    has_peak = {Compute.fp32: True, Compute.fp16: True, Compute.bf16: facts.has_bf16, Compute.fp8: facts.has_fp8}
    for compute, is_known in has_peak.items():
        assert (peak_of(generation, compute, gpu_name=None, uses_tf32=False) is not None) is is_known


@pytest.mark.parametrize(
    ("generation", "compute", "name"),
    [
        (Generation.cpu, Compute.fp32, None),
        (Generation.volta, Compute.bf16, None),
        (Generation.ampere, Compute.fp8, "NVIDIA A100-SXM4-80GB"),
        (Generation.hopper, Compute.bf16, "NVIDIA H100 80GB HBM3 MIG 1g.10gb"),
    ],
)
def test_no_peak_is_better_than_a_wrong_one(generation, compute, name):
    assert peak_of(generation, compute, gpu_name=name, uses_tf32=False) is None
