"""Render conversations with the tokenizer's chat template, and find the characters that the loss should count.

A template may mark the assistant's words with `{% generation %}`. For any other template the text of the turns before
an answer, with the generation prompt, must be the beginning of the whole text; the answer is what follows, up to the
token that ends it. So the model is trained to write exactly what follows its prompt in generation. Text of special
tokens in a turn is hidden from the template (`special_tokens.py`), and a conversation that it does not write completely
is an error (`template_content.py`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tunebook.config.override_text import typed
from tunebook.data.special_tokens import Span, SpecialTokens
from tunebook.data.template_content import ContentCheck, Missing
from tunebook.data.template_content import Messages as Messages  # for callers
from tunebook.errors import DataError, RequestError
from tunebook.model.tokenizer import stop_token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MOST_SHOWN = 40  # characters of a turn in a message
_GENERATION_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """A conversation as text, and the spans of characters that are trained on, in order."""

    text: str
    spans: list[Span]
    num_rewritten: int = 0  # assistant turns left out: the template changes them if more turns follow
    leaves_out: bool = False  # parts of earlier answers that are not trained on, as templates do by design
    special: str | None = None  # the first special token with hidden text in a turn


def require_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """The chat template's text. Raises: RequestError if there is none."""
    try:
        template: str = tokenizer.get_chat_template()
    except ValueError as error:
        raise RequestError(
            f"the tokenizer in {tokenizer.name_or_path} has no chat template, so conversations cannot be rendered; "
            "name a Jinja file with model.chat_template=FILE (book:recipes/quickstart/model/chat_template.jinja "
            "is ChatML), or take the tokenizer of the model's instruction-tuned version with model.tokenizer=DIR",
            problem_id="tokenizer-no-template",
        ) from error
    return template


