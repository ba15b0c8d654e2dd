"""The formats of documents, how one is detected, and how each becomes a row of a corpus kind.

To add a format: a member of `config.choices.Format`, a function that turns a record into a row, and a line in SPECS.
Documents of other fields become a question and an answer by two templates (`FieldTemplates`). Null counts as absent,
because Parquet has every column in every row. `keys.py` decides about other keys.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tunebook.config.choices import Format
from tunebook.config.override_text import typed
from tunebook.config.schema import DatasetSource
from tunebook.data.corpus import CorpusKind, Row
from tunebook.data.keys import KeyAccount, is_empty
from tunebook.data.problems import DocumentError
from tunebook.data.token_documents import TOKEN_KEYS, token_row
from tunebook.data.tools import read_template_kwargs, read_tools
from tunebook.data.turns import Turn, check_conversation, check_text, make_turn, read_turns
from tunebook.errors import RequestError

Record = Mapping[str, Any]
TEXT_FIELD = "<dataset.text_field>"  # the configured field in SPECS
TOOL_KEYS = ("tools", "functions")
KWARGS_KEY = "chat_template_kwargs"
_TEMPLATE_FUNCTIONS = ("range", "namespace")  # of Jinja, in templates over fields
CONVERSATION_KEYS = (*TOOL_KEYS, KWARGS_KEY)  # what conversations of every format may have


class FieldTemplates:
    """A question and an answer as Jinja over a document's fields. Raises: jinja2.TemplateSyntaxError."""

    def __init__(self, templates: Mapping[str, str]) -> None:
        from jinja2 import StrictUndefined
        from jinja2.meta import find_undeclared_variables
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined)
        functions = {name: environment.globals[name] for name in _TEMPLATE_FUNCTIONS}
        environment.globals.clear()  # a field may have the name of another one, and one writes random text
        environment.globals.update(functions)
        self._templates = {key: environment.from_string(text) for key, text in templates.items()}
        used = [find_undeclared_variables(environment.parse(text)) for text in templates.values()]
        self.names = frozenset().union(*used) - functions.keys()  # of the fields

    def turns(self, record: Record) -> list[Turn]:
        """The user's and the assistant's turn. Raises: DocumentError."""
        from jinja2 import TemplateError

        fields = {name: value for name, value in record.items() if value is not None}
        turns = []
        for role, (key, template) in zip(("user", "assistant"), self._templates.items(), strict=True):
            try:
                text = template.render(fields)
            except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
                raise DocumentError(
                    f"{key} cannot be rendered: {error}; its keys are: {_keys(record)}. Test a field that some "
                    "documents lack by {% if FIELD is defined %}",
                    problem_id="data-missing-field",
                ) from error
            turns.append(make_turn(role, text, key))
        return turns


def field_templates(source: DatasetSource, key: str) -> FieldTemplates | None:
    """The templates of a source configured under `key`; None for other formats. Raises: RequestError."""
    problem = templates_problem(source, key)
    if problem is not None:
        place, message, fix = problem
        raise RequestError(f"{place}: {message}; type {fix}", problem_id="field-templates")
    given = _given_templates(source, key)
    return FieldTemplates(given) if given else None


def templates_problem(source: DatasetSource, key: str) -> tuple[str, str, str] | None:
    """What is wrong with a source's templates: the key, a message, and what to type instead."""
    given = _given_templates(source, key)
    example = {
        f"{key}.{name}_template": typed(f"{key}.{name}_template", f"{{{{{name}}}}}") for name in ("question", "answer")
    }
    if given and source.format not in (Format.auto, Format.fields):
        place = next(iter(given))
        return place, f"{key}.format={source.format.name} does not read it", f"{key}.format=fields or {place}=null"
    missing = [place for place in example if place not in given]
    if missing and (given or source.format is Format.fields):
        message = "documents of fields need a question and an answer"
        return missing[0], message, " ".join(example[place] for place in missing)
    for place, text in given.items():
        from jinja2 import TemplateSyntaxError

        try:
            names = FieldTemplates({place: text}).names
        except TemplateSyntaxError as error:
            return place, f"it is not valid Jinja: {error.message}", example[place]
        if not names:
            return place, "it holds no field, so every document would have the same text", example[place]
    return None


def _given_templates(source: DatasetSource, key: str) -> dict[str, str]:
    templates = {"question_template": source.question_template, "answer_template": source.answer_template}
    return {f"{key}.{name}": text for name, text in templates.items() if text is not None}


@dataclass(frozen=True, kw_only=True)
class FormatSettings:
    """The settings by which a record becomes a row."""

    text_field: str = "text"
    system_prompt: str | None = None
    vocab_size: int | None = None  # None: token ids are only checked for being 32-bit integers
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # of every document; its own come first
    fields: FieldTemplates | None = None  # of format=fields


