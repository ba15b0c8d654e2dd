"""The formats of documents, how one is detected, and how each becomes a row of a corpus kind.

To add a format: a member of `config.choices.Format`, a function that turns a record into a row, and a line in SPECS.
Documents of other fields become a question and an answer by two templates (`FieldTemplates`). Null counts as absent,
because Parquet has every column in every row. `problems.py` decides about other keys.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tunebook.config.choices import Format
from tunebook.config.schema import DatasetSource
from tunebook.data.corpus import CorpusKind, Row, num_shared, way_to_one_kind
from tunebook.data.images import IMAGE_KEYS, ImageReader, place_images
from tunebook.data.pretokenized import TOKEN_KEYS, read_tokens
from tunebook.data.problems import DocumentError, KeyAccount, is_empty, type_name
from tunebook.data.turns import (
    Turn,
    check_conversation,
    check_text,
    make_turn,
    read_template_kwargs,
    read_tools,
    read_turns,
)
from tunebook.errors import RequestError

Record = Mapping[str, Any]
TEXT_FIELD = "<dataset.text_field>"  # the configured field in SPECS
TOOL_KEYS = ("tools", "functions")
KWARGS_KEY = "chat_template_kwargs"
CONVERSATION_KEYS = ("system", *TOOL_KEYS, KWARGS_KEY, *IMAGE_KEYS)  # what conversations of every format may have
FIELD_TEMPLATES_FIX = """'dataset.question_template="{{QUESTION}}"' 'dataset.answer_template="{{ANSWER}}"'"""


class FieldTemplates:
    """A question and an answer as Jinja over a document's fields. Raises: jinja2.TemplateSyntaxError."""

    def __init__(self, templates: Mapping[str, str]) -> None:
        from jinja2 import StrictUndefined
        from jinja2.meta import find_undeclared_variables
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, finalize=_refuse_lists)
        environment.globals.clear()  # a field may have the name of a function, and one writes random text
        self._templates = {key: environment.from_string(text) for key, text in templates.items()}
        used = [find_undeclared_variables(environment.parse(text)) for text in templates.values()]
        self.names = frozenset().union(*used)  # of the fields

    def turns(self, record: Record) -> list[Turn]:
        """The user's and the assistant's turn. Raises: DocumentError."""
        fields = {name: value for name, value in record.items() if value is not None}
        turns = []
        for role, (key, template) in zip(("user", "assistant"), self._templates.items(), strict=True):
            try:
                text = template.render(fields)
            except Exception as error:  # templates raise anything
                raise DocumentError(
                    f"{key} cannot be rendered: {error}; its keys are: {_keys(record)}. Test a field that some "
                    "documents lack by {% if FIELD is defined %}",
                    problem_id="data-missing-field",
                ) from error
            turns.append(make_turn(role, text, key))
        return turns


def _refuse_lists(value: Any) -> Any:
    """A value that a template writes. Raises: TypeError for one that Python would write in its own form."""
    if isinstance(value, list | dict):
        raise TypeError(f"it would write {type_name(value)}; name an entry, such as FIELD[0], or write FIELD | tojson")
    return value


def field_templates(source: DatasetSource, key: str) -> FieldTemplates | None:
    """The templates of a source configured under `key`; None for other formats. Raises: RequestError."""
    from jinja2 import TemplateSyntaxError

    templates = {f"{key}.question_template": source.question_template, f"{key}.answer_template": source.answer_template}
    given = {place: text for place, text in templates.items() if text is not None}
    if not given and source.format is not Format.fields:
        return None
    if len(given) < len(templates) or source.format not in (Format.auto, Format.fields):
        problem = f"{' and '.join(templates)} go together, with {key}.format=auto or fields"
        raise RequestError(problem, problem_id="field-templates")
    try:
        return FieldTemplates(given)
    except TemplateSyntaxError as error:
        problem = f"{' or '.join(given)}: it is not valid Jinja: {error.message}"
        raise RequestError(problem, problem_id="field-templates") from error


@dataclass(frozen=True, kw_only=True)
class FormatSettings:
    """The settings by which a record becomes a row."""

    text_field: str = "text"
    system_prompt: str | None = None
    vocab_size: int | None = None  # None: token ids are only checked for being 32-bit integers
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # of every document; its own come first
    fields: FieldTemplates | None = None  # of format=fields
    images: ImageReader = field(default_factory=ImageReader)


Convert = Callable[[Record, KeyAccount, FormatSettings], tuple[CorpusKind, Row]]


@dataclass(frozen=True, kw_only=True)
class FormatSpec:
    """The keys a document of a format must and may have, and its conversion."""

    needs: tuple[str, ...]
    may_have: tuple[str, ...] = ()
    convert: Convert
    asks: Callable[[Record], tuple[str, ...]] = lambda record: ()  # keys of the prompt that this document has


