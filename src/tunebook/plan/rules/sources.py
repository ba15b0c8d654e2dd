"""Rules about the sources of the model and the documents."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import suppress
from datetime import date

from tunebook.config.book import (
    CHATML_TEMPLATE,
    LIBRARY_PREFIX,
    TRAINING_TEMPLATE,
    is_in_book,
    is_template_name,
    resolve_path,
)
from tunebook.config.choices import Format, LauncherName, Reasoning, Source, SpecialText, TrainOn
from tunebook.config.override_text import typed
from tunebook.config.schema import DatasetSource, ModelConfig, RunConfig, sources_of
from tunebook.data.formats import templates_problem
from tunebook.errors import nearest
from tunebook.model.base_config import (
    causal_classes,
    causal_text_part,
    model_folder_problem,
    why_not_causal,
)
from tunebook.model.chat_templates import library_templates
from tunebook.model.positions import positions_of, why_not_stretched
from tunebook.plan.rules.frame import Finding, another_model, rule

# Same check as huggingface_hub's, whose import would slow down a plan. Some old models have no owner.
_DAY = re.compile(r"\d{4}-\d{2}-\d{2}", re.ASCII)
_HUB_NAME = re.compile(r"(\b[\w.-]{1,96}\b/)?\b[\w.-]{1,96}\b", re.ASCII)


@rule("model-not-named", "model.name")
def model_not_named(config: RunConfig) -> Finding | None:
    """Require exactly one of `model.name` and `model.path`: with both it is unclear which weights to train."""
    name, path = config.model.name, config.model.path
    if name and path:
        message = f"model.name={name} and model.path={path} name two models"
        return Finding(message, f"model.name=null or model=hub model.name={name} model.path=null")
    if not name and not path:
        recipe = " or the name of a recipe as the first word, such as quickstart" if config.recipe is None else ""
        fix = f"model.path=FOLDER or model.name=ORG/NAME{recipe}"
        return Finding("no model is named", fix)
    return None


@rule("model-name-is-folder", "model.name")
def model_name_is_folder(config: RunConfig) -> Finding | None:
    """Refuse a model name that starts like a path: it would be looked up on the hub."""
    name = config.model.name
    if not name or config.model.path or not _is_path(name):
        return None
    return Finding(f"{name} is a folder, not a name on the hub", f"model.name=null model.path={name}")


def _is_path(name: str) -> bool:
    return name.startswith(("/", "./", "../", "~")) or is_in_book(name)


@rule("model-revision-ignored", "model.revision", is_error=False)
def model_revision_ignored(config: RunConfig) -> Finding | None:
    """Warn about a revision of a folder: only models on the hub have revisions."""
    model = config.model
    if model.revision is None or model.path is None or model.name is not None:
        return None
    return Finding(f"{model.revision} is not used with model.path: a folder has one revision", "model.revision=null")


@rule("model-name-form", "model.name")
def model_name_form(config: RunConfig) -> Finding | None:
    """Refuse names that the hub would reject only when the model is loaded; `model-name-is-folder` covers paths."""
    name = config.model.name
    if not name or config.model.path or _is_path(name) or is_hub_name(name):
        return None
    is_folder = model_folder_problem(ModelConfig(path=name)) is None
    fix = f"model.name=null {typed('model.path', name)}" if is_folder else "model.name=ORG/NAME"
    return Finding(f"'{name}' does not have the form organization/name of a model on the hub", fix)


def is_hub_name(name: str) -> bool:
    """Whether the hub can have something of this name."""
    is_refused = "--" in name or ".." in name or name.endswith(".git")
    return _HUB_NAME.fullmatch(name) is not None and not is_refused


@rule("model-folder", "model.path")
def model_folder(config: RunConfig) -> Finding | None:
    """Refuse a missing folder, or one without config.json; other machines may have what is missing here."""
    model = config.model
    if not model.path or (config.launcher.name is not LauncherName.local and model.facts is not None):
        return None
    problem = model_folder_problem(model)
    return Finding(problem, "model.path=FOLDER") if problem else None


@rule("model-not-causal")
def model_not_causal(config: RunConfig) -> Finding | None:
    """Refuse a config.json that names another head, an encoder, or a model that transformers has no causal head for.

    Another head has another loss, and an encoder sees the token that it should predict. What transformers does not
    know at all is found earlier.
    """
    reason = why_not_causal(config.model)
    if reason is None:
        return None
    key = "model.path" if config.model.path else "model.name"
    part = causal_text_part(config.model)
    such_as = f", such as a checkpoint of its text part alone (model_type={part})" if part is not None else ""
    return Finding(f"{reason}; name a causal language model{such_as}", another_model(config), key=key)


@rule("unknown-architecture", "model.facts.architecture")
def unknown_architecture(config: RunConfig) -> Finding | None:
    """Refuse stated facts of a class that AutoModelForCausalLM does not load; traced facts name one that it does."""
    facts, model = config.model.facts, config.model
    known = {name for names in causal_classes().values() for name in names} if _states_class(model) else set()
    if facts is None or not known or facts.architecture in known:
        return None
    meant = nearest(facts.architecture, known) if facts.architecture.endswith("ForCausalLM") else None
    message = f"AutoModelForCausalLM of the installed transformers loads no {facts.architecture}"
    fix = f"model.facts.architecture={meant}" if meant else f"{another_model(config)} model.facts=null"
    return Finding(message, fix)


def _states_class(model: ModelConfig) -> bool:
    """Whether a user states the class, and transformers has to have it."""
    is_shipped = model.facts is None or (model.facts.measured is not None and model.facts.measured.is_of_the_book)
    return not is_shipped and not model.trust_remote_code


@rule("length-beyond-model", "training.max_length")
def length_beyond_model(config: RunConfig) -> Finding | None:
    """Refuse documents longer than the model's positions; rows may be longer: positions restart per document.

    Beyond max_position_embeddings learned positions crash, and the loss at untrained rotary ones means nothing.
    """
    facts, positions, length = config.model.facts, positions_of(config.model), config.training.max_length
    if facts is None or positions is None or length <= positions or facts.max_position_embeddings < 2:
        return None
    if config.model.yarn_factor is not None:
        original = config.model.yarn_original_positions or facts.max_position_embeddings
        message = f"{length} tokens are more than {original} positions of {facts.architecture} stretched to {positions}"
        return Finding(message, f"training.max_length={positions}")
    stretched = ""
    if why_not_stretched(config.model) is None:
        stretched = f" or model.yarn_factor={math.ceil(length / positions)}, which stretches them"
    return Finding(
        f"{length} tokens are more than the {positions} positions of {facts.architecture}",
        f"training.max_length={positions}{stretched}",
    )


@rule("yarn-not-possible", "model.yarn_factor")
def yarn_not_possible(config: RunConfig) -> Finding | None:
    """Refuse to stretch positions that are not plain rotary ones, or that the model does not have.

    Other positions have no rotation speed to change, or would be stretched twice.
    """
    model = config.model
    if model.yarn_factor is None:
        if model.yarn_original_positions is None:
            return None
        message = f"model.yarn_original_positions={model.yarn_original_positions} means nothing without a factor"
        fix = "model.yarn_original_positions=null or model.yarn_factor=4"
        return Finding(message, fix, key="model.yarn_original_positions")
    if (reason := why_not_stretched(model)) is not None:
        return Finding(f"YaRN cannot stretch this model's positions: {reason}", "model.yarn_factor=null")
    facts, original = model.facts, model.yarn_original_positions
    if facts is None or original is None or original <= facts.max_position_embeddings:
        return None
    known = facts.max_position_embeddings
    return Finding(
        f"{original} original positions are more than the {known} of the model",
        f"model.yarn_original_positions={known} or model.yarn_original_positions=null",
        key="model.yarn_original_positions",
    )


_NEEDED = {Source.files: "path", Source.hub: "name"}
_EXAMPLES = {"path": "FILE_OR_GLOB", "name": "ORG/NAME"}


def _missing_fields(prefix: str, source: DatasetSource) -> Iterator[Finding]:
    needed = _NEEDED.get(source.source)
    if needed is not None and not getattr(source, needed):
        yield Finding(
            f"{prefix}.source={source.source.name} needs {prefix}.{needed}",
            f"{prefix}.{needed}={_EXAMPLES[needed]}",
            key=f"{prefix}.{needed}",
        )


@rule("dataset-source")
def dataset_source(config: RunConfig) -> Iterator[Finding]:
    """Require the field that says where the documents of the data set, and of a mixture's parts, are."""
    data = config.dataset
    yield from _missing_fields("dataset", data)
    if data.source is not Source.mixture:
        return
    if not data.parts:
        message = "dataset.source=mixture needs at least one part"
        yield Finding(message, "dataset.parts.NAME.path=FILE_OR_GLOB", key="dataset.parts")
    for name, part in data.parts.items():
        prefix = f"dataset.parts.{name}"
        if part.source is Source.mixture:
            message = "a mixture inside a mixture is not possible; name its data sets as parts of the outer one"
            path = "" if part.path else f" {prefix}.path=FILE_OR_GLOB"
            yield Finding(message, f"{prefix}.source=files{path}", key=f"{prefix}.source")
        yield from _missing_fields(prefix, part)


