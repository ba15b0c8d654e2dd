"""Rules about where the model and the documents come from."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from datetime import date

from tunebook.config.book import is_in_book, resolve_path
from tunebook.config.choices import Format, LauncherName, Source, SpecialText, TrainOn
from tunebook.config.override_text import typed
from tunebook.config.schema import DatasetSource, ModelConfig, RunConfig, sources_of
from tunebook.model.base_config import model_folder_problem, why_not_causal
from tunebook.plan.rules.frame import Finding, Level, Rule, another_model, rule

# As huggingface_hub checks it, whose import a plan does not wait for. Some old models have no owner.
_DAY = re.compile(r"\d{4}-\d{2}-\d{2}", re.ASCII)
_HUB_NAME = re.compile(r"(\b[\w.-]{1,96}\b/)?\b[\w.-]{1,96}\b", re.ASCII)


@rule(
    "model-not-named",
    summary="A model is named exactly once: by its name on the hub or by its folder.",
    why="With both, it would be a guess which weights are trained; with neither there is nothing to train.",
    advice="Set model.name=organisation/name, or model.path=FOLDER, and null for the other.",
)
def model_not_named(config: RunConfig) -> Finding | None:
    """Exactly one of `model.name` and `model.path`."""
    name, path = config.model.name, config.model.path
    if name and path:
        message = f"model.name={name} and model.path={path} name two models"
        return Finding(
            key="model.name", message=message, fix=f"model.name=null or model=hub model.name={name} model.path=null"
        )
    if not name and not path:
        recipe = " or the name of a recipe as the first word, such as quickstart" if config.recipe is None else ""
        fix = f"model.path=FOLDER or model.name=ORG/NAME{recipe}"
        return Finding(key="model.name", message="no model is named", fix=fix)
    return None


@rule(
    "model-name-is-folder",
    summary="model.name holds a folder's path, which belongs in model.path.",
    why="A name is looked up on the hub and in its cache; a folder is read as it is and never looked up.",
    advice="Move the value to model.path.",
)
def model_name_is_folder(config: RunConfig) -> Finding | None:
    """A name that starts like a path."""
    name = config.model.name
    if not name or config.model.path or not _is_path(name):
        return None
    return Finding(
        key="model.name", message=f"{name} is a folder, not a name on the hub", fix=f"model.name=null model.path={name}"
    )


def _is_path(name: str) -> bool:
    return name.startswith(("/", "./", "../", "~")) or is_in_book(name)


@rule(
    "model-name-form",
    summary="model.name has not the form of a name on the hub.",
    why="A model on the hub is called organisation/name (some old ones only name), of the letters a to z, digits, - _ "
    "and . alone; nothing else can be looked up there, which would be found out when the model is loaded.",
    advice="Correct model.name, or name a folder with model.path.",
)
def model_name_form(config: RunConfig) -> Finding | None:
    """What the hub would refuse to look up; a path that looks like one has a rule of its own."""
    name = config.model.name
    if not name or config.model.path or _is_path(name) or _is_hub_name(name):
        return None
    is_folder = model_folder_problem(ModelConfig(path=name)) is None
    fix = f"model.name=null {typed('model.path', name)}" if is_folder else "model.name=ORG/NAME"
    message = f"'{name}' has not the form organisation/name of a model on the hub"
    return Finding(key="model.name", message=message, fix=fix)


def _is_hub_name(name: str) -> bool:
    is_refused = "--" in name or ".." in name or name.endswith(".git")
    return _HUB_NAME.fullmatch(name) is not None and not is_refused


@rule(
    "model-folder",
    summary="model.path names no folder with a model in it.",
    why="A model is a folder with a config.json, which holds the sizes of its layers, and unless model.weights=random "
    "its weights.",
    advice="Correct the path, or download the model with `hf download ORG/NAME --local-dir FOLDER`.",
)
def model_folder(config: RunConfig) -> Finding | None:
    """A folder that is not there, or has no config.json; other machines may have one that this one has not."""
    model = config.model
    if not model.path or (config.launcher.name is not LauncherName.local and model.facts is not None):
        return None
    problem = model_folder_problem(model)
    return Finding(key="model.path", message=problem, fix="model.path=FOLDER") if problem else None


@rule(
    "model-not-causal",
    summary="A model that is not made to continue a text.",
    why="Training here teaches a causal language model its next token. A model with another head (a class, a score), "
    "an encoder, whose attention looks both ways and sees the token it is to predict, one of encoder and decoder, or "
    "one of images has another loss, or none that means anything.",
    advice="Name a causal language model: its config.json names a class such as LlamaForCausalLM. An encoder is one "
    'only where its config.json says "is_decoder": true.',
)
def model_not_causal(config: RunConfig) -> Finding | None:
    """A config.json that names another head, or an encoder; what transformers has no such class of is found earlier."""
    reason = why_not_causal(config.model)
    if reason is None:
        return None
    key = "model.path" if config.model.path else "model.name"
    return Finding(key=key, message=f"{reason}; name a causal language model", fix=another_model(config))


@rule(
    "length-beyond-model",
    summary="training.max_length is longer than the model's positions.",
    why="Beyond max_position_embeddings a model has never seen a position: learned position embeddings crash, rotary "
    "ones extrapolate and the loss of the far tokens means nothing.",
    advice="Shorten training.max_length, or use a model made for longer texts.",
)
def length_beyond_model(config: RunConfig) -> Finding | None:
    """Compare with the facts; rows may be longer, because positions start again with each document."""
    facts, length = config.model.facts, config.training.max_length
    if facts is None or length <= facts.max_position_embeddings or facts.max_position_embeddings < 2:
        return None
    return Finding(
        key="training.max_length",
        message=f"{length} tokens are more than the {facts.max_position_embeddings} positions of {facts.architecture}",
        fix=f"training.max_length={facts.max_position_embeddings}",
    )


_NEEDED = {Source.files: "path", Source.hub: "name"}
_EXAMPLES = {"path": "FILE_OR_GLOB", "name": "ORG/NAME"}


def _missing_fields(prefix: str, source: DatasetSource) -> Iterator[Finding]:
    needed = _NEEDED.get(source.source)
    if needed is not None and not getattr(source, needed):
        yield Finding(
            key=f"{prefix}.{needed}",
            message=f"{prefix}.source={source.source.name} needs {prefix}.{needed}",
            fix=f"{prefix}.{needed}={_EXAMPLES[needed]}",
        )


@rule(
    "dataset-source",
    summary="A data source needs the field that says where its documents are.",
    why="source=files reads dataset.path, source=hub looks up dataset.name, source=mixture draws from dataset.parts; "
    "without it there is nothing to read.",
    advice="Set the field that the message names.",
)
def dataset_source(config: RunConfig) -> Iterator[Finding]:
    """The data set's own field, and those of a mixture's parts."""
    data = config.dataset
    yield from _missing_fields("dataset", data)
    if data.source is not Source.mixture:
        return
    if not data.parts:
        message = "dataset.source=mixture needs at least one part"
        yield Finding(key="dataset.parts", message=message, fix="dataset.parts.NAME.path=FILE_OR_GLOB")
    for name, part in data.parts.items():
        prefix = f"dataset.parts.{name}"
        if part.source is Source.mixture:
            message = "a mixture inside a mixture is not possible; name its data sets as parts of the outer one"
            path = "" if part.path else f" {prefix}.path=FILE_OR_GLOB"
            yield Finding(key=f"{prefix}.source", message=message, fix=f"{prefix}.source=files{path}")
        yield from _missing_fields(prefix, part)


@rule(
    "dataset-name-form",
    summary="dataset.name is neither the form of a name on the hub nor a folder.",
    why="A data set on the hub is called organisation/name (some old ones only name), of the letters a to z, digits, "
    "- _ and . alone; nothing else can be looked up there, which would be found out when the documents are read.",
    advice="Correct the name, or name a folder in the hub's layout, or files with dataset.source=files dataset.path=.",
)
def dataset_name_form(config: RunConfig) -> Iterator[Finding]:
    """The data set's own name, and those of a mixture's parts."""
    for prefix, source in sources_of(config.dataset).items():
        if source.source is Source.hub and source.name and not _is_found_by(source.name, config):
            message = f"'{source.name}' has not the form organisation/name of a data set on the hub, and is no folder"
            fix = f"{prefix}.name=ORG/NAME or {prefix}.source=files {prefix}.path=FILE_OR_GLOB"
            yield Finding(key=f"{prefix}.name", message=message, fix=fix)


def _is_found_by(name: str, config: RunConfig) -> bool:
    """Whether the hub would look a name up, or it is a folder; other machines may have one that this one has not."""
    is_elsewhere = config.launcher.name is not LauncherName.local
    return _is_hub_name(name) or resolve_path(name).is_dir() or is_elsewhere


@rule(
    "tokenizer-name-form",
    summary="model.tokenizer is neither the form of a name on the hub nor a folder.",
    why="Another model's tokenizer is looked up by organisation/name on the hub, or read from a folder; nothing else "
    "can be, which would be found out when the documents are tokenised.",
    advice="Correct the name, name a folder with a tokenizer.json, or leave null for the model's own.",
)
def tokenizer_name_form(config: RunConfig) -> Finding | None:
    """Another tokenizer than the model's own."""
    name = config.model.tokenizer
    if not name or _is_found_by(name, config):
        return None
    message = f"'{name}' has not the form organisation/name of a model on the hub, and is no folder"
    return Finding(key="model.tokenizer", message=message, fix="model.tokenizer=null or model.tokenizer=FOLDER")


