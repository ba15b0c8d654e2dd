"""The model card of an exported folder, `README.md`: `card.md.jinja` filled with the run's records.

Programs read `tunebook.json`. Local paths are shortened to their last component, since the folder will be shared.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from tunebook.config.book import BOOK_PREFIX
from tunebook.config.choices import PeftMethod, Weights
from tunebook.config.schema import RunConfig, world_size
from tunebook.record.model_origin import ORIGIN_FILE, Origin
from tunebook.record.page.numbers import Unit
from tunebook.record.run_record import RunRecord
from tunebook.record.scores import score_text

_FINAL = "model"  # the run's folder with the trained model


@dataclass(frozen=True, kw_only=True)
class ExportOrigin(Origin):
    """Where an exported folder comes from and how it was made: the content of `tunebook.json`."""

    source: str  # the folder in the run: `model`, or `checkpoints/checkpoint-<step>`
    stored_as: str  # a `Form`
    step: int | None  # optimizer steps of the weights
    base_keywords: dict[str, Any]  # of `from_pretrained`, without which the base of an adapter is not as in training
    is_adapter: bool
    is_merged: bool
    dtype: str
    num_parameters: int
    is_exact: bool  # these four as in `write.Written`
    difference: float
    allowed: float
    logits: str | None
    files_sha256: dict[str, str]


def card(origin: ExportOrigin, config: RunConfig, record: RunRecord) -> str:
    """The model card as Markdown with the hub's header."""
    found = _evaluations(origin, record)
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
        title=record.manifest.get("title") or origin.recipe or f"{name}, fine-tuned",
        origin=origin,
        origin_file=ORIGIN_FILE,
        summary=_summary(origin, config, name),
        turns=turns if origin.chat_template_sha256 is not None else None,
        # The cells of a Markdown table, each on one line.
        rows=[
            tuple(" ".join(text.replace("|", "\\|").split()) for text in row) for row in _rows(origin, config, record)
        ],
        evaluations=found,
        tasks={name: task for item in found for name, task in item["tasks"].items()},
        score=lambda task: "-" if task is None else score_text(task, Unit.plain),
    )
    return str(filled).rstrip() + "\n"


def _summary(origin: ExportOrigin, config: RunConfig, name: str) -> str:
    base = f"{name} at {config.model.revision}" if config.model.revision else name
    if config.model.weights is Weights.random:
        base = f"the architecture of {name} with random weights"
    what = "A LoRA adapter for" if origin.is_adapter else "A full model, supervised fine-tuning of"
    if origin.is_merged:
        what = "A LoRA adapter, merged into its base model:"
    sentences = [f"{what} {base}, {origin.num_parameters:,} numbers in {origin.dtype}."]
    if origin.base_keywords:
        stretched = f"Its positions are stretched {config.model.yarn_factor:g} times by YaRN"
        sentences.append(f"{stretched}{', so load the base as below.' if origin.is_adapter else '.'}")
    if config.peft.method is PeftMethod.qlora:
        merged = ", and merged into that base, quantized and back" if origin.is_merged else ""
        sentences.append(f"The adapter was trained over a base quantized to 4 bits (QLoRA){merged}.")
    return " ".join(sentences)


def _rows(origin: ExportOrigin, config: RunConfig, record: RunRecord) -> list[tuple[str, str]]:
    """What the run recorded of these weights."""
    manifest, optimizer = record.manifest, config.optimizer
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
    seen = [line for line in (*record.training, *record.validation) if int(line["step"]) <= (origin.step or 0)]
    for key, name in (("loss", "loss"), ("validation_loss", "validation loss")):
        if lines := [line for line in seen if line.get(key) is not None]:
            ends = [f"{line[key]:.4f} at step {line['step']}" for line in (lines[0], lines[-1])]
            rows.append((name, ", ".join(ends)))
    code = manifest.get("code") or {}
    return [
        *rows,
        ("recipe", origin.recipe or "none"),
        ("run", origin.run),
        ("exported from", f"{origin.source} ({origin.stored_as})"),
        ("configuration, SHA-256", origin.config_sha256),
        (
            "code",
            f"{code.get('git_commit') or 'not recorded'}{' with changes' if code.get('is_clean') is False else ''}",
        ),
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
    found = [record.after] if is_final and record.after else []
    found += [item for item in record.evaluations if item["model"] in sources]
    return [record.before, *found] if found and record.before else found


def check_text(origin: ExportOrigin) -> str:
    """How the written files compare with the checkpoint, in words."""
    if origin.logits is None:
        rounded = "" if origin.is_exact else f" rounded to {origin.dtype}"
        return f"read again, its tensors equal the checkpoint's{rounded}"
    if origin.is_exact:
        return f"loaded again, the logits of {origin.logits} equal the checkpoint's bit for bit"
    return (
        f"loaded again, the logits of {origin.logits} differ from the checkpoint's by {origin.difference:.2g} "
        f"(root mean square, relative); rounding explains {origin.allowed:.2g}"
        f"{'' if origin.dtype == 'fp32' else '. --dtype fp32 keeps every digit of the training'}"
    )
