"""Render conversations with the tokenizer's chat template, and find the characters that the loss should count.

A template may mark the assistant's words with `{% generation %}`. For any other template the text of the turns before
an answer, with the generation prompt, must be the beginning of the whole text; the answer is what follows, up to the
token that ends it. So the model is trained to write exactly what follows its prompt in generation. Text of special
tokens in a turn is hidden from the template (`special_tokens.py`), and a conversation that it does not write completely
is an error (`template_content.py`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tunebook.config.book import TRAINING_TEMPLATE
from tunebook.config.override_text import typed
from tunebook.data.conversation import Conversation, Messages, TemplateForm
from tunebook.data.special_tokens import Span, SpecialTokens, any_of
from tunebook.data.template_content import Missing, Places, find_places
from tunebook.errors import DataError, RequestError
from tunebook.files import sha256_text
from tunebook.model.chat_templates import GENERATION_MARKER, has_training_version, suggest_template
from tunebook.model.tokenizer import stop_token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MOST_SHOWN = 40  # characters of a turn in a message


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """A conversation as text, and the spans of characters that are trained on, in order."""

    text: str
    spans: list[Span]
    num_rewritten: int = 0  # assistant turns left out: the template changes them if more turns follow
    leaves_out: bool = False  # parts of earlier answers that are not trained on, as templates do by design
    leaves_out_names: bool = False  # of speakers, which most templates have no place for
    special: str | None = None  # the first special token with hidden text in a turn


def require_template(tokenizer: PreTrainedTokenizerBase, *, for_tools: bool = False) -> str:
    """The chat template's text; some tokenizers have one of their own for conversations with tools.

    Raises: RequestError if there is none.
    """
    try:
        template: str = tokenizer.get_chat_template(tools=[{}] if for_tools else None)
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
    if not tokenizer.chat_template:
        return None
    return sha256_text(require_template(tokenizer))


class ConversationRenderer:
    """Renders conversations with one tokenizer's template.

    Every method raises RequestError for a template that is not valid Jinja.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, for_tools: bool = False) -> None:
        from transformers.utils.chat_template_utils import render_jinja_template

        self._template = require_template(tokenizer, for_tools=for_tools)
        _refuse_random(self._template)
        self.is_marked = GENERATION_MARKER.search(self._template) is not None
        self._render_jinja: Any = render_jinja_template
        self._variables = dict(tokenizer.special_tokens_map)
        self.stop_tokens = sorted(str(tokenizer.convert_ids_to_tokens(token)) for token in stop_token_ids(tokenizer))
        self._special_tokens = [token.content for token in tokenizer.added_tokens_decoder.values()]
        longest_first = sorted(self.stop_tokens, key=len, reverse=True)
        self._stop = re.compile("|".join(map(re.escape, longest_first)))
        self.special = SpecialTokens(tokenizer)
        self.variables = template_variables(self._template)
        self._form = TemplateForm(self._template, self._try_form)
        self._control = any_of([token.content for token in tokenizer.added_tokens_decoder.values() if token.special])

    def prompt(self, conversation: Conversation) -> str:
        """A conversation as text, with the prompt for the assistant's answer.

        Raises: DataError if the template refuses it or leaves a part of it out.
        """
        text = self._render_or_explain(conversation, "this prompt", add_generation_prompt=True)[0]
        self._check(
            self._places(conversation, text, add_generation_prompt=True).missing, conversation, "this prompt", ()
        )
        return text

    def prompt_tokens(self, conversation: Conversation) -> list[int]:
        """The tokens of `prompt`; the text of a special token in a turn is plain text, as in training."""
        shown, _ = self._hide(conversation, "this prompt")
        ids: list[int] = self.special.encode_apart(self.prompt(shown), [])[0].ids
        return ids

    def whole(self, conversation: Conversation, origin: str) -> Rendered:
        """A conversation without spans, for training on every token. Raises: as `render`."""
        shown, special = self._hide(conversation, origin)
        text = self._text(shown, origin)
        missing = self._places(shown, text).missing
        self._check(missing, shown, origin, _assistant_turns(shown.messages)[-1:])
        return Rendered(text=text, spans=[], special=special, **_left_out(missing))

    def render(self, conversation: Conversation, origin: str) -> Rendered:
        """A conversation; `train` of each message tells whether the loss may count it.

        Raises: DataError naming `origin` if the template refuses the conversation or leaves part of it out, or the
        assistant's turns cannot be found in the text or do not end with a token that ends generation.
        """
        shown, special = self._hide(conversation, origin)
        return replace(self._with_spans(shown, origin), special=special)

    def _hide(self, conversation: Conversation, origin: str) -> tuple[Conversation, str | None]:
        """The conversation with the text of special tokens hidden from the template, and the first such token."""
        special = next((found for text in conversation.written if (found := self.special.first_in(text))), None)
        if special is None:
            return conversation, None
        shown = self._text(conversation, origin)
        # First hide all of it. A template whose text then differs reads such text itself, as some do with `</think>`:
        # then hide only the tokens that it writes around turns.
        for names in (None, [name for name in self.stop_tokens if name in self._special_tokens]):
            try:
                hidden = conversation.mapped(partial(self.special.hide, names=names))
            except DataError as error:
                raise DataError(f"{origin}: {error.message}", problem_id=error.problem_id) from error
            if self.special.show(self._text(hidden, origin), [])[0] == shown:
                return hidden, special
        raise DataError(
            f"{origin}: a turn holds the text of the special token {special!r}, and the chat template writes something "
            "else without it, so the template's own tokens cannot be distinguished; remove it from the document",
            problem_id="special-token-in-content",
        )

    def _with_spans(self, conversation: Conversation, origin: str) -> Rendered:
        messages = conversation.messages
        text, marks = self._render_or_explain(conversation, origin, marked=self.is_marked)
        places = self._places(conversation, text)
        missing = places.missing
        self._check(missing, conversation, origin, _assistant_turns(messages)[-1:])
        wanted = [i for i in _assistant_turns(messages) if messages[i]["train"]]
        marked = self._marked(conversation, wanted, text, places, _joined(marks), origin) if self.is_marked else None
        found = (
            marked
            if marked is not None
            else [self._locate(conversation, turn, text, places, origin) for turn in wanted]
        )
        spans = [span for span in found if span is not None]
        if wanted and not spans and wanted[-1] == max(_assistant_turns(messages)):
            raise self._cannot_find(conversation, wanted[-1], text, origin)
        trained = {turn for turn, span in zip(wanted, found, strict=True) if span is not None}
        self._check(missing, conversation, origin, trained)
        return Rendered(text=text, spans=spans, num_rewritten=len(wanted) - len(spans), **_left_out(missing))

    def _places(self, conversation: Conversation, text: str, **options: bool) -> Places:
        return find_places(lambda marked: self._render(marked, **options)[0], conversation, text)

    def _text(self, conversation: Conversation, origin: str) -> str:
        """A conversation as text. Raises: DataError naming `origin` if the template refuses it."""
        return self._render_or_explain(conversation, origin)[0]

    def _check(
        self, missing: Sequence[Missing], conversation: Conversation, origin: str, trained: Collection[int]
    ) -> None:
        """Raises: DataError for the first turn that the model would not read, or that it is `trained` on only partly.

        By design, templates leave out parts of earlier answers; these are allowed if not trained on.
        """
        for one in missing:
            role = conversation.messages[one.turn]["role"]
            if one.what == "name":
                continue
            if one.what in ("tools", "calls"):
                raise self._without_tools(one, conversation, origin)
            if role != "assistant" or one.what == "turn" or one.turn in trained:
                raise self._leaves_out(one, conversation.messages[one.turn], origin)

    def _leaves_out(self, missing: Missing, turn: dict[str, Any], origin: str) -> DataError:
        is_reasoning = missing.what == "reasoning"
        written = turn.get("reasoning") if is_reasoning else None
        content = self.special.show(written or turn["content"] or "", [])[0]
        shown = content if len(content) <= _MOST_SHOWN else f"{content[:_MOST_SHOWN]}..."
        what = f"the reasoning of turn {missing.turn + 1}" if is_reasoning else f"turn {missing.turn + 1}"
        advice = {
            "system": "or put its text into the first user turn (it is from the document or dataset.system_prompt)",
            "tool": "or remove documents with tool turns",
            "assistant": "or remove what it leaves out",
        }.get(turn["role"], "or change the turn")
        if is_reasoning:
            advice = "or train without it: dataset.reasoning=drop"
        elif turn.get("tool_calls"):
            advice = "or remove the text next to its calls"
        return DataError(
            f"{origin}: the chat template does not write {what} ({turn['role']}): {shown!r}, so the model would be "
            f"trained on another conversation. Name a template that writes it with model.chat_template=FILE, {advice}",
            problem_id="template-leaves-out",
        )

    def _without_tools(self, missing: Missing, conversation: Conversation, origin: str) -> DataError:
        """The error for a template that does not write the tools, or a call."""
        num_calls = len(conversation.messages[missing.turn].get("tool_calls", ()))
        what = "the tools" if missing.what == "tools" else f"the calls of turn {missing.turn + 1}"
        if missing.what == "calls" and num_calls > 1:
            what += f", which has {num_calls} (some templates write one for each turn)"
        return DataError(
            f"{origin}: the chat template does not write {what}, so the model would be trained on another conversation."
            f" Name a template that does: {suggest_template(self._special_tokens)}",
            problem_id="template-without-tools",
        )

    def _marked(
        self,
        conversation: Conversation,
        wanted: list[int],
        text: str,
        places: Places,
        spans: list[Span],
        origin: str,
    ) -> list[Span | None] | None:
        """The spans of the template's own markers; None if these do not match the assistant's turns one to one.

        The span of an earlier turn that ends otherwise than the last is None, as in `_locate`.
        """
        turns = _assistant_turns(conversation.messages)
        changed = {one.turn for one in places.missing if one.what != "name"}
        if len(spans) != len(turns) or not changed.isdisjoint(turns):
            return None
        kept: list[Span | None] = []
        for turn, (start, end) in zip(turns, spans, strict=True):
            first, last = places.turns[turn]
            if first < start or end < last:
                return None
            if turn not in wanted:
                continue
            self._refuse_early_stop(text, start, last, origin)
            if self._stop.search(text, last, end) is not None:
                kept.append((start, end))
            elif turn == turns[-1]:
                advice = "with the turn's end before {% endgeneration %}"
                raise self._no_stop(text[start:end], origin, f"name one {advice}: {self._other_template}")
            else:  # only the last turn ends as in generation, such as gpt-oss's
                kept.append(None)
        return kept

    def _locate(self, conversation: Conversation, turn: int, text: str, places: Places, origin: str) -> Span | None:
        """The span of one assistant turn in the whole text, with its end token; None if it is not there unchanged."""
        prompt = self._prompt_before(conversation, turn)
        is_last = turn == len(conversation.messages) - 1
        as_written = text if is_last else self._text(conversation.until(turn + 1), origin)
        if prompt is None or not text.startswith(prompt) or not as_written.startswith(prompt):
            return None
        first, last = places.turns.get(turn, (0, 0))
        if first < len(prompt) or text[:last] != as_written[:last]:
            return None
        self._refuse_early_stop(text, len(prompt), last, origin)
        # The model would never write anything after the first token that ends generation.
        stop = self._stop.search(as_written, last)
        if stop is None:
            end = self._control.search(as_written, last)
            advice = f"name one that writes it: {self._other_template}"
            if end is not None:
                advice = f"if {end.group()} ends the turn, type {typed('model.eos_token', end.group())}; or {advice}"
            raise self._no_stop(as_written[len(prompt) :], origin, advice)
        span = len(prompt), stop.end()
        return span if text[slice(*span)] == as_written[slice(*span)] else None

    def _prompt_before(self, conversation: Conversation, turn: int) -> str | None:
        """The model's input for this turn; None if the template cannot render it."""
        try:
            return self._render(conversation.until(turn), add_generation_prompt=True)[0]
        except Exception:  # templates raise anything, from their own messages to TypeError
            return None

    def _try_form(self, messages: Messages, tools: list[dict[str, Any]]) -> str:
        return self._render_messages(messages, tools, {})[0]

    def _render(
        self, conversation: Conversation, *, add_generation_prompt: bool = False, marked: bool = False
    ) -> tuple[str, list[Span]]:
        return self._render_messages(
            self._form.messages(conversation.messages),
            conversation.tools,
            conversation.template_kwargs,
            add_generation_prompt=add_generation_prompt,
            marked=marked,
        )

    def _render_messages(
        self,
        messages: Messages,
        tools: list[dict[str, Any]] | None,
        template_kwargs: Mapping[str, Any],
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
            **{**self._variables, **template_kwargs},
        )
        return texts[0], spans[0] if marked else []

    def _render_or_explain(self, conversation: Conversation, origin: str, **options: bool) -> tuple[str, list[Span]]:
        from jinja2 import TemplateSyntaxError

        try:
            return self._render(conversation, **options)
        except TemplateSyntaxError as error:
            raise RequestError(
                f"the chat template is not valid Jinja: line {error.lineno}: {error.message}; correct it, or name "
                "another with model.chat_template=FILE",
                problem_id="chat-template-broken",
            ) from error
        except Exception as error:  # templates raise anything, from their own messages to TypeError
            roles = ", ".join(message["role"] for message in conversation.messages)
            raise DataError(
                f"{origin}: the chat template refuses this conversation ({roles}): {error}; change the conversation, "
                "or name a template that takes it with model.chat_template=FILE",
                problem_id="chat-template-refuses",
            ) from error

    def _refuse_early_stop(self, text: str, start: int, end: int, origin: str) -> None:
        """Raises: DataError for a turn in which the template writes a token that ends generation before the answer."""
        stop = self._stop.search(text, start, end)
        if stop is not None:
            raise DataError(
                f"{origin}: the chat template writes {stop.group()}, which ends generation, before the answer ends, so "
                "the model would never learn the answer. Name only a token that ends a turn with model.eos_token, or "
                f"another template: {self._other_template}",
                problem_id="eos-not-trained",
            )

    def _no_stop(self, written: str, origin: str, advice: str) -> DataError:
        return DataError(
            f"{origin}: the assistant's turn as the chat template writes it (ending with {written[-40:]!r}) has no "
            f"token that ends generation ({', '.join(self.stop_tokens)}), so the model would never learn to stop; "
            f"{advice}",
            problem_id="eos-not-trained",
        )

    @property
    def _other_template(self) -> str:
        """What to type for another template."""
        if has_training_version(self._template):
            return f"model.chat_template={TRAINING_TEMPLATE} (TRL's training version of this one)"
        return "model.chat_template=FILE"

    def _cannot_find(self, conversation: Conversation, turn: int, text: str, origin: str) -> DataError:
        prompt = self._prompt_before(conversation, turn)
        if prompt is None:
            what = "it cannot render the turns before the answer alone"
        else:
            same = next((i for i in range(len(text)) if text[i : i + 1] != prompt[i : i + 1]), len(text))
            what = f"before the answer it writes {prompt[same : same + 40]!r}, in the whole {text[same : same + 40]!r}"
        return DataError(
            f"{origin}: the assistant's last turn cannot be found in what the chat template writes: {what}. Name a "
            "template that marks the assistant's words with {% generation %} ... {% endgeneration %}: "
            f"{self._other_template}, or train on every token with dataset.train_on=everything",
            problem_id="assistant-not-found",
        )


def template_variables(template: str) -> frozenset[str]:
    """The names of variables that a template reads; empty for one that is not valid Jinja."""
    from jinja2 import meta

    return frozenset(meta.find_undeclared_variables(_parsed(template)))


def _parsed(template: str) -> Any:
    """A template's tree; that of an empty one if it is not valid Jinja, which is reported when it is rendered."""
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        return _compile_jinja_template(template).environment.parse(template)
    except TemplateSyntaxError:
        return _parsed("")


def _refuse_random(template: str) -> None:
    """Raises: RequestError for a template with random output."""
    if not re.search(r"\b(random|lipsum)\b", template):
        return
    from jinja2 import nodes

    names = _parsed(template).find_all((nodes.Filter, nodes.Name))
    found = [node.name for node in names if node.name in ("random", "lipsum")]
    if found:
        raise RequestError(
            f"the chat template is random ({found[0]}), so the same documents would become other tokens each "
            "time; name another one with model.chat_template=FILE",
            problem_id="chat-template-random",
        )


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


def _left_out(missing: Sequence[Missing]) -> dict[str, Any]:
    return {
        "leaves_out": any(one.what != "name" for one in missing),
        "leaves_out_names": any(one.what == "name" for one in missing),
    }
