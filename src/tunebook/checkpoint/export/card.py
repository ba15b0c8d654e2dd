"""The model card of an exported folder, `README.md`: `card.md.jinja` filled with the run's records.

Programs read `tunebook.json`. Local paths are shortened to their last component, since the folder will be shared.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from tunebook.config.book import BOOK_PREFIX, is_relative, resolve_path
from tunebook.config.choices import PeftMethod, Source, TrainOn, Weights
from tunebook.config.schema import RunConfig, world_size
from tunebook.model.adapters import trains_in_fp32
from tunebook.parallel.deepspeed import zero_stage
from tunebook.record.model_origin import ORIGIN_FILE, Origin
from tunebook.record.run_record import RunRecord

_FINAL = "model"  # the run's folder with the trained model
_LOSS_ON = {
    TrainOn.auto: "the assistant's turns, and every token of plain text",
    TrainOn.assistant: "the assistant's turns",
    TrainOn.everything: "every token",
}


@dataclass(frozen=True, kw_only=True)
class ExportOrigin(Origin):
    """Where an exported folder comes from and how it was made: the content of `tunebook.json`."""

    source: str  # the folder in the run: `model`, or `checkpoints/checkpoint-<step>`
    stored_as: str  # a `Form`
    step: int | None  # optimizer steps of the weights
    base_model: dict[str, Any]
    base_keywords: dict[str, Any]  # of `from_pretrained`, without which the base of an adapter is not as in training
    is_adapter: bool
    is_merged: bool
    base_was_dequantized: bool
    dtype: str | None  # None: each tensor as it was stored
    stored_dtypes: list[str]
    num_parameters: int
    check: dict[str, Any]
    files_sha256: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)


def card(origin: ExportOrigin, config: RunConfig, record: RunRecord) -> str:
    """The model card as Markdown with the hub's header."""
    found = [item for item in evaluations(origin, record) if item.get("tasks")]
    turns = [{"role": "user", "content": "..."}]
    if config.dataset.system_prompt is not None:
        turns.insert(0, {"role": "system", "content": config.dataset.system_prompt})
    name = _name(config)
    filled = ModelCard.from_template(
        _header(origin, config),
        template_path=str(Path(__file__).with_name("card.md.jinja")),
        title=(record.manifest or {}).get("title") or origin.recipe or f"{name}, fine-tuned",
        origin=origin,
        origin_file=ORIGIN_FILE,
        summary=_summary(origin, config, name),
        turns=turns if origin.chat_template_sha256 is not None else None,
        data=_cells(_data(config, record)),
        training=_cells(_training(origin, config, record)),
        provenance=_cells(_provenance(origin, record)),
        evaluations=found,
        tasks={name: task for item in found for name, task in item["tasks"].items()},
        limited=[item["when"] for item in found if item.get("limit")],
        score=_score,
    )
    return str(filled).rstrip() + "\n"


def _header(origin: ExportOrigin, config: RunConfig) -> ModelCardData:

    parts = (config.dataset, *config.dataset.parts.values())
    names = [str(part.name) for part in parts if part.name and _is_on_hub(part.name)]
    base: dict[str, Any] = {}
    if config.model.name is not None:
        base = {"base_model_relation": "adapter" if origin.is_adapter else "finetune"}
    return ModelCardData(
        library_name="peft" if origin.is_adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["tunebook", "sft"],
        base_model=config.model.name,
        datasets=names if names and config.dataset.source in (Source.hub, Source.mixture) else None,
        **base,
    )


def _is_on_hub(name: str) -> bool:
    """Whether a data set's name is `owner/name` on the hub and not a local folder."""
    return "/" in name and is_relative(name) and not resolve_path(name).exists()


