"""Rules about the documents: where they are, and what is trained on and held out."""

from __future__ import annotations

from collections.abc import Iterator

from tunebook.config.choices import Format, Source, TrainOn
from tunebook.config.schema import RunConfig, sources_of
from tunebook.data.formats import FIELD_TEMPLATES_FIX, field_templates
from tunebook.data.mixture import check_validation
from tunebook.errors import RequestError
from tunebook.plan.rules.frame import Finding, rule


@rule("dataset-source", fix="type a file such as chats.jsonl, or a folder, or dataset=hub dataset.name=ORG/NAME")
def dataset_source(config: RunConfig) -> Iterator[Finding]:
    """Require the field that says where the documents of the data set, and of a mixture's parts, are.

    A mixture has no mixture as a part.
    """
    fields = {Source.files: "path", Source.hub: "name", Source.mixture: "parts"}
    for prefix, source in ({"dataset": config.dataset} | sources_of(config.dataset)).items():
        field = fields.get(source.source)
        if field is not None and not getattr(source, field, None):
            yield Finding(f"source={source.source.name} needs {prefix}.{field}", f"{prefix}.{field}")


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
        yield f"train_on=assistant needs turns, which dataset.format={data.format.name} does not have"