@rule(
    "dataset-field-ignored",
    level=Level.warning,
    summary="A data field is set that the chosen source does not read.",
    why="dataset.path belongs to source=files, dataset.name to source=hub, dataset.parts to source=mixture. "
    "Generated documents have no keys, and documents of tokens no text.",
    advice="Set dataset.source to the one that reads the field, or remove the field.",
)
def dataset_field_ignored(config: RunConfig) -> Iterator[Finding]:
    """Fields of the other sources."""
    data = config.dataset
    readers = {"path": Source.files, "name": Source.hub, "subset": Source.hub, "parts": Source.mixture}
    for field, reader in readers.items():
        value = getattr(data, field)
        if value and data.source is not reader:
            message = f"dataset.source={data.source.name} does not read dataset.{field}"
            fix = f"dataset.{field}=" + ("{}" if field == "parts" else "null")
            yield Finding(key=f"dataset.{field}", message=message, fix=f"{fix} or dataset.source={reader.name}")
    if data.ignore_keys and data.source is Source.synthetic:
        message = "generated documents have no keys to ignore"
        yield Finding(key="dataset.ignore_keys", message=message, fix="dataset.ignore_keys=[]")
    if data.ignore_keys and data.source is Source.mixture and not data.validation_path:
        message = "each part of a mixture has its own: dataset.parts.NAME.ignore_keys"
        yield Finding(key="dataset.ignore_keys", message=message, fix="dataset.ignore_keys=[]")
    is_tokens = all(
        one.source is Source.synthetic or one.format is Format.pretokenized for one in sources_of(data).values()
    )
    if data.special_tokens_in_content is not SpecialText.auto and is_tokens:
        key = "dataset.special_tokens_in_content"
        yield Finding(key=key, message="the documents are tokens already", fix=f"{key}=auto")


