"""The tie of a trained model to what it was trained with: tokenizer, chat template, system prompt, an adapter's base.

The manifest of a run, or the record in an exported folder, holds the hashes. A difference is an error, unless it is
named; then it is recorded beside the scores.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebook.config.book import resolve_path
from tunebook.config.schema import ModelConfig
from tunebook.data.template import template_hash
from tunebook.errors import DataError, RequestError, did_you_mean
from tunebook.model.tokenizer import tokenizer_hash
from tunebook.model.weights_fingerprint import told, weights_fingerprint
from tunebook.record.manifest import MANIFEST_FILE, read_manifest, recorded_fingerprint, system_prompt_hash
from tunebook.record.origin import Origin, read_origin

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# What may differ from the training where `--allow-mismatch` names it.
TEMPLATE, TOKENIZER, SYSTEM_PROMPT, BASE = "template", "tokenizer", "system_prompt", "base"
MISMATCHES = (TEMPLATE, TOKENIZER, SYSTEM_PROMPT, BASE)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a training recorded of what its model needs. A hash of None was not recorded: nothing is compared."""

    by: str  # the run as messages call it
    name: str  # and as records do: `<recipe>/<time>`
    tokenizer_sha256: str | None = None
    chat_template_sha256: str | None = None
    system_prompt_sha256: str | None = None
    weights_fingerprint: str | None = None  # of the weights that it started from, where they lay in a folder


def recorded_by_run(run: Path) -> Trained | None:
    """What a run's manifest says; None without a manifest. Raises: DataError for one that cannot be read."""
    if not (run / MANIFEST_FILE).is_file():
        return None
    manifest = read_manifest(run)
    return Trained(
        by=str(run),
        name=f"{run.parent.name}/{run.name}",
        tokenizer_sha256=manifest.get("tokenizer_sha256"),
        chat_template_sha256=manifest.get("chat_template_sha256"),
        system_prompt_sha256=manifest.get("system_prompt_sha256"),
        weights_fingerprint=recorded_fingerprint(manifest),
    )


def recorded_beside(folder: Path | None) -> Trained | None:
    """What an exported model folder says of its run; None for a folder that says nothing, or no folder."""
    origin = None if folder is None else read_origin(folder)
    return None if origin is None else recorded_by_origin(origin)


def recorded_by_origin(origin: Origin) -> Trained:
    """What an exported folder says of its run."""
    return Trained(
        by=f"the run {origin.run}",
        name=origin.run,
        tokenizer_sha256=origin.tokenizer_sha256,
        chat_template_sha256=origin.chat_template_sha256,
        system_prompt_sha256=system_prompt_hash(origin.system_prompt),
        weights_fingerprint=origin.weights_fingerprint,
    )


def check_bound(
    trained: Trained | None,
    tokenizer: PreTrainedTokenizerBase,
    system_prompt: str | None,
    allowed: Collection[str] = (),
) -> dict[str, Any]:
    """Refuse another template, tokenizer or system prompt than was trained with, unless it is in `allowed`.

    Returns what an evaluation's record says of it: whether there was a training to compare with, which differences
    were `allowed` and are there, and the hashes as they are now. Raises: DataError for the first other difference.
    """
    different = [] if trained is None else _differences(trained, tokenizer, system_prompt)
    refused = next((mismatch for mismatch in different if mismatch not in allowed), None)
    if refused is not None:
        assert trained is not None
        raise _different(refused, trained.by, str(tokenizer.name_or_path))
    # The trainer gives a padding token to a tokenizer that has none, which is no difference.
    is_same = trained is not None and trained.tokenizer_sha256 is not None and TOKENIZER not in different
    return {
        "to": None if trained is None else trained.name,
        "mismatches": different,
        "tokenizer_sha256": trained.tokenizer_sha256 if trained and is_same else tokenizer_hash(tokenizer),
        "chat_template_sha256": template_hash(tokenizer),
        "system_prompt_sha256": system_prompt_hash(system_prompt),
    }


