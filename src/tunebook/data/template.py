"""Render conversations with the tokenizer's chat template, and find the characters that the loss should count.

A template may mark the assistant's words with `{% generation %}`. For any other template the text of the turns before
an answer, with the generation prompt, must be the beginning of the whole text; the answer is what follows, up to the
token that ends it. So the model is trained to write exactly what follows its prompt in generation. Text of special
tokens in a turn is hidden from the template (`special_tokens.py`), and a conversation that it does not write completely
is an error (`find_missing`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from os.path import commonprefix
from typing import TYPE_CHECKING, Any

from tunebook.config.book import CHATML_TEMPLATE, TRAINING_TEMPLATE
from tunebook.data.conversation import Conversation, Messages, Part, TemplateForm, find_missing
from tunebook.data.images import write_images
from tunebook.data.special_tokens import Span, SpecialTokens, any_of
from tunebook.data.turns import ROLES
from tunebook.errors import DataError, RequestError
from tunebook.files import sha256_text
from tunebook.model.tokenizer import stop_token_ids
from tunebook.model.tokenizer_files import GENERATION_MARKER, read_chat_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tunebook.model.processor import ImageProcessor

_TEXT = re.compile(r"[#*-]* *\w")  # the beginning of a line that is text and not a mark or JSON
_MOST_SHOWN = 40  # characters of a turn in a message


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """A conversation as text, and the spans of characters that are trained on, in order."""

    text: str
    spans: list[Span]
    num_rewritten: int = 0  # assistant turns left out: the template changes them if more turns follow
    # Texts before the first question that the template writes and the document does not say
    added: tuple[str, ...] = ()
    leaves_out: bool = False  # parts of earlier answers that are not trained on, as templates do by design
    special: str | None = None  # the first special token with hidden text in a turn
    images: list[Span] = field(default_factory=list)  # the characters of each image
    references: list[str] = field(default_factory=list)  # to the files of the images


def require_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """The chat template's text. Raises: RequestError if there is none."""
    try:
        template: str = tokenizer.get_chat_template()
    except ValueError as error:
        raise RequestError(
            "to train a base model on conversations, type model.chat_template=chatml: the tokenizer in "
            f"{tokenizer.name_or_path} has no chat template. Or name a Jinja file or one of TRL's (trl:NAME) with "
            "model.chat_template, or the tokenizer of the model's instruction-tuned version with model.tokenizer=DIR",
            problem_id="tokenizer-no-template",
        ) from error
    return template