@rule("dataset-name-form")
def dataset_name_form(config: RunConfig) -> Iterator[Finding]:
    """Refuse a data set that is neither a name on the hub nor a folder; it would fail only when it is read."""
    for prefix, source in sources_of(config.dataset).items():
        if source.source is Source.hub and source.name and not _is_found_by(source.name, config):
            message = f"'{source.name}' is neither a folder nor organization/name of a data set on the hub"
            fix = f"{prefix}.name=ORG/NAME or {prefix}.source=files {prefix}.path=FILE_OR_GLOB"
            yield Finding(message, fix, key=f"{prefix}.name")


def _is_found_by(name: str, config: RunConfig) -> bool:
    """Whether the name is a valid hub name or a folder; other machines may have folders missing here."""
    is_elsewhere = config.launcher.name is not LauncherName.local
    return is_hub_name(name) or resolve_path(name).is_dir() or is_elsewhere


@rule("tokenizer-name-form", "model.tokenizer")
def tokenizer_name_form(config: RunConfig) -> Finding | None:
    """Refuse a tokenizer that is neither a name on the hub nor a folder; it would fail only when it is used."""
    name = config.model.tokenizer
    if not name or _is_found_by(name, config):
        return None
    message = f"'{name}' is neither a folder nor organization/name of a model on the hub"
    return Finding(message, "model.tokenizer=null or model.tokenizer=FOLDER")