def uncompared_base(trained: Trained | None, model: ModelConfig) -> str | None:
    """Why the base as it is configured cannot be compared with the one that was trained on; None where it can be.

    None too where nothing was recorded of it.
    """
    if trained is None or trained.weights_fingerprint is None or model.path is not None:
        return None
    return (
        f"the base model {model.name} is named on the hub and {trained.by} started from a folder, so they were not "
        "compared"
    )


def check_base(
    trained: Trained | None,
    model: ModelConfig,
    allowed: Collection[str] = (),
    *,
    way_out: str = f"`tunebook eval` goes on and records it with --allow-mismatch {BASE}",
) -> list[str]:
    """Refuse other weights below an adapter than it was trained on; `model` is the base as it is configured.

    One that is named on the hub is not compared, since only weights in a folder have a fingerprint: `uncompared_base`
    says so where somebody reads it. `way_out` is what can be typed all the same. Returns the mismatches to record:
    none, or that one where it is `allowed`. Raises: DataError for another base, RequestError for one that cannot be
    read.
    """
    if trained is None or trained.weights_fingerprint is None or model.path is None:
        return []
    now = weights_fingerprint(model)
    if now == trained.weights_fingerprint:
        return []
    if BASE in allowed:
        return [BASE]
    raise DataError(
        f"the base model is not the one that {trained.by} was trained on: the weights of {resolve_path(model.path)} "
        f"{told(now)}, and the run started from {trained.weights_fingerprint[:12]}...; put those weights back, since "
        f"an adapter changes the answers of its own base only, or train again on these ({way_out})",
        problem_id="base-changed",
    )


def allowed_mismatches(text: str) -> list[str]:
    """What `--allow-mismatch template,tokenizer` names. Raises: RequestError for anything else, with the nearest."""
    named = [word.strip() for word in text.split(",") if word.strip()]
    for word in named:
        if word not in MISMATCHES:
            raise RequestError(
                f"--allow-mismatch {text}: there is no '{word}' to differ.{did_you_mean(word, MISMATCHES)} "
                f"Type one or more of {', '.join(MISMATCHES)}",
                problem_id="unknown-mismatch",
            )
    return named


def _differences(trained: Trained, tokenizer: PreTrainedTokenizerBase, system_prompt: str | None) -> list[str]:
    now: dict[str, tuple[str | None, set[str | None]]] = {
        TEMPLATE: (trained.chat_template_sha256, {template_hash(tokenizer)}),
        TOKENIZER: (trained.tokenizer_sha256, {*_hashes(tokenizer)}),
        SYSTEM_PROMPT: (trained.system_prompt_sha256, {system_prompt_hash(system_prompt)}),
    }
    return [name for name, (then, hashes) in now.items() if then is not None and then not in hashes]


def _different(mismatch: str, run: str, place: str) -> DataError:
    """The error for one difference."""
    named = f" (`tunebook eval` goes on and records it with --allow-mismatch {mismatch})"
    if mismatch == TEMPLATE:
        return DataError(
            f"the chat template is not the one that {run} was trained with: it changed since (the tokenizer is "
            f"{place}); put it back, since a model answers badly under another template{named}",
            problem_id="template-changed",
        )
    if mismatch == TOKENIZER:
        return DataError(
            f"the tokenizer {place} is not the one that {run} was trained with: it changed since; put "
            f"it back, since the same text would become other tokens{named}",
            problem_id="tokenizer-changed",
        )
    return DataError(
        f"the system prompt is not the one that {run} was trained with: dataset.system_prompt in its run.yaml changed "
        f"since; put it back, since a model answers differently under another one{named}",
        problem_id="system-prompt-changed",
    )


def _hashes(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """The tokenizer's hash, and the one without a padding token: the trainer gives one to a tokenizer that has none."""
    padding = tokenizer.pad_token
    hashes = {tokenizer_hash(tokenizer)}
    tokenizer.pad_token = None
    hashes.add(tokenizer_hash(tokenizer))
    tokenizer.pad_token = padding
    return hashes