def _summary(origin: ExportOrigin, config: RunConfig, name: str) -> list[str]:
    base = f"{name} at {config.model.revision}" if config.model.revision else name
    if config.model.weights is Weights.random:
        base = f"the architecture of {name} with random weights"
    what = "A LoRA adapter for" if origin.is_adapter else "A full model, supervised fine-tuning of"
    if origin.is_merged:
        what = "A LoRA adapter, merged into its base model:"
    sentences = [f"{what} {base}, {origin.num_parameters:,} numbers{f' in {origin.dtype}' if origin.dtype else ''}."]
    if origin.base_keywords:
        stretched = f"Its positions are stretched {config.model.yarn_factor:g} times by YaRN"
        sentences.append(f"{stretched}{', so load the base as below.' if origin.is_adapter else '.'}")
    if origin.base_was_dequantized:
        sentences.append(
            "The adapter was trained over a base quantized to 4 bits (QLoRA). It was merged into that base dequantized "
            "to the full format, which differs from the published base by the rounding to 4 bits."
        )
    if origin.is_adapter and config.peft.method is PeftMethod.qlora:
        sentences.append("It was trained over a base quantized to 4 bits (NF4, double quantization).")
    if origin.is_adapter and config.model.weights is Weights.random:
        sentences.append("The base had random weights drawn from the run's seed, so the adapter fits that run only.")
    return sentences


def _name(config: RunConfig) -> str:
    """The base model's name, or that of its folder."""
    path = config.model.path or ""
    return config.model.name or (path.removeprefix(BOOK_PREFIX) if path.startswith(BOOK_PREFIX) else Path(path).name)


def _data(config: RunConfig, record: RunRecord) -> list[tuple[str, str]]:
    found = (record.manifest or {}).get("dataset") or {}
    rows = []
    for source in found.get("records") or []:
        name = str(source.get("location") or source.get("name") or "").rpartition("book:")[2]
        shown = name if not name.startswith(("/", "~")) else Path(name).name
        facts = [f"{source['num_documents']:,} documents"] if source.get("num_documents") is not None else []
        facts += [f"{key} {source[key]}" for key in ("revision", "format") if source.get(key)]
        facts += [f"SHA-256 {source['sha256'][:12]}"] if source.get("sha256") else []
        rows.append((shown, ", ".join(facts)))
    train = (found.get("counts") or {}).get("train")
    if train:
        rows.append(("trained on", _counts(train)))
    rows.append(("loss on", _LOSS_ON[config.dataset.train_on]))
    if (record.manifest or {}).get("template_date"):
        rows.append(("date in the chat template", str((record.manifest or {})["template_date"])))
    if found.get("content_sha256"):
        rows.append(("SHA-256 of the tokens", str(found["content_sha256"])[:16]))
    return rows


def _counts(train: dict[str, Any]) -> str:
    return (
        f"{train['num_documents']:,} of {train['num_read']:,} documents read, {train['num_tokens']:,} tokens, "
        f"{train['num_trained_tokens']:,} of them in the loss"
    )


def _training(origin: ExportOrigin, config: RunConfig, record: RunRecord) -> list[tuple[str, str]]:
    batch = (record.plan or {}).get("batch") or {}
    stage = zero_stage(config.parallelism.strategy)
    strategy = f"ZeRO-{stage}" if stage is not None else config.parallelism.strategy.name
    where = f"{world_size(config)} x {_hardware(record)}"
    rows = [("strategy", f"{strategy} over {where}")]
    if config.peft.method is not PeftMethod.full:
        rows.append((config.peft.method.name, f"rank {config.peft.rank}, alpha {config.peft.alpha:g}"))
    if batch.get("documents_per_step"):
        tokens = f", {batch['tokens_per_step']:,.0f} tokens on average" if batch.get("tokens_per_step") else ""
        rows.append(("batch", f"{batch['documents_per_step']:g} documents an optimizer step{tokens}"))
    total = batch.get("total_steps")
    steps = f"{_step(origin)} of {total}" if total else _step(origin)
    rows.append(("steps", steps + _of_the_best(origin, record)))
    rows.append(("longest document", f"{config.training.max_length} tokens, packing {config.packing.mode.name}"))
    rows.append(("optimizer", f"{config.optimizer.name.name}, learning rate {config.optimizer.learning_rate:g}"))
    rows.append(("schedule", _schedule(config)))
    rows.append(("precision", _precision(config)))
    rows.append(("seed", str(config.training.seed)))
    losses = [line for line in record.training if line.get("loss") is not None and _is_seen(line, origin)]
    if losses:
        first, last = losses[0], losses[-1]
        rows.append(("loss", f"{first['loss']:.4f} at step {first['step']}, {last['loss']:.4f} at step {last['step']}"))
        if last.get("tokens_seen"):
            rows.append(("tokens seen", f"{last['tokens_seen']:,}"))
    validations = [line for line in record.validation if "validation_loss" in line and _is_seen(line, origin)]
    if validations:
        last = validations[-1]
        rows.append(("validation loss", f"{last['validation_loss']:.4f} at step {last['step']}"))
    return rows