class Normalizer:
    """Turns the records of one source into rows of one kind. The first document decides both, if they are not named."""

    def __init__(self, format: Format, settings: FormatSettings, account: KeyAccount | None = None) -> None:
        self.format = format if settings.fields is None else Format.fields
        self.settings = settings
        self.account = account or KeyAccount(document_keys(settings))
        self.kind: CorpusKind | None = None
        self.was_detected = self.format is Format.auto

    def row(self, record: Record) -> Row:
        """One record as a row, without its origin. Raises: DocumentError."""
        kind, row = self._convert(record)
        if self.kind is None:
            self.kind = kind
        elif kind is not self.kind:
            raise DocumentError(
                f"a document of kind {kind.value}, but those before it are of kind {self.kind.value}; "
                f"{way_to_one_kind([kind, self.kind])}"
            )
        return row

    def _convert(self, record: Record) -> tuple[CorpusKind, Row]:
        settings, account = self.settings, self.account
        record = account.without_ignored(record)
        if self.format is Format.auto:
            self.format = detect_format(record, settings.text_field)
        if settings.fields is not None:  # the templates name a missing field
            images = {key: record[key] for key in IMAGE_KEYS if key in record and key not in settings.fields.names}
            account.check(record, {*settings.fields.names, *images})
            return _conversation(settings.fields.turns(record), images, settings)
        needed = _needed_keys(self.format, settings.text_field)
        if missing := [key for key in needed if record.get(key) is None]:
            basis = " by the keys of the first document; name one format a source" if self.was_detected else ""
            raise DocumentError(
                f"missing field {' and '.join(map(repr, missing))} (format {self.format.value}{basis}); its keys "
                f"are: {_keys(record)}",
                problem_id="data-missing-field",
            )
        spec = SPECS[self.format]
        # First: a refused key often explains another problem, such as an empty text next to a tool call.
        account.check(record, {*needed, *spec.may_have, *spec.asks(record)})
        return spec.convert(record, account, settings)


def detect_format(record: Record, text_field: str) -> Format:
    """The format of a document by its keys. Raises: DocumentError naming the formats and the keys each needs."""
    for format in SPECS:
        if all(record.get(key) is not None for key in _needed_keys(format, text_field)):
            return format
    formats = "\n".join(f"    {format.value}: {', '.join(_needed_keys(format, text_field))}" for format in SPECS)
    raise DocumentError(
        f"its format is not known: its keys are: {_keys(record)}. The formats, and the keys each needs:\n{formats}\n"
        "  Rename its keys; that of a pair's prompt is 'prompt'. What is no pair can also be plain text, by "
        "dataset.format=text dataset.text_field=KEY, or a question and an answer from its keys: "
        "'dataset.question_template=\"{{KEY}}\"' 'dataset.answer_template=\"{{KEY}}\"'",
        problem_id="data-unknown-format",
    )


def document_keys(settings: FormatSettings) -> frozenset[str]:
    """The keys that only documents have: the templates' fields, or those that some format needs."""
    if settings.fields is not None:
        return settings.fields.names
    return frozenset(key for format in SPECS for key in _needed_keys(format, settings.text_field))


def _needed_keys(format: Format, text_field: str) -> list[str]:
    return [text_field if key == TEXT_FIELD else key for key in SPECS[format].needs]


def _keys(record: Record) -> str:
    return ", ".join(key for key, value in record.items() if value is not None) or "none"


def _conversation(turns: list[Turn], record: Record, settings: FormatSettings) -> tuple[CorpusKind, Row]:
    """A conversation with its tools and the template's variables, as JSON text.

    The system prompt and the variables of the configuration are used where the document has none.
    """
    places = [key for key in TOOL_KEYS if not is_empty(record.get(key))]
    if len(places) > 1:
        raise DocumentError(f"the tools are in two places, {' and '.join(places)}; keep one")
    tools = read_tools(record[places[0]], places[0]) if places else []
    kwargs = {} if is_empty(record.get(KWARGS_KEY)) else read_template_kwargs(record[KWARGS_KEY])
    check_conversation(turns)
    turns = place_images(turns, record, settings.images)
    if settings.system_prompt is not None and turns[0]["role"] != "system":
        turns = [{"role": "system", "content": settings.system_prompt, "train": False}, *turns]
    columns = {"messages": turns, "tools": tools, "template_kwargs": {**settings.template_kwargs, **kwargs}}
    row = {name: json.dumps(value, ensure_ascii=False) if value else None for name, value in columns.items()}
    return CorpusKind.conversation, row