def template_hash(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The SHA-256 of the chat template's text; None without a template."""
    if not tokenizer.chat_template:
        return None
    return hashlib.sha256(require_template(tokenizer).encode()).hexdigest()


class ConversationRenderer:
    """Renders conversations with one tokenizer's template.

    Every method raises RequestError for a template that is not valid Jinja.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        from transformers.utils.chat_template_utils import render_jinja_template

        self._template = require_template(tokenizer)
        _refuse_random(self._template)
        self.is_marked = _GENERATION_MARKER.search(self._template) is not None
        self._render_jinja: Any = render_jinja_template
        self._variables = dict(tokenizer.special_tokens_map)
        self.stop_tokens = sorted(str(tokenizer.convert_ids_to_tokens(token)) for token in stop_token_ids(tokenizer))
        self._special_tokens = [token.content for token in tokenizer.added_tokens_decoder.values()]
        longest_first = sorted(self.stop_tokens, key=len, reverse=True)
        self._stop = re.compile("|".join(map(re.escape, longest_first)))
        self.special = SpecialTokens(tokenizer)
        self._content = ContentCheck(lambda messages: self._render(messages)[0])

    def prompt(self, messages: Messages) -> str:
        """The messages as text, with the prompt for the assistant's answer.

        Raises: DataError if the template refuses them or leaves one of them out.
        """
        text = self._render_or_explain(messages, "this prompt", add_generation_prompt=True)[0]
        self._check(self._content.missing(messages, text), messages, "this prompt", ())
        return text

    def prompt_tokens(self, messages: Messages) -> list[int]:
        """The tokens of `prompt`; the text of a special token in a turn is plain text, as in training."""
        shown, _ = self._hide(messages, "this prompt")
        ids: list[int] = self.special.encode_apart(self.prompt(shown), [])[0].ids
        return ids

    def whole(self, messages: Messages, origin: str) -> Rendered:
        """A conversation without spans, for training on every token. Raises: as `render`."""
        shown, special = self._hide(messages, origin)
        text = self._text(shown, origin)
        missing = self._content.missing(shown, text)
        self._check(missing, shown, origin, _assistant_turns(shown)[-1:])
        return Rendered(text=text, spans=[], leaves_out=bool(missing), special=special)

    def render(self, messages: Messages, origin: str) -> Rendered:
        """A conversation; `train` of each message tells whether the loss may count it.

        Raises: DataError naming `origin` if the template refuses the conversation or leaves part of it out, or the
        assistant's turns cannot be found in the text or do not end with a token that ends generation.
        """
        shown, special = self._hide(messages, origin)
        return replace(self._with_spans(shown, origin), special=special)

    def _hide(self, messages: Messages, origin: str) -> tuple[Messages, str | None]:
        """The messages with the text of special tokens hidden from the template, and the first such token."""
        special = next((found for turn in messages if (found := self.special.first_in(turn["content"]))), None)
        if special is None:
            return messages, None
        shown = self._text(messages, origin)
        # First hide all of it. A template whose text then differs reads such text itself, as some do with `</think>`:
        # then hide only the tokens that it writes around turns.
        for names in (None, [name for name in self.stop_tokens if name in self._special_tokens]):
            try:
                hidden = [{**turn, "content": self.special.hide(turn["content"], names)} for turn in messages]
            except DataError as error:
                raise DataError(f"{origin}: {error.message}", problem_id=error.problem_id) from error
            if self.special.show(self._text(hidden, origin), [])[0] == shown:
                return hidden, special
        raise DataError(
            f"{origin}: a turn holds the text of the special token {special!r}, and the chat template writes something "
            "else without it, so the template's own tokens cannot be distinguished; remove it from the document",
            problem_id="special-token-in-content",
        )

    def _with_spans(self, messages: Messages, origin: str) -> Rendered:
        text = self._text(messages, origin)
        missing = self._content.missing(messages, text)
        self._check(missing, messages, origin, _assistant_turns(messages)[-1:])
        wanted = [i for i in _assistant_turns(messages) if messages[i]["train"]]
        marked = self._marked(messages, wanted, text, origin) if self.is_marked else None
        if marked is not None:
            found: list[Span | None] = [*marked]
        else:
            found = [self._locate(messages, turn, text, origin) for turn in wanted]
        spans = [span for span in found if span is not None]
        if wanted and not spans and wanted[-1] == max(_assistant_turns(messages)):
            raise self._cannot_find(messages, wanted[-1], text, origin)
        trained = {turn for turn, span in zip(wanted, found, strict=True) if span is not None}
        self._check(missing, messages, origin, trained)
        return Rendered(text=text, spans=spans, num_rewritten=len(wanted) - len(spans), leaves_out=bool(missing))

    def _text(self, messages: Messages, origin: str) -> str:
        """A conversation as text. Raises: DataError naming `origin` if the template refuses it."""
        return self._render_or_explain(messages, origin)[0]

    def _check(self, missing: Sequence[Missing], messages: Messages, origin: str, trained: Collection[int]) -> None:
        """Raises: DataError for the first turn that the model would not read, or that it is `trained` on only partly.

        By design, templates leave out parts of earlier answers; these are allowed if not trained on.
        """
        for one in missing:
            role = messages[one.turn]["role"]
            if role != "assistant" or one.what == "turn" or one.turn in trained:
                raise self._leaves_out(one, messages[one.turn], origin)

    def _leaves_out(self, missing: Missing, turn: dict[str, Any], origin: str) -> DataError:
        content = self.special.show(turn["content"], [])[0]
        shown = content if len(content) <= _MOST_SHOWN else f"{content[:_MOST_SHOWN]}..."
        what = (
            f"the reasoning of turn {missing.turn + 1}" if missing.what == "reasoning" else f"turn {missing.turn + 1}"
        )
        advice = {
            "system": "or put its text into the first user turn (it is from the document or dataset.system_prompt)",
            "tool": "or remove documents with tool turns",
            "assistant": "or remove what it leaves out",
        }.get(turn["role"], "or change the turn")
        return DataError(
            f"{origin}: the chat template does not write {what} ({turn['role']}): {shown!r}, so the model would be "
            f"trained on another conversation. Name a template that writes it with model.chat_template=FILE, {advice}",
            problem_id="template-leaves-out",
        )

    def _marked(self, messages: Messages, wanted: list[int], whole: str, origin: str) -> list[Span] | None:
        """The spans of the template's own markers; None if these do not match the assistant's words one to one."""
        text, spans = self._render_or_explain(messages, origin, marked=True)
        turns = _assistant_turns(messages)
        if len(spans) != len(turns) or text != whole:
            return None
        kept = []
        for turn, (start, end) in zip(turns, spans, strict=True):
            content = messages[turn]["content"].strip()
            position = text.rfind(content, start, end)
            if position < 0:
                return None
            if turn not in wanted:
                continue
            if self._stop.search(text, position + len(content), end) is None:
                raise self._no_stop(text[start:end], origin, advice="with the turn's end before {% endgeneration %}")
            kept.append((start, end))
        return kept

    def _locate(self, messages: Messages, turn: int, text: str, origin: str) -> Span | None:
        """The span of one assistant turn in the whole text, with its end token; None if it is not there unchanged."""
        prompt = self._prompt_before(messages, turn)
        is_last = turn == len(messages) - 1
        as_written = text if is_last else self._text(messages[: turn + 1], origin)
        if prompt is None or not text.startswith(prompt) or not as_written.startswith(prompt):
            return None
        # The model would never write anything after the first token that ends generation.
        stop = self._stop.search(as_written, len(prompt))
        if stop is None:
            raise self._no_stop(as_written[len(prompt) :], origin, advice="add it after the assistant's words")
        span = len(prompt), stop.end()
        return span if text[slice(*span)] == as_written[slice(*span)] else None

    def _prompt_before(self, messages: Messages, turn: int) -> str | None:
        """The model's input for this turn; None if the template cannot render it."""
        try:
            return self._render(messages[:turn], add_generation_prompt=True)[0]
        except Exception:  # templates raise anything, from their own messages to TypeError
            return None

    def _render(
        self, messages: Messages, *, add_generation_prompt: bool = False, marked: bool = False
    ) -> tuple[str, list[Span]]:
        plain = [{"role": message["role"], "content": message["content"]} for message in messages]
        texts, spans = self._render_jinja(
            conversations=[plain],
            chat_template=self._template,
            add_generation_prompt=add_generation_prompt,
            return_assistant_tokens_mask=marked,
            **self._variables,
        )
        return texts[0], spans[0] if marked else []

    def _render_or_explain(self, messages: Messages, origin: str, **options: bool) -> tuple[str, list[Span]]:
        from jinja2 import TemplateSyntaxError

        try:
            return self._render(messages, **options)
        except TemplateSyntaxError as error:
            raise RequestError(
                f"the chat template is not valid Jinja: line {error.lineno}: {error.message}; correct it, or name "
                "another with model.chat_template=FILE",
                problem_id="chat-template-broken",
            ) from error
        except Exception as error:  # templates raise anything, from their own messages to TypeError
            roles = ", ".join(message["role"] for message in messages)
            raise DataError(
                f"{origin}: the chat template refuses this conversation ({roles}): {error}; change the conversation, "
                "or name a template that takes it with model.chat_template=FILE",
                problem_id="chat-template-refuses",
            ) from error

    def _no_stop(self, written: str, origin: str, *, advice: str) -> DataError:
        last = written[-40:]
        ends = [token for token in self._special_tokens if token in last]
        end = max(ends, key=last.rfind) if ends else None
        override = typed("model.eos_token", end) if end else "model.eos_token=TOKEN"
        return DataError(
            f"{origin}: the assistant's turn as the chat template writes it (ending with {last!r}) has no token that "
            f"ends generation ({', '.join(self.stop_tokens)}), so the model would never learn to stop. If "
            f"{end or 'another token'} ends the turn, type {override}; if none does, name a template that has one with "
            f"model.chat_template=FILE ({advice})",
            problem_id="eos-not-trained",
        )

    def _cannot_find(self, messages: Messages, turn: int, text: str, origin: str) -> DataError:
        prompt = self._prompt_before(messages, turn)
        if prompt is None:
            what = "it cannot render the turns before the answer alone"
        else:
            same = next((i for i in range(len(text)) if text[i : i + 1] != prompt[i : i + 1]), len(text))
            what = f"before the answer it writes {prompt[same : same + 40]!r}, in the whole {text[same : same + 40]!r}"
        return DataError(
            f"{origin}: the assistant's last turn cannot be found in what the chat template writes: {what}. Name a "
            "template that marks the assistant's words with {% generation %} ... {% endgeneration %} by "
            "model.chat_template=FILE, or train on every token with dataset.train_on=everything",
            problem_id="assistant-not-found",
        )


def _refuse_random(template: str) -> None:
    """Raises: RequestError for a template with random output."""
    if not re.search(r"\b(random|lipsum)\b", template):
        return
    from jinja2 import TemplateSyntaxError, nodes
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        parsed = _compile_jinja_template(template).environment.parse(template)
    except TemplateSyntaxError:  # reported when it is rendered
        return
    found = [node.name for node in parsed.find_all((nodes.Filter, nodes.Name)) if node.name in ("random", "lipsum")]
    if found:
        raise RequestError(
            f"the chat template is random ({found[0]}), so the same documents would become other tokens each "
            "time; name another one with model.chat_template=FILE",
            problem_id="chat-template-random",
        )


def _assistant_turns(messages: Messages) -> list[int]:
    return [i for i, message in enumerate(messages) if message["role"] == "assistant"]
