"""Rules about the documents: where they are, and what is trained on and held out."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tunebook.config.book import resolve_path
from tunebook.config.choices import Format, Source, TrainOn
from tunebook.config.schema import RunConfig, sources_of, starts_elsewhere
from tunebook.data.formats import FIELD_TEMPLATES_FIX, field_templates
from tunebook.data.mixture import check_validation
from tunebook.errors import RequestError
from tunebook.plan.rules.frame import Finding, rule

# Same check as huggingface_hub's, whose import would slow down a plan. Some old models have no owner.
_HUB_NAME = re.compile(r"(\b[\w.-]{1,96}\b/)?\b[\w.-]{1,96}\b", re.ASCII)


@rule("dataset-source", fix="dataset.path=FILE_OR_GLOB, dataset.name=ORG/NAME or dataset.parts.NAME.path=FILE_OR_GLOB")
def dataset_source(config: RunConfig) -> Iterator[Finding]:
    """Require the field that says where the documents of the data set, and of a mixture's parts, are.

    A mixture has no mixture as a part.
    """
    fields = {Source.files: "path", Source.hub: "name", Source.mixture: "parts"}
    for prefix, source in ({"dataset": config.dataset} | sources_of(config.dataset)).items():
        field = fields.get(source.source)
        if field is not None and not getattr(source, field, None):
            yield Finding(f"source={source.source.name} needs {prefix}.{field}", f"{prefix}.{field}")


@rule("hub-name-form", fix="ORG/NAME; model.path=FOLDER for a model, dataset=jsonl dataset.path=FILE for documents")
def hub_name_form(config: RunConfig) -> Iterator[Finding]:
    """Refuse a name that the hub cannot have and that is no folder.

    The hub would refuse it only when it is used. A model in a folder is named by `model.path`. A data set or a
    tokenizer may be a folder by its name; other machines may have folders that are missing here.
    """
    model, upload = config.model, "training.push_to_hub"
    folders = {"model.tokenizer": model.tokenizer}
    for prefix, source in sources_of(config.dataset).items():
        folders[f"{prefix}.name"] = source.name if source.source is Source.hub else None
    names = {"model.name": None if model.path else model.name, upload: config.training.push_to_hub}
    for key, name in (names | folders).items():
        if not name or (key in folders and (starts_elsewhere(config) or resolve_path(name).is_dir())):
            continue
        if not _is_hub_name(name) or (key == upload and "/" not in name):
            yield Finding(f"'{name}' does not have the form organization/name of the hub", key)


def _is_hub_name(name: str) -> bool:
    is_refused = "--" in name or ".." in name or name.endswith(".git")
    return _HUB_NAME.fullmatch(name) is not None and not is_refused


@rule("field-templates", fix=FIELD_TEMPLATES_FIX)
def check_field_templates(config: RunConfig) -> Iterator[Finding]:
    """Require templates of both question and answer for documents of fields, and none for others.

    They are Jinja over the fields of a document, such as dataset.question_template='{{question}}'.
    """
    for prefix, source in sources_of(config.dataset).items():
        try:
            field_templates(source, prefix)
        except RequestError as error:
            yield Finding(str(error), f"{prefix}.question_template")


@rule("validation-source", "dataset.validation_share", "only dataset.validation_share=0.05")
def validation_source(config: RunConfig) -> Iterator[str]:
    """Allow one way of holding out documents, and only one that the source has.

    A split needs the hub, and generated documents have no files. The loss on the training split proves nothing. Every
    source can hold out `validation_share`.
    """
    try:
        check_validation(config.dataset)
    except RequestError as error:
        yield str(error)


@rule("train-on-without-roles", "dataset.train_on", "dataset.train_on=auto")
def train_on_without_roles(config: RunConfig) -> Iterator[str]:
    """Refuse assistant-only loss on text, which has no turns, and on tokens, which carry their own labels."""
    data = config.dataset
    if data.train_on is TrainOn.assistant and data.format in (Format.text, Format.pretokenized):
        yield f"assistant asks for turns, which dataset.format={data.format.name} does not have"