def _system_turns(record: Record) -> list[Turn]:
    return [] if is_empty(record.get("system")) else [make_turn("system", record["system"], "system")]


def _from_text(record: Record, account: KeyAccount, settings: FormatSettings) -> tuple[CorpusKind, Row]:
    field = settings.text_field
    return CorpusKind.text, {"text": check_text(record[field], f"'{field}'")}


def _from_tokens(record: Record, account: KeyAccount, settings: FormatSettings) -> tuple[CorpusKind, Row]:
    return CorpusKind.tokens, read_tokens(record, settings.vocab_size)


def _from_turns(key: str, record: Record, account: KeyAccount, settings: FormatSettings) -> tuple[CorpusKind, Row]:
    return _conversation(_system_turns(record) + read_turns(record[key], key, account), record, settings)


def _from_alpaca(record: Record, account: KeyAccount, settings: FormatSettings) -> tuple[CorpusKind, Row]:
    answer = make_turn("assistant", record["output"], "output")
    return _conversation([*_system_turns(record), *_instruction_turns(record), answer], record, settings)


def _instruction_turns(record: Record) -> list[Turn]:
    """`input` follows the instruction after an empty line; `history` holds earlier [question, answer] pairs."""
    turns: list[Turn] = []
    history = record.get("history") or []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise DocumentError("'history' must be a list of [question, answer] pairs")
    for pair in history:
        turns += [make_turn("user", pair[0], "history"), make_turn("assistant", pair[1], "history")]
    question = check_text(record["instruction"], "'instruction'")
    if not is_empty(record.get("input")):
        question += "\n\n" + check_text(record["input"], "'input'")
    return [*turns, make_turn("user", question, "instruction")]


def _from_prompt_completion(record: Record, account: KeyAccount, settings: FormatSettings) -> tuple[CorpusKind, Row]:
    """Two texts, or two lists of turns, of which only the completion's are trained on."""
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        before = _system_turns(record) + read_turns(prompt, "prompt", account, is_prompt=True)
        after = read_turns(completion, "completion", account)
        return _conversation(before + after, record, settings)
    if isinstance(prompt, list) or isinstance(completion, list):
        raise DocumentError("'prompt' and 'completion' must be two texts or two lists of turns, not one of each")
    if of_turns := [key for key in CONVERSATION_KEYS if not is_empty(record.get(key))]:
        raise DocumentError(
            f"'{of_turns[0]}' goes with turns, and 'prompt' is a text: write prompt and completion as lists of turns"
        )
    row = {"prompt": check_text(prompt, "'prompt'"), "completion": check_text(completion, "'completion'")}
    return CorpusKind.prompt_completion, row


def _from_pair(record: Record, account: KeyAccount, settings: FormatSettings) -> tuple[CorpusKind, Row]:
    """A prompt with two answers, or two whole conversations with a common beginning, which is the prompt.

    The prompt is under the keys of `_prompt_keys`. Texts without turns are a pair of plain texts.
    """
    prompt, answers = record.get("prompt"), (record["chosen"], record["rejected"])
    if isinstance(prompt, str) and all(isinstance(answer, str) for answer in answers):
        return _from_text_pair(record)
    keys = [key for key in _prompt_keys(record) if not is_empty(record.get(key))]
    is_whole = isinstance(prompt, str) or not keys
    asked: list[Turn] = []
    if "instruction" in keys:
        asked = _instruction_turns(record)
    elif not is_whole:
        if len(keys) > 1:
            raise DocumentError(
                f"the prompt is in two places, {' and '.join(keys)}; to keep the first type "
                f"dataset.ignore_keys=[{keys[1]}]"
            )
        asked = read_turns(record[keys[0]], keys[0], account, is_prompt=True)
        if keys != ["prompt"] and asked[-1]["role"] == "assistant":
            raise DocumentError(
                f"'{keys[0]}' ends with the answer; end it before 'chosen' and 'rejected', or, if these have the "
                f"prompt too, type dataset.ignore_keys=[{keys[0]}]"
            )
    before = _system_turns(record) + asked
    given = {key: _read_answer(record, key, account) for key in ("chosen", "rejected")}
    sides = [before + answer for answer in _without_prompt(asked, given)]
    num_common = num_shared(*sides)
    if num_common == len(sides[0]) == len(sides[1]):
        raise DocumentError("'chosen' and 'rejected' are the same, so neither is better")
    num_prompt = num_common if is_whole else len(before)
    common = sides[0][:num_common]
    if isinstance(prompt, str) and not any(turn["content"] == prompt for turn in common):
        raise DocumentError(
            "'prompt' is a text, and no turn that 'chosen' and 'rejected' have in common; write it as a list of turns"
        )
    if all(turn["role"] == "system" for turn in common):
        raise DocumentError(
            "there is no prompt: write its turns under 'prompt', or begin 'chosen' and 'rejected' with them; its keys "
            f"are: {_keys(record)}"
        )
    rows = []
    for key, turns in zip(("chosen", "rejected"), sides, strict=True):
        if not any(turn["train"] for turn in turns[num_prompt:]):
            raise DocumentError(f"'{key}' has no turn of the assistant after the prompt that is trained on")
        marked = [turn | {"train": False} for turn in turns[:num_prompt]] + turns[num_prompt:]
        if any("images" in turn for turn in marked) or any(not is_empty(record.get(key)) for key in IMAGE_KEYS):
            raise DocumentError("pairs cannot have images yet; remove this one", problem_id="data-media")
        rows.append(_conversation(marked, record, settings)[1])
    return CorpusKind.conversation_pair, rows[0] | {"rejected": rows[1]["messages"]}


