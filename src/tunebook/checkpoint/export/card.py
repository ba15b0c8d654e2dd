"""The model card of an exported folder, `README.md`: `card.md.jinja` filled with the run's records.

Programs read `tunebook.json`. Local paths are shortened to their last component, since the folder will be shared.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from tunebook.checkpoint.export.write import Written
from tunebook.config.book import BOOK_PREFIX
from tunebook.config.choices import PeftMethod, Weights
from tunebook.config.schema import RunConfig, world_size
from tunebook.record.differences import score_in_words
from tunebook.record.model_origin import ORIGIN_FILE, Origin
from tunebook.record.run_record import RunRecord

_FINAL = "model"  # the run's folder with the trained model


@dataclass(frozen=True, kw_only=True)
class ExportOrigin(Origin, Written):
    """Where an exported folder comes from and how it was made: the content of `tunebook.json`."""

    source: str  # the folder in the run: `model`, or `checkpoints/checkpoint-<step>`
    stored_as: str  # a `Form`
    step: int | None  # optimizer steps of the weights
    base_keywords: dict[str, Any]  # of `from_pretrained`, without which the base of an adapter is not as in training
    is_adapter: bool
    is_merged: bool
    files_sha256: dict[str, str]


def card(origin: ExportOrigin, config: RunConfig, record: RunRecord) -> str:
    """The model card as Markdown with the hub's header."""
    evaluations = _evaluations(origin, record)
    turns = [{"role": "user", "content": "..."}]
    if config.dataset.system_prompt is not None:
        turns.insert(0, {"role": "system", "content": config.dataset.system_prompt})
    name = config.model.name or _shared(config.model.path or "")
    filled = ModelCard.from_template(
        ModelCardData(
            library_name="peft" if origin.is_adapter else "transformers",
            pipeline_tag="text-generation",
            tags=["tunebook", "sft"],
            base_model=config.model.name,
        ),
        template_path=str(Path(__file__).with_name("card.md.jinja")),
        title=(record.manifest or {}).get("title") or origin.recipe or origin.run,
        origin=origin,
        origin_file=ORIGIN_FILE,
        summary=_summary(origin, config, name),
        turns=turns if origin.chat_template_sha256 is not None else None,
        rows=_rows(origin, config, record),
        evaluations=evaluations,
        tasks={name: task for item in evaluations for name, task in item["tasks"].items()},
        score=lambda task: "-" if task is None else score_in_words(task, as_share=False),
    )
    return str(filled).rstrip() + "\n"


def _summary(origin: ExportOrigin, config: RunConfig, name: str) -> str:
    base = f"{name} at {config.model.revision}" if config.model.revision else name
    if config.model.weights is Weights.random:
        base = f"the architecture of {name} with random weights"
    kind = "A LoRA adapter for" if origin.is_adapter else "A full model, supervised fine-tuning of"
    if origin.is_merged:
        kind = "A LoRA adapter, merged into its base model:"
    sentences = [f"{kind} {base}, {origin.num_parameters:,} numbers in {origin.dtype}."]
    if origin.base_keywords:
        sentences.append(f"The positions of its base are stretched {config.model.yarn_factor:g} times by YaRN.")
    if config.peft.method is PeftMethod.qlora:
        sentences.append("The adapter was trained over a base quantized to 4 bits (QLoRA).")
    return " ".join(sentences)


def _rows(origin: ExportOrigin, config: RunConfig, record: RunRecord) -> list[tuple[str, str]]:
    """What the run recorded of these weights."""
    manifest, optimizer = record.manifest or {}, config.optimizer
    rows = []
    for source in (manifest.get("dataset") or {}).get("records") or []:
        facts = [f"{source['num_documents']:,} documents"] if source.get("num_documents") else []
        facts += [f"{key} {source[key]}" for key in ("revision", "sha256") if source.get(key)]
        rows.append(("data", ", ".join([_shared(source.get("location") or ""), *facts])))
    gpus = (manifest.get("hardware") or {}).get("gpus") or [{"name": "CPU process"}]
    rows.append(("strategy", f"{config.parallelism.strategy.name} over {world_size(config)} x {gpus[0]['name']}"))
    if config.peft.method is not PeftMethod.full:
        rows.append((config.peft.method.name, f"rank {config.peft.rank}, alpha {config.peft.alpha:g}"))
    rows.append(("optimizer", f"{optimizer.name.name}, learning rate {optimizer.learning_rate:g}"))
    rows.append(("steps", str(origin.step) if origin.step is not None else "not recorded"))
    for key in ("loss", "validation_loss"):
        lines = [line for line in (*record.training, *record.validation) if line.get(key) is not None]
        seen = [f"{line[key]:.4f} at step {line['step']}" for line in lines if line["step"] <= (origin.step or 0)]
        if seen:
            rows.append((key.replace("_", " "), f"{seen[0]}, {seen[-1]}"))
    return [
        *rows,
        ("recipe", origin.recipe or "none"),
        ("run", origin.run),
        ("exported from", f"{origin.source} ({origin.stored_as})"),
        ("code", (manifest.get("code") or {}).get("git_commit") or "not recorded"),
        ("checked", check_text(origin)),
    ]


def _shared(path: str) -> str:
    """A path without the folders of this machine."""
    path = path.rpartition(BOOK_PREFIX)[2]
    return Path(path).name if path.startswith(("/", "~")) else path


def _evaluations(origin: ExportOrigin, record: RunRecord) -> list[dict[str, Any]]:
    """The evaluations of exactly the exported weights, and of the base model before training."""
    last = record.model_step if record.status.get("state") == "finished" else None
    is_final = origin.source == _FINAL or (last is not None and origin.step == last)
    sources = (origin.source, _FINAL) if is_final else (origin.source,)
    evaluations = [record.after] if is_final and record.after is not None else []
    evaluations += [item for item in record.evaluations if item["model"] in sources]
    return [record.before, *evaluations] if evaluations and record.before is not None else evaluations


def check_text(origin: ExportOrigin) -> str:
    """How the written files compare with the checkpoint, in words."""
    return (
        f"loaded again, it equals the checkpoint {'bit for bit' if origin.is_exact else f'rounded to {origin.dtype}'}"
    )