def _of_the_best(origin: ExportOrigin, record: RunRecord) -> str:
    """A note if the trained model is not from the last step."""
    done = record.status.get("step")
    if origin.source != _FINAL or origin.step is None or record.status.get("best_step") is None:
        return ""
    return f", the best by validation loss of the saved steps, of {done} trained"


def _step(origin: ExportOrigin) -> str:
    return str(origin.step) if origin.step is not None else "not recorded"


def _is_seen(line: dict[str, Any], origin: ExportOrigin) -> bool:
    return origin.step is not None and int(line["step"]) <= origin.step


def _hardware(record: RunRecord) -> str:
    gpus = ((record.manifest or {}).get("hardware") or {}).get("gpus") or []
    return str(gpus[0]["name"]) if gpus else "CPU process"


def _precision(config: RunConfig) -> str:
    compute, weights = config.precision.compute.name, config.precision.master_weights.name
    if config.peft.method is PeftMethod.full:
        return f"{compute}, weights kept in {weights}"
    frozen = weights if config.peft.method is PeftMethod.lora else f"4 bits and {weights}"
    return f"{compute}, frozen weights kept in {frozen}, adapters in {'fp32' if trains_in_fp32(config) else weights}"


def _schedule(config: RunConfig) -> str:
    schedule = config.schedule
    warmup = f"{schedule.warmup_steps} steps" if schedule.warmup_steps is not None else None
    if schedule.warmup_share is not None:
        warmup = f"{schedule.warmup_share:.0%} of the steps"
    return f"{schedule.name.name}, warm-up {warmup}" if warmup else schedule.name.name


def evaluations(origin: ExportOrigin, record: RunRecord) -> list[dict[str, Any]]:
    """The evaluations of exactly the exported weights, and of the base model before training."""
    last = record.model_step if record.status.get("state") == "finished" else None
    is_final = origin.source == _FINAL or (last is not None and origin.step == last)
    sources = (origin.source, _FINAL) if is_final else (origin.source,)
    found = [item for item in record.evaluations if item.get("model") in sources]
    if is_final and record.after is not None:
        found.insert(0, record.after)
    return [record.before, *found] if found and record.before is not None else found


def _score(task: dict[str, Any] | None) -> str:
    if task is None:
        return "-"
    error = f" ± {task['stderr']:.4f}" if task.get("stderr") is not None else ""
    return f"{task['value']:.4f}{error}"


def _provenance(origin: ExportOrigin, record: RunRecord) -> list[tuple[str, str]]:
    code = (record.manifest or {}).get("code") or {}
    state, is_changed = record.status.get("state"), code.get("is_clean") is False
    return [
        ("recipe", origin.recipe or "none"),
        ("run", origin.run + (f" ({state})" if state else "")),
        ("exported from", f"{origin.source} ({origin.stored_as}), step {_step(origin)}"),
        ("configuration, SHA-256", origin.config_sha256 or "not recorded"),
        ("code", str(code.get("git_commit") or "not recorded") + (" with changes" if is_changed else "")),
        ("checked", check_text(origin)),
    ]


def check_text(origin: ExportOrigin) -> str:
    """How the written files compare with the checkpoint, in words."""
    check = origin.check
    if check["logits"] is None:
        rounded = "" if check["is_exact"] else f" rounded to {origin.dtype}"
        return f"read again, its tensors equal the checkpoint's{rounded}; its base model was not there"
    if check["is_exact"]:
        return f"loaded again, the logits of {check['logits']} equal the checkpoint's bit for bit"
    return (
        f"loaded again, the logits of {check['logits']} differ from the checkpoint's by {check['difference']:.2g} "
        f"(root mean square, relative); rounding to {origin.dtype or 'this format'} explains {check['allowed']:.2g}"
    )


def _cells(rows: list[tuple[str, str]]) -> list[tuple[str, ...]]:
    """The cells of a Markdown table, each on one line."""
    return [tuple(" ".join(text.replace("|", "\\|").split()) for text in row) for row in rows]
