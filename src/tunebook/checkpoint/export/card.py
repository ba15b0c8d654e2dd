"""The model card of an exported folder, `README.md`, from the run's records.

Programs read `tunebook.json`. Local paths are shortened to their last component, since the folder will be shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from tunebook.checkpoint.export.write import Written
from tunebook.config.book import BOOK_PREFIX
from tunebook.config.choices import PeftMethod, Weights
from tunebook.config.schema import RunConfig, world_size
from tunebook.model.load import is_image_class
from tunebook.record.model_origin import ORIGIN_FILE, Origin
from tunebook.record.page.numbers import Unit
from tunebook.record.run_record import RunRecord
from tunebook.record.scores import score_text

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
    header = ModelCardData(
        library_name="peft" if origin.is_adapter else "transformers",
        pipeline_tag="image-text-to-text" if _is_of_images(config) else "text-generation",
        tags=["tunebook", config.method.name],
        base_model=config.model.name,
    )
    parts = [
        f"---\n{header.to_yaml()}\n---",
        f"# {record.manifest.get('title') or origin.recipe or origin.run}",
        _summary(origin, config),
        f"## Use\n\n```python\n{_usage(origin, config)}\n```",
        f"## Evaluation\n\n{_scores(_evaluations(origin, record))}",
        f"## Origin\n\n{_table(['', ''], _rows(origin, config, record))}",
        f"`{ORIGIN_FILE}` holds the same for programs, with the hashes of the weight files.",
    ]
    return "\n\n".join(parts) + "\n"


def _is_of_images(config: RunConfig) -> bool:
    return config.model.facts is not None and is_image_class(config.model.facts.architecture)


def _usage(origin: ExportOrigin, config: RunConfig) -> str:
    """Python code that loads the folder and generates an answer."""
    model_class, package = "AutoModelForCausalLM", "transformers"
    is_of_images = _is_of_images(config)
    reader, read_by, text = "tokenizer", "AutoTokenizer", ""
    if is_of_images:
        model_class = "AutoModelForImageTextToText"
        reader, read_by, text = "processor", "AutoProcessor", "text="
    elif origin.is_adapter:
        model_class, package = "AutoPeftModelForCausalLM", "peft"
    keywords = "".join(f", {key}={value!r}" for key, value in origin.base_keywords.items() if origin.is_adapter)
    inputs = f'{reader}({text}"...", return_tensors="pt")'
    if origin.chat_template_sha256 is not None:
        turns: list[dict[str, Any]] = [{"role": "user", "content": "..."}]
        if config.dataset.system_prompt is not None:
            turns.insert(0, {"role": "system", "content": config.dataset.system_prompt})
        options = 'add_generation_prompt=True, return_dict=True, return_tensors="pt"'
        if is_of_images:  # processors read contents in parts
            turns = [turn | {"content": [{"type": "text", "text": turn["content"]}]} for turn in turns]
            turns[-1]["content"].insert(0, {"type": "image", "path": "photo.jpg"})
            options = f"tokenize=True, {options}"
        inputs = f"{reader}.apply_chat_template({turns}, {options})"
    load = f"model = {model_class}.from_pretrained(folder{keywords})"
    imports = f"from {package} import {model_class}\nfrom transformers import {read_by}"
    if is_of_images and origin.is_adapter:  # PEFT has no class for it
        imports = f"from peft import PeftConfig, PeftModel\nfrom transformers import {model_class}, {read_by}"
        load = (
            f"base = {model_class}.from_pretrained(PeftConfig.from_pretrained(folder).base_model_name_or_path"
            f"{keywords})\nmodel = PeftModel.from_pretrained(base, folder)"
        )
    return f"""{imports}

folder = "."  # or this model's name on the hub
{reader} = {read_by}.from_pretrained(folder)
{load}
inputs = {inputs}
answer = model.generate(**inputs, max_new_tokens=256)
print({reader}.decode(answer[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True))"""


def _scores(evaluations: list[dict[str, Any]]) -> str:
    """The scores of the evaluations side by side."""
    if not evaluations:
        return "No evaluation of these weights is recorded."
    rows = []
    for name, task in {name: task for item in evaluations for name, task in item["tasks"].items()}.items():
        scores = [item["tasks"].get(name) for item in evaluations]
        cells = ["-" if score is None else score_text(score, Unit.plain) for score in scores]
        rows.append([name, task["metric"], str(task["num_items"]), *cells])
    columns = [item["when"] + (f" (first {item['limit']})" if item.get("limit") else "") for item in evaluations]
    version = evaluations[-1].get("harness_version")
    note = f"\n\nBy lm-evaluation-harness {version}; ± is the standard error." if version else ""
    return _table(["task", "metric", "items", *columns], rows) + note


def _table(head: list[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


def _summary(origin: ExportOrigin, config: RunConfig) -> str:
    name = config.model.name or _shared(config.model.path or "")
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
    evaluations = [record.after] if is_final and record.after else []
    evaluations += [item for item in record.evaluations if item["model"] in sources]
    return [record.before, *evaluations] if evaluations and record.before else evaluations


def check_text(origin: ExportOrigin) -> str:
    """How the written files compare with the checkpoint, in words."""
    return (
        f"loaded again, it equals the checkpoint {'bit for bit' if origin.is_exact else f'rounded to {origin.dtype}'}"
    )