def _prompt_keys(record: Record) -> tuple[str, ...]:
    """The keys of a pair's prompt; those of Alpaca and OpenAI if there is no other, and the answers are single."""
    is_single = all(isinstance(record[key], str | dict) for key in ("chosen", "rejected"))
    if is_single and is_empty(record.get("prompt")) and is_empty(record.get("conversations")):
        for keys in (("instruction", "input", "history"), ("messages",)):
            if not is_empty(record.get(keys[0])):
                return keys
    return ("prompt", "conversations")


def _without_prompt(prompt: list[Turn], answers: dict[str, list[Turn]]) -> list[list[Turn]]:
    """The answers, without the prompt if both begin with it. Raises: DocumentError if one repeats some of it."""
    unmarked = [turn | {"train": False} for turn in prompt]
    if all([turn | {"train": False} for turn in turns[: len(prompt)]] == unmarked for turns in answers.values()):
        return [turns[len(prompt) :] for turns in answers.values()]
    for key, turns in answers.items():
        if turns and turns[0]["role"] in ("system", "user") and prompt[-1]["role"] == "user":
            raise DocumentError(
                f"'{key}' begins with a turn of the {turns[0]['role']}, and the prompt ends with one of the user; "
                "write the answers alone, or both whole conversations and no prompt"
            )
    return [*answers.values()]


def _read_answer(record: Record, key: str, account: KeyAccount) -> list[Turn]:
    """The turns of one side's answer: a text, a turn, or a list of turns."""
    answer = record[key]
    if isinstance(answer, str):
        return [make_turn("assistant", answer, key)]
    if not isinstance(answer, dict | list):
        raise DocumentError(f"'{key}' is {type_name(answer)} where a text or turns belong")
    try:
        return read_turns([answer] if isinstance(answer, dict) else answer, key, account)
    except DocumentError as error:
        raise DocumentError(f"'{key}': {error.message}", problem_id=error.problem_id) from error


def _from_text_pair(record: Record) -> tuple[CorpusKind, Row]:
    if of_turns := [key for key in ("conversations", *CONVERSATION_KEYS) if not is_empty(record.get(key))]:
        raise DocumentError(f"'{of_turns[0]}' goes with turns, and 'prompt' is a text: write it as a list of turns")
    row = {name: check_text(record[name], f"'{name}'") for name in ("prompt", "chosen", "rejected")}
    if row["chosen"] == row["rejected"]:
        raise DocumentError("'chosen' and 'rejected' are the same, so neither is better")
    return CorpusKind.text_pair, row


# In the order of detection: the most specific keys first.
SPECS: dict[Format, FormatSpec] = {
    Format.pretokenized: FormatSpec(needs=("input_ids",), may_have=TOKEN_KEYS, convert=_from_tokens),
    Format.pairs: FormatSpec(
        needs=("chosen", "rejected"),
        may_have=("prompt", "conversations", *CONVERSATION_KEYS),
        convert=_from_pair,
        asks=_prompt_keys,
    ),
    Format.sharegpt: FormatSpec(
        needs=("conversations",), may_have=CONVERSATION_KEYS, convert=partial(_from_turns, "conversations")
    ),
    Format.messages: FormatSpec(
        needs=("messages",), may_have=CONVERSATION_KEYS, convert=partial(_from_turns, "messages")
    ),
    Format.prompt_completion: FormatSpec(
        needs=("prompt", "completion"), may_have=CONVERSATION_KEYS, convert=_from_prompt_completion
    ),
    Format.alpaca: FormatSpec(
        needs=("instruction", "output"), may_have=("input", "history", *CONVERSATION_KEYS), convert=_from_alpaca
    ),
    Format.text: FormatSpec(needs=(TEXT_FIELD,), convert=_from_text),
}
