"""What differs between two runs' settings, inputs, machines and packages: a dotted key with both values."""

from __future__ import annotations

import re
from typing import Any

from tunebook.config.identity import changed_settings, flat_differences
from tunebook.errors import RequestError, first_few
from tunebook.evidence.schema import Hardware, Inputs, Software

Difference = tuple[str, Any, Any]  # the key, the value of the first (recorded) and that of the other run

# How a step is split over GPUs and memory, and which kernels compute it. Tests prove that the loss does not depend on
# them.
_SPLITS = (
    "training.micro_batch_size", "packing.row_length", "activation", "parallelism", "attention.implementation",
    "model.compile_layers", "model.one_pass_head", "evaluation.batch_size",
)  # fmt: skip
_PLANNED_BY = ("dataset.mean_tokens", "dataset.num_documents")  # stated sizes, which only a plan reads
# Paths whose content is compared instead, if its hash is known of both runs.
_PLACES = {
    "data_sha256": re.compile(r"dataset\.(path|validation_path|parts\.[^.]+\.path)"),
    "tokenizer_sha256": re.compile(r"model\.tokenizer"),
    "chat_template_sha256": re.compile(r"model\.chat_template"),
    "weights_fingerprint": re.compile(r"model\.path"),
}
_NUM_NAMED = 4  # differing keys that a message lists


def named(differing: list[Difference]) -> str:
    """The first few differing keys with both values, and the number of the others."""
    return first_few([f"{key} is {two}, recorded with {one}" for key, one, two in differing], _NUM_NAMED, "; ")


def config_differences(one: dict[str, Any], other: dict[str, Any]) -> list[Difference]:
    """The differences of two comparable configurations, except how a step is split and what only a plan reads."""
    return [found for found in changed_settings(one, other) if not _is_split(found[0]) and found[0] not in _PLANNED_BY]


def input_differences(one: Inputs, other: Inputs) -> list[Difference]:
    """The differences of two runs' configurations, models and data.

    Data is equal if its tokens and labels are, however it was prepared. Weights from a folder are compared only if both
    fingerprints are known: older evidence has none.
    """
    hashes, others = (inputs.model_dump(exclude={"config", "data_fingerprint"}) for inputs in (one, other))
    if None in (one.weights_fingerprint, other.weights_fingerprint):
        del hashes["weights_fingerprint"], others["weights_fingerprint"]
    known = [place for name, place in _PLACES.items() if None not in (getattr(one, name), getattr(other, name))]
    settings = config_differences(one.config, other.config)
    moved = [found for found in settings if any(place.fullmatch(found[0]) for place in known)]
    return [*(found for found in settings if found not in moved), *flat_differences(hashes, others)]


def require_same_inputs(one: Inputs, other: Inputs, message: str) -> None:
    """Raises: RequestError with the message and what differs, if something does."""
    if differing := input_differences(one, other):
        raise RequestError(f"{message}: {named(differing)}", problem_id="evidence-of-other-config")


def split_differences(one: Inputs, other: Inputs) -> list[Difference]:
    """The differences in how a step was split and computed. They change speed and memory but not the loss."""
    differing = changed_settings(one.config, other.config)
    return [found for found in differing if _is_split(found[0]) and not found[0].startswith("evaluation")]


def hardware_differences(one: Hardware, other: Hardware) -> list[Difference]:
    """The differences that change speed and memory, and on a CPU the order of sums."""
    is_on_cpu = one.gpu is None and other.gpu is None
    keys = {"gpus", "cpus", "processor"} if is_on_cpu else {"gpu", "gpus", "nodes"}
    return flat_differences(one.model_dump(include=keys), other.model_dump(include=keys), "hardware")


def package_differences(one: Software, other: Software) -> list[Difference]:
    """The packages that differ, of those that can change a loss, the speed or the memory."""
    return flat_differences(one.packages, other.packages, "packages")


def _is_split(key: str) -> bool:
    return any(key == split or key.startswith(f"{split}.") for split in _SPLITS)