@rule(
    "validation-twice",
    summary="The validation part comes from exactly one place.",
    why="A split, files of their own and a held-out share exclude each other: documents would be counted twice.",
    advice="Keep one of dataset.validation_split, dataset.validation_path and dataset.validation_share.",
)
def validation_twice(config: RunConfig) -> Finding | None:
    """At most one way of holding documents out."""
    data = config.dataset
    nothing = {"validation_split": "null", "validation_path": "null", "validation_share": "0"}
    named = [field for field in nothing if getattr(data, field)]
    if len(named) < 2:
        return None
    return Finding(
        key=f"dataset.{named[0]}",
        message=" and ".join(f"dataset.{field}={getattr(data, field)}" for field in named) + " both hold documents out",
        fix=" ".join(f"dataset.{field}={nothing[field]}" for field in named[1:]),
    )


@rule(
    "validation-source",
    summary="A way of validating that this data source does not have.",
    why="Splits exist on the hub only; generated documents have no files of their own kind; and the split that is "
    "trained on proves nothing. Any source can hold out a share.",
    advice="Use dataset.validation_share, which works with every source.",
)
def validation_source(config: RunConfig) -> Iterator[Finding]:
    """A split without hub, the training split itself, or files beside generated documents."""
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
        yield Finding(key=f"dataset.{field}", message=f"{getattr(data, field)} cannot be used: {reason}", fix=fix)