# The fields of one kind of source alone, with the value that says nothing.
_READERS = {
    "path": (Source.files, "null"),
    "name": (Source.hub, "null"),
    "subset": (Source.hub, "null"),
    "revision": (Source.hub, "null"),
    "train_split": (Source.hub, "train"),
    "parts": (Source.mixture, "{}"),
}


@rule("dataset-field-ignored", is_error=False)
def dataset_field_ignored(config: RunConfig) -> Iterator[Finding]:
    """Warn about fields of other data sources.

    `path` belongs to files; `name`, `subset` and `revision` to the hub; `parts` to a mixture.
    """
    data = config.dataset
    for prefix, source in ({"dataset": data} | sources_of(data)).items():
        for field, (reader, none) in _READERS.items():
            value = getattr(source, field, None)
            is_within = source is not data and source.source is Source.mixture  # refused by `dataset-source`
            if value and value != none and source.source is not reader and not is_within:
                message = f"{prefix}.source={source.source.name} does not read {prefix}.{field}"
                fix = f"{prefix}.{field}={none} or {prefix}.source={reader.name}"
                yield Finding(message, fix, key=f"{prefix}.{field}")
    for field, none, what in (
        ("ignore_keys", "[]", "keys to ignore"),
        ("chat_template_kwargs", "{}", "chat template"),
        ("question_template", "null", "fields"),
        ("answer_template", "null", "fields"),
        ("format", "auto", None),
        ("text_field", "text", None),
    ):
        if getattr(data, field) == getattr(DatasetSource(), field):
            continue
        if what is not None and data.source is Source.synthetic:
            message = f"generated documents have no {what}"
            yield Finding(message, f"dataset.{field}={none}", key=f"dataset.{field}")
        if data.source is Source.mixture and not data.validation_path:
            message = f"each part of a mixture has its own: dataset.parts.NAME.{field}"
            yield Finding(message, f"dataset.{field}={none}", key=f"dataset.{field}")
    is_tokens = all(
        one.source is Source.synthetic or one.format is Format.pretokenized for one in sources_of(data).values()
    )
    if data.special_tokens_in_content is not SpecialText.auto and is_tokens:
        key = "dataset.special_tokens_in_content"
        yield Finding("the documents are tokens already", f"{key}=auto", key=key)
    if data.reasoning is not Reasoning.keep and is_tokens:
        key = "dataset.reasoning"
        yield Finding("the documents are tokens already", f"{key}=keep", key=key)