Convert = Callable[[Record, KeyAccount, FormatSettings], tuple[CorpusKind, Row]]


@dataclass(frozen=True, kw_only=True)
class FormatSpec:
    """The keys a document of a format must and may have, and its conversion."""

    needs: tuple[str, ...]
    may_have: tuple[str, ...] = ()
    convert: Convert


class Normalizer:
    """Turns the records of one source into rows of one kind. The first document decides both, if they are not named."""

    def __init__(self, format: Format, settings: FormatSettings, account: KeyAccount | None = None) -> None:
        self.format = format
        self.settings = settings
        self.account = account or KeyAccount(known_columns(settings))
        self.kind: CorpusKind | None = None
        if settings.fields is not None:
            self.format = Format.fields
        self.was_detected = self.format is Format.auto
        self._read_keys = {
            format: frozenset(_needed_keys(format, settings.text_field)).union(spec.may_have)
            for format, spec in SPECS.items()
        }
        if settings.fields is not None:
            self._read_keys[Format.fields] = settings.fields.names

    def row(self, record: Record) -> Row:
        """One record as a row, without its origin. Raises: DocumentError."""
        record = self.account.without_ignored(record)
        if self.format is Format.auto:
            self.format = detect_format(record, self.settings.text_field)
        self._check_keys(record)
        # First: a refused key often explains another problem, such as an empty text next to a tool call.
        self.account.check(record, self._read_keys[self.format])
        kind, row = self._convert(record)
        if self.kind is None:
            self.kind = kind
        elif kind is not self.kind:
            raise DocumentError(f"a document of kind {kind.value}, but those before it are of kind {self.kind.value}")
        return row

    def _convert(self, record: Record) -> tuple[CorpusKind, Row]:
        convert = _from_fields if self.format is Format.fields else SPECS[self.format].convert
        kind, row = convert(record, self.account, self.settings)
        if kind is not CorpusKind.conversation:
            return kind, row
        turns, prompt = row["messages"], self.settings.system_prompt
        if prompt is not None and turns[0]["role"] != "system":
            turns.insert(0, {"role": "system", "content": prompt, "train": False, "details": None})
        if self.settings.template_kwargs:
            own = json.loads(row["template_kwargs"] or "{}")
            row["template_kwargs"] = json.dumps({**self.settings.template_kwargs, **own}, ensure_ascii=False)
        return kind, row

    def _check_keys(self, record: Record) -> None:
        if self.format is Format.fields:  # the templates tell what is missing
            return
        missing = [key for key in _needed_keys(self.format, self.settings.text_field) if record.get(key) is None]
        if not missing:
            return
        names = " and ".join(f"'{key}'" for key in missing)
        found = " by the keys of the first document; name one format a source" if self.was_detected else ""
        raise DocumentError(
            f"missing field {names} (format {self.format.value}{found}); its keys are: {_keys(record)}",
            problem_id="data-missing-field",
        )


def detect_format(record: Record, text_field: str) -> Format:
    """The format of a document by its keys. Raises: DocumentError naming the formats and the keys each needs."""
    for format in SPECS:
        if all(record.get(key) is not None for key in _needed_keys(format, text_field)):
            return format
    formats = "\n".join(f"    {format.value}: {', '.join(_needed_keys(format, text_field))}" for format in SPECS)
    raise DocumentError(
        f"its format is not known: its keys are: {_keys(record)}. The formats, and the keys each needs:\n{formats}\n"
        "  Rename its keys, for plain text type dataset.format=text dataset.text_field=KEY, or write a question and an "
        "answer from its keys: 'dataset.question_template=\"{{KEY}}\"' 'dataset.answer_template=\"{{KEY}}\"'",
        problem_id="data-unknown-format",
    )


def known_columns(settings: FormatSettings) -> frozenset[str]:
    """Every key that is read: the templates' fields, or those of some format."""
    if settings.fields is not None:
        return settings.fields.names
    known = {key for spec in SPECS.values() for key in (*spec.needs, *spec.may_have)}
    return frozenset(known - {TEXT_FIELD} | {settings.text_field})


def _needed_keys(format: Format, text_field: str) -> list[str]:
    return [text_field if key == TEXT_FIELD else key for key in SPECS[format].needs]


def _keys(record: Record) -> str:
    return ", ".join(key for key, value in record.items() if value is not None) or "none"