@rule(
    "synthetic-settings",
    summary="The shortest generated document is longer than the longest.",
    why="Lengths are drawn and then clipped to synthetic.min_tokens..max_tokens, which must be a range.",
    advice="Raise dataset.synthetic.max_tokens.",
)
def synthetic_settings(config: RunConfig) -> Finding | None:
    """`min_tokens` at most `max_tokens`."""
    made = config.dataset.synthetic
    if config.dataset.source is not Source.synthetic or made.min_tokens <= made.max_tokens:
        return None
    return Finding(
        key="dataset.synthetic.min_tokens",
        message=f"min_tokens={made.min_tokens} is above max_tokens={made.max_tokens}",
        fix=f"dataset.synthetic.max_tokens={made.min_tokens}",
    )


@rule(
    "train-on-without-roles",
    summary="dataset.train_on=assistant on documents that have no assistant.",
    why="Plain text has no turns, and pre-tokenised documents carry their own labels.",
    advice="Leave dataset.train_on at auto, or name a format that has roles.",
)
def train_on_without_roles(config: RunConfig) -> Finding | None:
    """Assistant-only loss on text or tokens."""
    data = config.dataset
    if data.train_on is not TrainOn.assistant or data.format not in (Format.text, Format.pretokenized):
        return None
    message = f"assistant asks for turns, which dataset.format={data.format.name} does not have"
    return Finding(key="dataset.train_on", message=message, fix="dataset.train_on=auto")


@rule(
    "system-prompt-ignored",
    level=Level.warning,
    summary="A system prompt is set, but the documents are not conversations.",
    why="It is put before conversations without a system turn; text and tokens are taken as they are.",
    advice="Remove dataset.system_prompt.",
)
def system_prompt_ignored(config: RunConfig) -> Finding | None:
    """A system prompt with text, tokens or generated documents."""
    data = config.dataset
    has_turns = data.format not in (Format.text, Format.pretokenized) and data.source is not Source.synthetic
    if not data.system_prompt or has_turns:
        return None
    kind = "synthetic documents" if data.source is Source.synthetic else f"dataset.format={data.format.name}"
    return Finding(key="dataset.system_prompt", message=f"it is not used with {kind}", fix="dataset.system_prompt=null")


@rule(
    "chat-template-not-found",
    summary="model.chat_template names a file that does not exist.",
    why="The template decides which tokens a conversation becomes; another one would train another model.",
    advice="Give the path of a Jinja file, or null for the tokenizer's own template.",
)
def chat_template_not_found(config: RunConfig) -> Finding | None:
    """The template's file."""
    template = config.model.chat_template
    if template is None or resolve_path(template).is_file():
        return None
    message = f"there is no file {resolve_path(template)}"
    return Finding(key="model.chat_template", message=message, fix="model.chat_template=null")


@rule(
    "template-date-form",
    summary="model.template_date is no date.",
    why="A chat template that writes today's date writes this one, so that a run gives the same tokens on every day.",
    advice="Give a day as YYYY-MM-DD, such as 2024-07-26.",
)
def template_date_form(config: RunConfig) -> Finding | None:
    """A day that is none."""
    text = config.model.template_date
    if _DAY.fullmatch(text):
        with suppress(ValueError):
            date.fromisoformat(text)
            return None
    message = f"{text!r} is no day written as YYYY-MM-DD"
    return Finding(key="model.template_date", message=message, fix="model.template_date=2024-07-26")


RULES: tuple[Rule, ...] = (
    model_not_named,
    model_name_is_folder,
    model_name_form,
    model_folder,
    model_not_causal,
    length_beyond_model,
    dataset_source,
    dataset_name_form,
    tokenizer_name_form,
    dataset_field_ignored,
    validation_twice,
    validation_source,
    synthetic_settings,
    train_on_without_roles,
    system_prompt_ignored,
    chat_template_not_found,
    template_date_form,
)
