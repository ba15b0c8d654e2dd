"""A conversation: its turns, which of them fit into the model's context, and how it is saved."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tunebook.data.turns import Turn
from tunebook.errors import RequestError
from tunebook.evaluate.chat import Ending, Sampling
from tunebook.files import atomic_write_text

if TYPE_CHECKING:
    from tunebook.evaluate.chat.model import ChatModel


class Session:
    """Asks a model and keeps the history, except for questions that fail."""

    def __init__(self, model: ChatModel, sampling: Sampling, system_prompt: str | None) -> None:
        self.model = model
        self.turns: list[Turn] = []  # the user's and the assistant's turns, alternating
        self.system_prompt = system_prompt or None
        self._sampling = sampling
        self._num_left_out = 0  # number of oldest turns left out
        self._saved_as: set[Path] = set()
        if self.system_prompt is not None:
            self._check_system_prompt(self.system_prompt)
        self.reset()

    def reset(self) -> None:
        """Forget the turns; the same questions get the same answers again."""
        self.turns = []
        self._num_left_out = 0
        self.model.seed(self._sampling.seed)

    def set_system_prompt(self, text: str | None) -> None:
        """Start a new conversation with another system prompt. Raises: DataError; the old prompt then stays."""
        if text is not None:
            self._check_system_prompt(text)
        self.system_prompt = text
        self.reset()

    def ask(
        self, question: str, on_text: Callable[[str], None], is_interrupted: Callable[[], bool] = lambda: False
    ) -> list[str]:
        """Answer a question and keep both; return notes for the user.

        Raises: RequestError, DataError, DoesNotFitError; then neither is kept.
        """
        turns = [*self.turns, {"role": "user", "content": checked_text(question)}]
        tokens, num_left_out = self._fit(turns)
        space = self.model.context_tokens - len(tokens)
        sampling = replace(self._sampling, max_new_tokens=min(self._sampling.max_new_tokens, space))
        generated = self.model.generate(tokens, sampling, on_text, is_interrupted)
        notes = [_left_out_note(num_left_out)] if num_left_out > self._num_left_out else []
        self._num_left_out = num_left_out
        if generated.ending is Ending.interrupted:
            notes.append("stopped")
            if not generated.text:
                return [*notes, "there was no answer yet, so the question is not kept"]
        elif generated.ending is Ending.length and space <= self._sampling.max_new_tokens:
            notes.append(f"cut off: the context of {self.model.context_tokens} tokens is full; /reset empties it")
        elif generated.ending is Ending.length:
            notes.append(f"cut off after --max-new-tokens {self._sampling.max_new_tokens}")
        elif not generated.text:
            notes.append("the model gave an empty answer")
        self.turns = [*turns, {"role": "assistant", "content": generated.text}]
        return notes

    def save(self, text: str) -> Path:
        """Write the conversation as one line of JSONL in the format `messages`, which can be trained on.

        Raises: RequestError for an empty conversation, an existing file or a missing folder.
        """
        file = Path(text).expanduser().absolute()
        if not self.turns:
            raise RequestError("the conversation is empty, so there is nothing to save", problem_id="chat-save")
        if file.suffix != ".jsonl":
            raise RequestError(
                f"conversations are saved as JSONL, and {file.name} does not end so; type /save "
                f"{Path(text).with_suffix('.jsonl')}",
                problem_id="chat-save",
            )
        if file.exists() and file not in self._saved_as:
            raise RequestError(f"{file} already exists; name another file", problem_id="chat-save")
        try:
            atomic_write_text(file, json.dumps({"messages": self._messages(self.turns)}, ensure_ascii=False) + "\n")
        except OSError as error:
            raise RequestError(
                f"{file} cannot be written: {error.strerror or error}; name a file in a folder that you may write to",
                problem_id="chat-save",
            ) from error
        self._saved_as.add(file)
        return file

    def _messages(self, turns: list[Turn]) -> list[Turn]:
        system = [] if self.system_prompt is None else [{"role": "system", "content": self.system_prompt}]
        return [*system, *turns]

    def _check_system_prompt(self, text: str) -> None:
        """Check once, rather than at every question, that the template supports a system turn."""
        self.model.encode([{"role": "system", "content": checked_text(text)}, {"role": "user", "content": "?"}])

    def _fit(self, turns: list[Turn]) -> tuple[list[int], int]:
        """Return tokens of the newest turns that leave space for an answer, and the number of turns left out."""
        context = self.model.context_tokens
        wanted = context - min(self._sampling.max_new_tokens, context // 2)
        last = len(turns) - 1
        for first in range(self._num_left_out, last + 1, 2):  # a question and its answer stay together
            tokens = self.model.encode(self._messages(turns[first:]))
            if len(tokens) <= wanted or (first == last and len(tokens) < context):
                return tokens, first
        raise RequestError(
            f"the question has {len(tokens)} tokens with its template, and the model's context holds {context}; "
            "make it shorter",
            problem_id="chat-too-long",
        )


def checked_text(text: str) -> str:
    """Return the text if a model can answer it. Raises: RequestError if it is blank or not valid Unicode."""
    if not text.strip():
        raise RequestError("there is nothing to answer: the text is empty; write a question", problem_id="chat-no-text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text is not UTF-8 (at character {error.start + 1}); convert it, for example with iconv",
            problem_id="chat-no-text",
        ) from error
    return text


def _left_out_note(num_left_out: int) -> str:
    questions = num_left_out // 2
    which = "your first question and its answer" if questions == 1 else f"your first {questions} questions and answers"
    return f"{which} no longer fit into the model's context and are left out from here on"
