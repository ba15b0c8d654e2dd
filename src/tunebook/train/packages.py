"""Optional packages that a resolved configuration needs, and how to install them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata

from tunebook.config.choices import Attention, Compute, Generation, PackingMode, PeftMethod, TrackerName
from tunebook.config.schema import RunConfig
from tunebook.errors import Problem
from tunebook.facts.architectures import without_flash_attn
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


@dataclass(frozen=True, kw_only=True)
class _Need:
    """A package that a setting needs: the setting's key, the condition, and the install command."""

    package: str
    key: str
    is_needed: Callable[[RunConfig], bool]
    install: str


def _tracks_with(name: TrackerName) -> Callable[[RunConfig], bool]:
    return lambda config: config.tracking.name is name


_NEEDS: tuple[_Need, ...] = (
    _Need(
        package="deepspeed",
        key="parallelism.strategy",
        is_needed=lambda config: strategy_facts(config).is_zero,
        install="DS_BUILD_OPS=0 pip install deepspeed",  # builds its operators on first use
    ),
    _Need(
        package="bitsandbytes",
        key="optimizer.name",
        is_needed=lambda config: OPTIMIZERS[config.optimizer.name].package == "bitsandbytes",
        install="pip install bitsandbytes",
    ),
    _Need(
        package="bitsandbytes",
        key="peft.method",
        is_needed=lambda config: config.peft.method is PeftMethod.qlora,
        install="pip install bitsandbytes",
    ),
    _Need(
        package="peft",
        key="peft.method",
        is_needed=lambda config: config.peft.method is not PeftMethod.full,
        install="pip install peft",
    ),
    _Need(
        package="liger-kernel",
        key="model.liger_kernel",
        is_needed=lambda config: config.model.liger_kernel,
        install="pip install liger-kernel",
    ),
    _Need(
        package="torchao",
        key="precision.compute",
        is_needed=lambda config: config.precision.compute is Compute.fp8,
        install="pip install torchao",
    ),
    _Need(
        package="lm_eval",
        key="evaluation.tasks",
        is_needed=lambda config: bool(config.evaluation.tasks),
        install="pip install lm-eval",
    ),
    *(
        _Need(package=name.name, key="tracking.name", is_needed=_tracks_with(name), install=f"pip install {name.name}")
        for name in (TrackerName.trackio, TrackerName.tensorboard, TrackerName.wandb)
    ),
)


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
    for need in _NEEDS:
        if need.is_needed(config) and version_of(need.package) is None:
            message = f"the package {need.package} is not installed in this {'image' if image else 'environment'}"
            fix = need.install if image is None else _add_to(image, need.package)
            yield Problem(id="missing-package", key=need.key, message=message, fix=fix)
    if config.packing.mode is PackingMode.isolated:
        for kernels in missing_state_kernels(config, version_of):
            assert config.model.facts is not None
            message = f"{config.model.facts.architecture} keeps packed documents apart by {kernels}, not installed here"
            add = f"pip install {kernels}" if image is None else _add_to(image, kernels)
            fix = f"packing.mode=padded packing.row_length=null or {add}"
            yield Problem(id="missing-package", key="packing.mode", message=message, fix=fix)
    kernel = config.attention.implementation
    package = ATTENTIONS[kernel].package
    if package is not None and version_of(package) is None:
        where = f"; this is the {image.generation} image" if image else ""
        message = f"{kernel.name} needs the package {package}, which is not installed{where}"
        instead = _attention_at_hand(config, version_of).name
        fix = " or ".join([f"attention.implementation={instead}", *_get_attention(config, package, image)])
        yield Problem(id="missing-package", key="attention.implementation", message=message, fix=fix)


def _attention_at_hand(config: RunConfig, version_of: VersionOf) -> Attention:
    """What `attention=auto` would choose here; flash-attn 2 only if nothing calls for compiled blocks."""
    if config.model.compile_layers or attention_facts(config).needs_lengths:
        return without_flash_attn(config)
    flash, is_fp32 = INSTALLED, config.precision.compute is Compute.fp32
    can_run_it = can_run(flash, config.hardware.generation) and not is_fp32
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
