"""Optional packages that a resolved configuration needs, and how to install them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import metadata

from tunebook.config.choices import Compute, Generation, PackingMode, PeftMethod, TrackerName
from tunebook.config.schema import RunConfig
from tunebook.errors import Problem
from tunebook.facts.attention import ATTENTIONS
from tunebook.facts.optimizers import OPTIMIZERS
from tunebook.facts.strategies import strategy_facts
from tunebook.hardware.image import Image

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
    kernel = config.attention.implementation
    kernels_package = ATTENTIONS[kernel].package
    if kernels_package is not None and version_of(kernels_package) is None:
        where = f"; this is the {image.generation} image" if image else ""
        message = f"{kernel.name} needs the package {kernels_package}, which is not installed{where}"
        fix = "attention=auto"
        if image is None and kernels_package in _ATTENTION_INSTALL:
            fix += f" or {_ATTENTION_INSTALL[kernels_package]}"
        yield Problem(id="missing-package", key="attention.implementation", message=message, fix=fix)


def _add_to(image: Image, package: str) -> str:
    return f"add {package} to docker/{image.generation}/requirements.in, then make lock and make image"