def _conversation(turns: list[Turn], record: Record) -> tuple[CorpusKind, Row]:
    """A conversation with the tools and template settings of its document, both as JSON text."""
    places = [key for key in TOOL_KEYS if not is_empty(record.get(key))]
    if len(places) > 1:
        raise DocumentError(f"the tools are in two places, {' and '.join(places)}; keep one")
    tools = read_tools(record[places[0]], places[0]) if places else []
    kwargs = None if is_empty(record.get(KWARGS_KEY)) else read_template_kwargs(record[KWARGS_KEY])
    row = {
        "messages": check_conversation(turns),
        "tools": json.dumps(tools, ensure_ascii=False) if tools else None,
        "template_kwargs": json.dumps(kwargs, ensure_ascii=False) if kwargs else None,
    }
    return CorpusKind.conversation, row


def _system_turns(record: Record) -> list[Turn]:
    return [] if _is_blank(record.get("system")) else [make_turn("system", record["system"], "system")]


def _is_blank(value: object) -> bool:
    """Whether an optional text is absent: data sets write null, an empty text or a space."""
    return value is None or (isinstance(value, str) and not value.strip())


def _from_text(record: Record, account: KeyAccount, settings: FormatSettings) -> tuple[CorpusKind, Row]:
    field = settings.text_field
    return CorpusKind.text, {"text": check_text(record[field], f"'{field}'")}


def _from_tokens(record: Record, account: KeyAccount, settings: FormatSettings) -> tuple[CorpusKind, Row]:
    return CorpusKind.tokens, token_row(record, settings.vocab_size)


def _from_fields(record: Record, account: KeyAccount, settings: FormatSettings) -> tuple[CorpusKind, Row]:
    assert settings.fields is not None
    return _conversation(settings.fields.turns(record), {})


def _from_turns(field: str) -> Convert:
    def convert(record: Record, account: KeyAccount, settings: FormatSettings) -> tuple[CorpusKind, Row]:
        turns = read_turns(record[field], field, account)
        return _conversation(_system_turns(record) + turns if turns else turns, record)

    return convert


def _from_alpaca(record: Record, account: KeyAccount, settings: FormatSettings) -> tuple[CorpusKind, Row]:
    """`input` follows the instruction after an empty line; `history` holds earlier [question, answer] pairs."""
    turns = _system_turns(record)
    history = record.get("history") or []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise DocumentError("'history' must be a list of [question, answer] pairs")
    for pair in history:
        turns += [make_turn("user", pair[0], "history"), make_turn("assistant", pair[1], "history")]
    question = check_text(record["instruction"], "'instruction'")
    if not _is_blank(record.get("input")):
        question += "\n\n" + check_text(record["input"], "'input'")
    turns += [make_turn("user", question, "instruction"), make_turn("assistant", record["output"], "output")]
    return _conversation(turns, record)


def _from_prompt_completion(record: Record, account: KeyAccount, settings: FormatSettings) -> tuple[CorpusKind, Row]:
    """Two texts, or two lists of turns, of which only the completion's are trained on."""
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        before = _system_turns(record) + read_turns(prompt, "prompt", account, is_prompt=True)
        after = read_turns(completion, "completion", account)
        if not any(turn["role"] == "assistant" for turn in after):
            raise DocumentError("'completion' has no assistant turn, so nothing to train on")
        return _conversation(before + after, record)
    if isinstance(prompt, list) or isinstance(completion, list):
        raise DocumentError("'prompt' and 'completion' must be two texts or two lists of turns, not one of each")
    for key in ("system", *CONVERSATION_KEYS):
        if not _is_blank(record.get(key)) and not is_empty(record[key]):
            raise DocumentError(
                f"'{key}' goes with turns, and 'prompt' is a text: write 'prompt' and 'completion' as lists of turns"
            )
    row = {"prompt": check_text(prompt, "'prompt'"), "completion": check_text(completion, "'completion'")}
    return CorpusKind.prompt_completion, row


# In the order of detection: the most specific keys first.
SPECS: dict[Format, FormatSpec] = {
    Format.pretokenized: FormatSpec(
        needs=("input_ids",), may_have=TOKEN_KEYS, convert=_from_tokens
    ),
    Format.sharegpt: FormatSpec(
        needs=("conversations",), may_have=("system", *CONVERSATION_KEYS), convert=_from_turns("conversations")
    ),
    Format.messages: FormatSpec(
        needs=("messages",), may_have=("system", *CONVERSATION_KEYS), convert=_from_turns("messages")
    ),
    Format.prompt_completion: FormatSpec(
        needs=("prompt", "completion"), may_have=("system", *CONVERSATION_KEYS), convert=_from_prompt_completion
    ),
    Format.alpaca: FormatSpec(
        needs=("instruction", "output"), may_have=("input", "system", "history", *CONVERSATION_KEYS),
        convert=_from_alpaca,
    ),
    Format.text: FormatSpec(needs=(TEXT_FIELD,), convert=_from_text),
}  # fmt: skip
