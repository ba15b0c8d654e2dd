"""Optional packages that a resolved configuration needs, and how to install them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from importlib import metadata

from tunebook.config.choices import Attention, Compute, Generation, PackingMode, PeftMethod, TrackerName
from tunebook.config.schema import RunConfig
from tunebook.errors import Problem
from tunebook.facts.architectures import has_attention, without_flash_attn
from tunebook.facts.attention import ATTENTIONS, INSTALLED, attention_facts
from tunebook.facts.generations import GENERATIONS, can_run
from tunebook.facts.optimizers import OPTIMIZERS
from tunebook.facts.strategies import strategy_facts
from tunebook.hardware.image import Image
from tunebook.train.image import train_line

VersionOf = Callable[[str], str | None]


def installed_version(distribution: str) -> str | None:
    """The version of an installed package, without importing it."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _needed(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Each package that a setting needs: its name, the setting's key, and the command that installs it."""
    if strategy_facts(config).is_zero:  # builds its operators on first use
        yield "deepspeed", "parallelism.strategy", "DS_BUILD_OPS=0 pip install deepspeed"
    if OPTIMIZERS[config.optimizer.name].package == "bitsandbytes":
        yield "bitsandbytes", "optimizer.name", "pip install bitsandbytes"
    if config.peft.method is PeftMethod.qlora:
        yield "bitsandbytes", "peft.method", "pip install bitsandbytes"
    if config.peft.method is not PeftMethod.full:
        yield "peft", "peft.method", "pip install peft"
    if config.model.liger_kernel:
        yield "liger-kernel", "model.liger_kernel", "pip install liger-kernel"
    if config.precision.compute is Compute.fp8:
        yield "torchao", "precision.compute", "pip install torchao"
    if config.evaluation.tasks:
        yield "lm_eval", "evaluation.tasks", "pip install lm-eval"
    if config.tracking.name is not TrackerName.none:
        yield config.tracking.name.name, "tracking.name", f"pip install {config.tracking.name.name}"


def missing_state_kernels(config: RunConfig, version_of: Callable[[str], object]) -> list[str]:
    """The packages that a model's layers need for packed rows on this hardware, and that `version_of` does not find."""
    facts = config.model.facts
    if facts is None or facts.measured is None or config.hardware.generation is Generation.cpu:
        return []
    return [package for package in facts.measured.packing_packages if not version_of(package)]


_FLA_CORE = "fla-core"
_ATTENTION_INSTALL = {  # flash-attn-3 is not in the registry: it is built from source
    "flash-attn": "pip install flash-attn --no-build-isolation",
    "flash-attn-4": "pip install flash-attn-4==4.0.0b36",  # pinned, because we call parts of it that are not public
}


def missing_packages(config: RunConfig, version_of: VersionOf, image: Image | None) -> Iterator[Problem]:
    """Report each package that is needed and for which `version_of` returns no version."""
    for package, key, install in _needed(config):
        if version_of(package) is None:
            message = f"the package {package} is not installed in this {'image' if image else 'environment'}"
            fix = install if image is None else _add_to(image, package)
            yield Problem(id="missing-package", key=key, message=message, fix=fix)
    if config.packing.mode is PackingMode.isolated:
        for kernels in missing_state_kernels(config, version_of):
            assert config.model.facts is not None
            message = f"{config.model.facts.architecture} keeps packed documents apart by {kernels}, not installed here"
            add = f"pip install {kernels}" if image is None else _add_to(image, kernels)
            fix = f"packing.mode=padded packing.row_length=null or {add}"
            yield Problem(id="missing-package", key="packing.mode", message=message, fix=fix)
    yield from _wrong_triton(config, version_of, image)
    kernel = config.attention.implementation
    kernels_package = ATTENTIONS[kernel].package
    if kernels_package is not None and version_of(kernels_package) is None:
        where = f"; this is the {image.generation} image" if image else ""
        message = f"{kernel.name} needs the package {kernels_package}, which is not installed{where}"
        instead = _attention_at_hand(config, version_of).name
        fix = " or ".join([f"attention.implementation={instead}", *_get_attention(config, kernels_package, image)])
        yield Problem(id="missing-package", key="attention.implementation", message=message, fix=fix)


def _wrong_triton(config: RunConfig, version_of: VersionOf, image: Image | None) -> Iterator[Problem]:
    """Report a Triton with which fla-core refuses its backward pass, in the first step (fla-core 0.6.0, its issue 640).

    transformers calls fla-core for padded rows, too, if it is installed.
    """
    facts, installed = config.model.facts, version_of("triton")
    if facts is None or facts.measured is None or config.hardware.generation is not Generation.hopper:
        return
    is_called = _FLA_CORE in facts.measured.packing_packages and version_of(_FLA_CORE) and not version_of("tilelang")
    numbers = [int(number) for number in re.findall(r"\d+", installed or "")[:3]]
    if is_called and [3, 4, 0] <= numbers < [3, 7, 1]:
        message = (
            f"{facts.architecture} is computed by {_FLA_CORE}, which refuses to train on a Hopper GPU with triton "
            f"3.4.0 to 3.7.0, whose gradients are wrong there; triton {installed} is installed"
        )
        fix = "pip install 'triton>=3.7.1'" if image is None else "make image, whose lock has triton 3.7.1"
        yield Problem(id="missing-package", key="model", message=message, fix=fix)


def _attention_at_hand(config: RunConfig, version_of: VersionOf) -> Attention:
    """What `attention=auto` would choose here; flash-attn 2 only if nothing calls for compiled blocks."""
    if config.model.compile_layers or attention_facts(config).needs_lengths:
        return without_flash_attn(config)
    flash, is_fp32 = INSTALLED, config.precision.compute is Compute.fp32
    can_run_it = can_run(flash, config.hardware.generation) and not is_fp32 and has_attention(config, flash)
    is_here = version_of(str(ATTENTIONS[flash].package)) is not None
    return flash if is_here and can_run_it else without_flash_attn(config)


def _get_attention(config: RunConfig, package: str, image: Image | None) -> Iterator[str]:
    if package not in _ATTENTION_INSTALL:
        return
    own = GENERATIONS[config.hardware.generation].image.name
    if image is None:
        yield _ATTENTION_INSTALL[package]
    else:
        yield train_line(config.recipe, own) if own != image.generation else _add_to(image, package)


def _add_to(image: Image, package: str) -> str:
    return f"add {package} to docker/{image.generation}/requirements.in, then make lock and make image"
