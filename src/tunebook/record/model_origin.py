"""Which run a model comes from, and the check that tokenizer, chat template, system prompt and base model match it.

The manifest of a run holds the hashes. An exported model folder holds them in `tunebook.json`, since such folders are
copied and renamed; a folder without that file is a model like any other. A difference is an error.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebook.config.book import resolve_path
from tunebook.config.frozen import load_config
from tunebook.config.schema import ModelConfig
from tunebook.data.template import template_hash
from tunebook.errors import DataError
from tunebook.files import atomic_write_json, read_json
from tunebook.model.tokenizer import tokenizer_hash
from tunebook.model.weight_files import weights_fingerprint
from tunebook.record.manifest import MANIFEST_FILE, read_manifest, system_prompt_hash
from tunebook.record.run_folder import RUN_FILE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ORIGIN_FILE = "tunebook.json"
FORMAT = 1  # increased when a key changes its meaning or is removed
_TEMPLATE, _TOKENIZER, _SYSTEM_PROMPT = "chat_template_sha256", "tokenizer_sha256", "system_prompt_sha256"
_PROBLEM_IDS = {
    _TEMPLATE: "template-changed",
    _TOKENIZER: "tokenizer-changed",
    _SYSTEM_PROMPT: "system-prompt-changed",
}


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The run that a model is from, and what it recorded. A hash is None if the training had no such thing."""

    run: str  # `<recipe>/<time>`
    recipe: str | None
    config_sha256: str
    tokenizer_sha256: str | None
    chat_template_sha256: str | None
    system_prompt: str | None
    system_prompt_sha256: str
    weights_fingerprint: str | None = None  # of the weights that the run started from, if they were in a folder
    template_date: str | None = None  # that the chat template writes as today's date; None if it writes none
    yarn_factor: float | None = None  # as in the run's `model`: an adapter's base has to be loaded so
    yarn_original_positions: int | None = None


def origin_of(run: Path) -> Origin | None:
    """What a run recorded; None without a manifest. Raises: DataError, RequestError for files that cannot be read."""
    if not (run / MANIFEST_FILE).is_file():
        return None
    manifest, config, run = read_manifest(run), load_config(run / RUN_FILE), run.resolve()
    return Origin(
        run=f"{run.parent.name}/{run.name}",
        recipe=config.recipe,
        config_sha256=manifest["config_sha256"],
        tokenizer_sha256=manifest["tokenizer_sha256"],
        chat_template_sha256=manifest["chat_template_sha256"],
        system_prompt=config.dataset.system_prompt,
        system_prompt_sha256=manifest["system_prompt_sha256"],
        weights_fingerprint=manifest["model"]["weights_fingerprint"],
        template_date=manifest.get("template_date"),
        yarn_factor=config.model.yarn_factor,
        yarn_original_positions=config.model.yarn_original_positions,
    )


def write_origin(folder: Path, origin: Origin) -> None:
    """Write the origin into an exported model's `folder`, with the fields of its subclass."""
    atomic_write_json(folder / ORIGIN_FILE, {"format": FORMAT, **asdict(origin)})


def read_origin(folder: Path) -> Origin | None:
    """The origin of a model folder; None if the folder has no such file. Raises: DataError if it is invalid."""
    file = folder / ORIGIN_FILE
    if not file.is_file():
        return None
    content: dict[str, Any] = read_json(file)
    if content.get("format") != FORMAT:
        raise DataError(
            f"{file} is not what this `tunebook export` writes; export the run again, or remove the file to use the "
            "model as one without a run",
            problem_id="broken-record",
        )
    return Origin(**{name: content[name] for name in content if name in Origin.__dataclass_fields__})


def check_bound(
    trained: Origin | None, tokenizer: PreTrainedTokenizerBase, system_prompt: str | None
) -> dict[str, Any]:
    """Refuse another template, tokenizer or system prompt than the training's.

    Returns the entry for an evaluation's record: the training that was compared with, and the hashes. Raises: DataError
    for the first difference.
    """
    present = {
        _TEMPLATE: template_hash(tokenizer),
        _TOKENIZER: tokenizer_hash(tokenizer),
        _SYSTEM_PROMPT: system_prompt_hash(system_prompt),
    }
    recorded = {name: getattr(trained, name, None) for name in present}
    # The trainer adds a padding token to a tokenizer that has none. That is not a difference.
    padding, tokenizer.pad_token = tokenizer.pad_token, None
    if recorded[_TOKENIZER] == (without_padding := tokenizer_hash(tokenizer)):
        present[_TOKENIZER] = without_padding
    tokenizer.pad_token = padding
    different = next((name for name in present if recorded[name] not in (None, present[name])), None)
    if trained is not None and different is not None:
        place = "dataset.system_prompt of its run.yaml" if different == _SYSTEM_PROMPT else tokenizer.name_or_path
        raise DataError(
            f"the {different.removesuffix('_sha256').replace('_', ' ')} is not the one that the run {trained.run} was "
            f"trained with (it is in {place}); restore it, since a model answers badly under another one. An export "
            f"without its {ORIGIN_FILE} is a model of no run, and is not compared",
            problem_id=_PROBLEM_IDS[different],
        )
    return {"to": None if trained is None else trained.run, **present}


def check_base(trained: Origin | None, model: ModelConfig) -> None:
    """Refuse another base model than an adapter was trained on; `model` is the configured base.

    Only weights in a folder have a fingerprint, so a base that is named on the hub is not compared. Raises: DataError
    for another base, RequestError for one that cannot be read.
    """
    if trained is None or trained.weights_fingerprint is None or model.path is None:
        return
    present = weights_fingerprint(model)
    if present == trained.weights_fingerprint:
        return
    weights = f"have the fingerprint {present[:12]}..." if present is not None else "are not there"
    raise DataError(
        f"the base model is not the one that the run {trained.run} was trained on: the weights of "
        f"{resolve_path(model.path)} {weights}, and the run started from "
        f"{trained.weights_fingerprint[:12]}...; restore those weights, since an adapter fits only its own base, or "
        f"train again on these (tunebook export without --merge writes the adapter alone)",
        problem_id="base-changed",
    )