@rule("field-templates")
def check_field_templates(config: RunConfig) -> Iterator[Finding]:
    """Require templates of both question and answer for documents of fields, and none for others.

    They are Jinja over the fields of a document, such as dataset.question_template='{{question}}'. Each names a
    field.
    """
    for prefix, source in sources_of(config.dataset).items():
        problem = templates_problem(source, prefix)
        if problem is not None and source.source is not Source.synthetic:  # `dataset-field-ignored` warns of those
            key, message, fix = problem
            yield Finding(message, fix, key=key)


@rule("validation-twice")
def validation_twice(config: RunConfig) -> Finding | None:
    """Allow at most one way of holding out documents: with two, documents would be counted twice."""
    data = config.dataset
    nothing = {"validation_split": "null", "validation_path": "null", "validation_share": "0"}
    named = [field for field in nothing if getattr(data, field)]
    if len(named) < 2:
        return None
    return Finding(
        " and ".join(f"dataset.{field}={getattr(data, field)}" for field in named) + " both hold documents out",
        " ".join(f"dataset.{field}={nothing[field]}" for field in named[1:]),
        key=f"dataset.{named[0]}",
    )


@rule("validation-source")
def validation_source(config: RunConfig) -> Iterator[Finding]:
    """Refuse a split without the hub, the training split itself, or files in addition to generated documents.

    The loss on documents that are trained on proves nothing. Every source can hold out `validation_share`.
    """
    data = config.dataset
    wrong = []
    if data.validation_split and data.source is not Source.hub:
        wrong.append(("validation_split", f"dataset.source={data.source.name} has no splits"))
    elif data.validation_split and data.validation_split == data.train_split:
        wrong.append(("validation_split", "it is the split that is trained on"))
    if data.validation_path and data.source is Source.synthetic:
        wrong.append(("validation_path", "generated documents have tokens of their own"))
    for field, reason in wrong:
        fix = f"dataset.{field}=null dataset.validation_share=0.05"
        yield Finding(f"{getattr(data, field)} cannot be used: {reason}", fix, key=f"dataset.{field}")


@rule("train-on-without-roles", "dataset.train_on")
def train_on_without_roles(config: RunConfig) -> Finding | None:
    """Refuse assistant-only loss on text, which has no turns, and on tokens, which carry their own labels."""
    data = config.dataset
    if data.train_on is not TrainOn.assistant or data.format not in (Format.text, Format.pretokenized):
        return None
    message = f"assistant asks for turns, which dataset.format={data.format.name} does not have"
    return Finding(message, "dataset.train_on=auto")


@rule("system-prompt-ignored", "dataset.system_prompt", is_error=False)
def system_prompt_ignored(config: RunConfig) -> Finding | None:
    """Warn about a system prompt with text, tokens or generated documents: it goes before conversations only."""
    data = config.dataset
    has_turns = data.format not in (Format.text, Format.pretokenized) and data.source is not Source.synthetic
    if not data.system_prompt or has_turns:
        return None
    kind = "synthetic documents" if data.source is Source.synthetic else f"dataset.format={data.format.name}"
    return Finding(f"it is not used with {kind}", "dataset.system_prompt=null")


@rule("chat-template-not-found", "model.chat_template")
def chat_template_not_found(config: RunConfig) -> Finding | None:
    """Require the template's file, or the template of TRL, to exist: it decides which tokens are trained on."""
    template = config.model.chat_template
    if template in (None, CHATML_TEMPLATE, TRAINING_TEMPLATE):
        return None
    if is_template_name(template):
        names = library_templates()
        name = template.removeprefix(LIBRARY_PREFIX)
        if name in names:
            return None
        near = nearest(name, names)
        return Finding(
            f"TRL has no template '{name}'; it has: {', '.join(names)}",
            f"model.chat_template={LIBRARY_PREFIX}{near}" if near else "model.chat_template=null",
        )
    if resolve_path(template).is_file():
        return None
    return Finding(f"there is no file {resolve_path(template)}", "model.chat_template=null")


@rule("template-date-form", "model.template_date")
def template_date_form(config: RunConfig) -> Finding | None:
    """Refuse an invalid date; templates write it in place of today, so that a run's tokens never change."""
    text = config.model.template_date
    if _DAY.fullmatch(text):
        with suppress(ValueError):
            date.fromisoformat(text)
            return None
    return Finding(f"{text!r} is not a date of the form YYYY-MM-DD", "model.template_date=2024-07-26")
