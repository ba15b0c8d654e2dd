"""Tables of GPU generations: what each can compute, which attention it can run, which image it uses.

All code that depends on the hardware reads these tables, so a new generation is one new entry, and one in `facts.peaks`
for the arithmetic peaks of its reference GPU.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tunebook.config.choices import Attention, Generation
from tunebook.facts.attention import ATTENTIONS

ComputeCapability = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class ImagePins:
    """The versions that a container image is built from; `make lock` writes them to docker/<name>/generation.env."""

    name: str  # its folder under docker/
    torch: str
    cuda: str | None  # None: a CPU build
    min_driver: int | None  # major version of the oldest NVIDIA driver that can run this CUDA
    older_driver_image: str | None = None  # the image for these GPUs when the driver is older than that
    torch_architectures: tuple[str, ...] = ()  # compute capabilities that torch must have been compiled for
    flash_attn_architectures: tuple[str, ...] = ()  # what flash-attn 2 is compiled for; empty: the image has none
    # Packages in its lock whose kernels keep packed documents apart in layers that carry a state along the row
    state_kernels: tuple[str, ...] = ()

    @property
    def attention(self) -> str:
        """The attention package that the build compiles."""
        return "flash-attn-2" if self.flash_attn_architectures else "none"


@dataclass(frozen=True, kw_only=True)
class GenerationFacts:
    """What a generation is and can do."""

    compute_capabilities: tuple[ComputeCapability, ...]
    reference_gpu: str  # its peaks are in `facts.peaks`, and stand for those of unlisted models
    usual_memory_gib: float | None  # of the reference GPU, as NVML reports it; None: the host's memory counts
    image: ImagePins
    has_bf16: bool = False
    has_tf32: bool = False
    has_fp8: bool = False

    @property
    def min_compute_capability(self) -> ComputeCapability | None:
        """The lowest compute capability, which decides what runs on every member; None on a CPU."""
        return min(self.compute_capabilities, default=None)


# Oldest drivers by CUDA's "minor version compatibility": 12.x runs on 525 and newer, 13.x on 580 and newer.
CPU_IMAGE = ImagePins(
    name="cpu",
    torch="2.13.0",
    cuda=None,  # torch's CPU build; if the registry has none, its CUDA build, which also runs on a CPU
    min_driver=None,
)
# torch 2.10.0 with CUDA 12.8 is the newest build that has sm_70; it also has sm_75 to sm_120, so it serves every
# generation on an older driver. It comes with cuDNN 9.10.2.21.
VOLTA_IMAGE = ImagePins(
    name="volta",
    torch="2.10.0",
    cuda="12.8",
    min_driver=525,
    torch_architectures=("7.0", "7.5"),
    # No flash-attn: it starts at 8.0, and the package registry has no nvcc for CUDA 12.
)
_STATE_KERNELS = ("fla-core",)
AMPERE_IMAGE = ImagePins(
    name="ampere",
    torch="2.13.0",
    cuda="13.0",
    min_driver=580,
    older_driver_image="volta",
    torch_architectures=("8.0", "8.6"),  # torch has no code for 8.9, which runs the code for 8.6
    flash_attn_architectures=("80",),  # kernels for sm_80 also serve 8.6 and 8.9; flash-attn has no flag for these
    state_kernels=_STATE_KERNELS,
)
HOPPER_IMAGE = ImagePins(
    name="hopper",
    torch="2.13.0",
    cuda="13.0",
    min_driver=580,
    older_driver_image="volta",
    torch_architectures=("9.0",),
    flash_attn_architectures=("90",),  # by default flash-attn would compile for four
    state_kernels=_STATE_KERNELS,
)
BLACKWELL_IMAGE = ImagePins(
    name="blackwell",
    torch="2.13.0",
    cuda="13.0",
    min_driver=580,
    older_driver_image="volta",
    torch_architectures=("10.0", "12.0"),  # code for one major version does not run on the other
    flash_attn_architectures=("100", "120"),
    state_kernels=_STATE_KERNELS,
)

GENERATIONS: dict[Generation, GenerationFacts] = {
    Generation.cpu: GenerationFacts(
        compute_capabilities=(),
        reference_gpu="CPU",
        usual_memory_gib=None,
        image=CPU_IMAGE,  # torch computes bf16 on a CPU, but slower than fp32 on most
    ),
    Generation.volta: GenerationFacts(
        compute_capabilities=((7, 0),),
        reference_gpu="V100-SXM2-32GB",
        usual_memory_gib=32.0,
        image=VOLTA_IMAGE,
    ),
    Generation.turing: GenerationFacts(
        compute_capabilities=((7, 5),),
        reference_gpu="T4",
        usual_memory_gib=15.0,  # 16 GB minus the share used for error correction
        image=VOLTA_IMAGE,
    ),
    Generation.ampere: GenerationFacts(
        compute_capabilities=((8, 0), (8, 6)),
        reference_gpu="A100-SXM4-80GB",
        usual_memory_gib=80.0,
        has_bf16=True,
        has_tf32=True,
        image=AMPERE_IMAGE,
    ),
    Generation.ada: GenerationFacts(
        compute_capabilities=((8, 9),),
        reference_gpu="GeForce RTX 4090",
        usual_memory_gib=24.0,
        has_bf16=True,
        has_tf32=True,
        has_fp8=True,
        image=AMPERE_IMAGE,
    ),
    Generation.hopper: GenerationFacts(
        compute_capabilities=((9, 0),),
        reference_gpu="H100-SXM5-80GB",
        usual_memory_gib=79.6,
        has_bf16=True,
        has_tf32=True,
        has_fp8=True,
        image=HOPPER_IMAGE,
    ),
    Generation.blackwell: GenerationFacts(
        compute_capabilities=((10, 0), (12, 0)),
        reference_gpu="B200",
        usual_memory_gib=179.0,
        has_bf16=True,
        has_tf32=True,
        has_fp8=True,
        image=BLACKWELL_IMAGE,
    ),
}

OLDEST_SUPPORTED: ComputeCapability = (7, 0)


def capability_text(capability: ComputeCapability) -> str:
    """A compute capability as NVIDIA writes it, such as `8.6`."""
    return f"{capability[0]}.{capability[1]}"


def generation_of(capability: ComputeCapability) -> Generation:
    """The generation of a GPU. An unlisted one counts as the newest listed generation that is not newer than it."""
    known = {member: name for name, facts in GENERATIONS.items() for member in facts.compute_capabilities}
    not_newer = [member for member in known if member <= capability]
    return known[max(not_newer, default=min(known))]


def can_run(attention: Attention, generation: Generation) -> bool:
    """Whether every GPU of a generation meets an attention kernel's requirements; torch's own run everywhere."""
    needed = ATTENTIONS[attention].oldest
    oldest = GENERATIONS[generation].min_compute_capability
    return needed is None or (oldest is not None and oldest >= needed)


def driver_major(driver: str) -> int | None:
    """The major version of an NVIDIA driver such as `535.104.05`; None if it cannot be parsed."""
    match = re.match(r"(\d+)\.", driver.strip() + ".")
    return int(match.group(1)) if match else None


def image_for_driver(generation: Generation, driver: str | None) -> ImagePins | None:
    """The image of a generation that runs on a driver: its own, or else the one built on CUDA 12.8, or else None.

    An unreadable or unknown driver gets the generation's own image.
    """
    own = GENERATIONS[generation].image
    major = driver_major(driver) if driver is not None else None
    if own.min_driver is None or major is None:
        return own
    return next((image for image in (own, VOLTA_IMAGE) if image.min_driver and major >= image.min_driver), None)