def template_hash(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The SHA-256 of the chat template's text; None without a template."""
    return sha256_text(require_template(tokenizer)) if tokenizer.chat_template else None


def template_variables(template: str) -> set[str]:
    """The names of variables that a template reads. Raises: RequestError for one that is not valid Jinja."""
    from jinja2 import TemplateSyntaxError, meta
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        return set(meta.find_undeclared_variables(_compile_jinja_template(template).environment.parse(template)))
    except TemplateSyntaxError as error:
        raise RequestError(
            f"the chat template is not valid Jinja: line {error.lineno}: {error.message}; correct it, or name another "
            "with model.chat_template=FILE",
            problem_id="chat-template-broken",
        ) from error


class ConversationRenderer:
    """Renders conversations with one tokenizer's template. Raises: RequestError if it has none or a broken one."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        from transformers.utils.chat_template_utils import render_jinja_template

        self._template = require_template(tokenizer)
        template_variables(self._template)  # refuses a broken one
        self._is_marked = GENERATION_MARKER.search(self._template) is not None
        self._render_jinja: Any = render_jinja_template
        self._special_tokens = dict(tokenizer.special_tokens_map)
        self._stop_tokens = [str(tokenizer.convert_ids_to_tokens(token)) for token in stop_token_ids(tokenizer)]
        self._stop = any_of(self._stop_tokens)
        self.special = SpecialTokens(tokenizer)
        self._form = TemplateForm(self._template, lambda messages, tools: self._render_messages(messages, tools)[0])
        self._added_lines = cache(self._find_added_lines)

    def prompt(self, conversation: Conversation, origin: str = "this prompt") -> str:
        """A conversation as text, with the prompt for the assistant's answer.

        Raises: DataError if the template refuses it or leaves a part of it out.
        """
        text = self._render_or_explain(conversation, origin, add_generation_prompt=True)[0]
        self._check(find_missing(conversation, text), conversation, origin, ())
        return text

    def prompt_tokens(self, conversation: Conversation, processor: ImageProcessor | None = None) -> list[int]:
        """The tokens of `prompt`; the text of a special token in a turn is plain text, as in training.

        `processor` writes the tokens of images.
        """
        hidden, _ = self._hide(conversation, "this prompt")
        text = self.prompt(hidden)
        if images := conversation.images():
            text = write_images(text, [], images, processor, "this prompt")[0]
        ids: list[int] = self.special.encode_apart(text, [])[0].ids
        return ids

    def render(self, conversation: Conversation, origin: str, *, has_spans: bool = True) -> Rendered:
        """A conversation; `train` of each message tells whether the loss may count it.

        If every token is trained on, the assistant's turns need not be found: `has_spans` is false.

        Raises: DataError naming `origin` if the template refuses the conversation or leaves part of it out, or the
        assistant's turns cannot be found in the text or do not end with a token that ends generation.
        """
        hidden, special = self._hide(conversation, origin)
        messages = hidden.messages
        text, marks = self._render_or_explain(hidden, origin, marked=self._is_marked and has_spans)
        missing = find_missing(hidden, text)
        answers = _assistant_turns(messages)
        self._check(missing, hidden, origin, answers[-1:])
        added = self._added(hidden, text)
        if not has_spans:
            return Rendered(text=text, spans=[], added=added, special=special, leaves_out=bool(missing))
        trained = [turn for turn in answers if messages[turn]["train"]]
        located = self._marked(hidden, trained, text, missing, _joined(marks), origin)
        if located is None:
            located = {turn: self._locate(hidden, turn, text, origin) for turn in trained}
        spans = {turn: span for turn, span in located.items() if span is not None}
        if not spans and trained and trained[-1] == answers[-1]:
            raise DataError(
                f"{origin}: the assistant's last turn cannot be found in what the chat template writes: this does not "
                "begin with what it writes as the prompt for that turn. Name a template that marks the assistant's "
                f"words with {{% generation %}} ... {{% endgeneration %}}: {_other_template(self._template)}, or "
                "train on every token: dataset.train_on=everything",
                problem_id="assistant-not-found",
            )
        self._check(missing, hidden, origin, spans)
        return Rendered(
            text=text,
            spans=list(spans.values()),
            num_rewritten=len(trained) - len(spans),
            added=added,
            leaves_out=bool(missing),
            special=special,
        )

    def _hide(self, conversation: Conversation, origin: str) -> tuple[Conversation, str | None]:
        """The conversation with the text of special tokens hidden from the template, and the first such token."""
        written = json.dumps([*conversation.messages, conversation.tools], ensure_ascii=False)
        special = self.special.first_in(written)
        if special is None:
            return conversation, None
        shown = self._render_or_explain(conversation, origin)[0]
        # First hide all of it. A template whose text then differs reads such text itself, as some do with `</think>`:
        # then hide only the tokens that it writes around turns.
        for names in (None, self._stop_tokens):
            try:
                hidden = conversation.mapped(partial(self.special.hide, names=names))
            except DataError as error:
                raise DataError(f"{origin}: {error.message}", problem_id=error.problem_id) from error
            if self.special.show(self._render_or_explain(hidden, origin)[0], [])[0] == shown:
                return hidden, special
        raise DataError(
            f"{origin}: a turn holds the text of the special token {special!r}, and the chat template writes something "
            "else without it, so the template's own tokens cannot be distinguished; remove it from the document",
            problem_id="special-token-in-content",
        )

    def _added(self, conversation: Conversation, text: str) -> tuple[str, ...]:
        """What the template writes of its own before the first question: always, and for tools."""
        has_system = conversation.messages[0]["role"] == "system"
        kwargs = json.dumps(conversation.template_kwargs)
        always = self._added_lines(has_system, False, kwargs)
        for_tools = self._added_lines(has_system, True, kwargs) if conversation.tools else []
        groups = (always, [line for line in for_tools if line not in always])
        return tuple(" ".join(lines) for lines in groups if lines and all(line in text for line in lines))

    def _find_added_lines(self, has_system: bool, has_tools: bool, kwargs: str) -> list[str]:
        """The lines before the first question, but for marks of turns, in a conversation whose texts are all known."""
        talk = [("system", "zqsystem")] * has_system
        talk += [("user", "zqfirst"), ("assistant", "zqanswer"), ("user", "zqsecond"), ("assistant", "zqlast")]
        function = {"name": "zqtool", "description": "zqabout", "parameters": {"type": "object", "properties": {}}}
        probe = Conversation(
            messages=[{"role": role, "content": content} for role, content in talk],
            tools=[{"type": "function", "function": function}] if has_tools else None,
            template_kwargs=json.loads(kwargs),
        )
        try:
            text = self._render(probe)[0]
        except Exception:  # templates raise anything; this conversation may be one that this one refuses
            return []
        start, _, rest = text.partition("zqfirst")
        before_second = rest.partition("zqanswer")[2].partition("zqsecond")[0]
        mark = commonprefix([start[::-1], before_second[::-1]])  # noqa: RUF071  of a user's turn, backwards
        start = self.special.any.sub("\n", start.removesuffix(mark[::-1])).replace("zqsystem", "\n")
        before_tools, tool, _ = start.partition("zq")
        lines = [line.strip() for line in before_tools.splitlines()[: -1 if tool else None]]
        return [line for line in lines if _TEXT.match(line) and _letters(line) not in ROLES]

    def _check(
        self, missing: Sequence[Part], conversation: Conversation, origin: str, trained: Collection[int]
    ) -> None:
        """Raises: DataError for the first part that the model would not read, or that it is `trained` on only partly.

        By design, templates leave out parts of earlier answers; these are allowed if not trained on.
        """
        for part in missing:
            role = conversation.messages[part.turn]["role"]
            if part.what in ("tools", "calls"):
                what = "the tools" if part.what == "tools" else f"the calls of turn {part.turn + 1}, or not all of them"
                raise DataError(
                    f"{origin}: the chat template does not write {what}, so the model would be trained on another "
                    "conversation. Name a template that does: model.chat_template=chatml, trl:NAME for one of TRL's, "
                    "or a Jinja file",
                    problem_id="template-without-tools",
                )
            if role != "assistant" or part.turn in trained:
                text = self.special.show(part.text, [])[0]
                shown = text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
                is_reasoning = part.what == "reasoning"
                raise DataError(
                    f"{origin}: the chat template does not write {'the reasoning of ' if is_reasoning else ''}turn "
                    f"{part.turn + 1} ({role}): {shown!r}, so the model would be trained on another conversation. Name "
                    f"a template that writes it: {_other_template(self._template)}, or "
                    + ("train without it: dataset.reasoning=drop" if is_reasoning else "change the document"),
                    problem_id="template-leaves-out",
                )

    def _marked(
        self,
        conversation: Conversation,
        trained: list[int],
        text: str,
        missing: Sequence[Part],
        spans: list[Span],
        origin: str,
    ) -> dict[int, Span | None] | None:
        """The spans of the template's own markers; None if these do not match the assistant's turns one to one.

        The span of an earlier turn that ends otherwise than the last is None, as in `_locate`.
        """
        turns = _assistant_turns(conversation.messages)
        if len(spans) != len(turns) or not {part.turn for part in missing}.isdisjoint(turns):
            return None
        located: dict[int, Span | None] = {}
        for turn, (start, end) in zip(turns, spans, strict=True):
            if find_missing(conversation.only(turn), text[start:end]):
                return None
            if turn not in trained:
                continue
            if self._end_of_answer(conversation.only(turn), text[start:end], origin) is not None:
                located[turn] = start, end
            elif turn == turns[-1]:
                raise self._no_stop(text[start:end], origin)
            else:  # only the last turn ends as in generation, such as gpt-oss's
                located[turn] = None
        return located

    def _locate(self, conversation: Conversation, turn: int, text: str, origin: str) -> Span | None:
        """The span of one assistant turn in the whole text, with its end token; None if it is not there unchanged."""
        try:
            prompt = self._render(conversation.until(turn), add_generation_prompt=True)[0]
        except Exception:  # templates raise anything, from their own messages to TypeError
            return None
        is_last = turn == len(conversation.messages) - 1
        as_written = text if is_last else self._render_or_explain(conversation.until(turn + 1), origin)[0]
        if not text.startswith(prompt) or not as_written.startswith(prompt):
            return None
        answer = as_written[len(prompt) :]
        end = self._end_of_answer(conversation.only(turn), answer, origin)
        if end is None:
            raise self._no_stop(answer, origin)
        return (len(prompt), len(prompt) + end) if text.startswith(answer[:end], len(prompt)) else None

    def _end_of_answer(self, answer: Conversation, written: str, origin: str) -> int | None:
        """Where the token that ends generation ends; the model would never write anything after the first one.

        Raises: DataError if the template writes parts of the answer after it.
        """
        stop = self._stop.search(written)
        if stop is None:
            return None
        if len(find_missing(answer, written[: stop.end()])) > len(find_missing(answer, written)):
            raise DataError(
                f"{origin}: the chat template writes {stop.group()}, which ends generation, before the answer ends, so "
                "the model would never learn the answer. Name only a token that ends a turn with model.eos_token, or "
                f"another template: {_other_template(self._template)}",
                problem_id="eos-not-trained",
            )
        return stop.end()

    def _no_stop(self, written: str, origin: str) -> DataError:
        return DataError(
            f"{origin}: the assistant's turn as the chat template writes it (ending with {written[-40:]!r}) has no "
            f"token that ends generation ({', '.join(sorted(self._stop_tokens))}), so the model would never learn to "
            "stop; name the token that ends a turn: model.eos_token=TOKEN, or another template: "
            f"{_other_template(self._template)}",
            problem_id="eos-not-trained",
        )

    def _render(self, conversation: Conversation, **options: bool) -> tuple[str, list[Span]]:
        messages = self._form.messages(conversation.messages)
        return self._render_messages(messages, conversation.tools, conversation.template_kwargs, **options)

    def _render_messages(
        self,
        messages: Messages,
        tools: list[dict[str, Any]] | None,
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = False,
        marked: bool = False,
    ) -> tuple[str, list[Span]]:
        texts, spans = self._render_jinja(
            conversations=[messages],
            tools=tools,
            chat_template=self._template,
            add_generation_prompt=add_generation_prompt,
            return_assistant_tokens_mask=marked,
            **{**self._special_tokens, **(template_kwargs or {})},
        )
        return texts[0], spans[0] if marked else []

    def _render_or_explain(self, conversation: Conversation, origin: str, **options: bool) -> tuple[str, list[Span]]:
        try:
            return self._render(conversation, **options)
        except Exception as error:  # templates raise anything, from their own messages to TypeError
            roles = ", ".join(message["role"] for message in conversation.messages)
            raise DataError(
                f"{origin}: the chat template refuses this conversation ({roles}): {error}; change the conversation, "
                f"or name a template that takes it: {_other_template(self._template)}",
                problem_id="chat-template-refuses",
            ) from error


def _other_template(template: str) -> str:
    """What to type for a template other than this one: TRL's training version, if it has one."""
    try:
        read_chat_template(TRAINING_TEMPLATE, template)
    except RequestError:
        return f"model.chat_template={CHATML_TEMPLATE}, or FILE"
    return f"model.chat_template={TRAINING_TEMPLATE} (TRL's training version), or FILE"


def _letters(line: str) -> str:
    return "".join(filter(str.isalpha, line)).lower()


def _assistant_turns(messages: Messages) -> list[int]:
    return [i for i, message in enumerate(messages) if message["role"] == "assistant"]


def _joined(spans: Sequence[Span]) -> list[Span]:
    """The spans, with those joined that touch: Phi 3's end of a conversation is marked on its own."""
    joined: list[Span] = []
    for start, end in spans:
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], end
        else:
            joined.append((start, end))
    return joined
