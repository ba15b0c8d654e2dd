"""Held-out conversations as documents of the harness: their prompts are made by the run's own chat template.

The last turn is the expected answer; the turns before it are rendered as the prompt. They are written again for each
evaluation, because the harness must see this run's template.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebook.config.choices import Format
from tunebook.data.formats import FormatSettings, Normaliser
from tunebook.data.problems import DocumentError, DocumentProblems
from tunebook.data.readers import read_records
from tunebook.errors import DataError
from tunebook.files import atomic_write_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GROUP_KEY = "task"  # next to the conversation in its file: the group that its score counts for
UNGROUPED = "all"  # the group of conversations that name none


@dataclass(frozen=True, kw_only=True)
class Item:
    """One document as the harness reads it."""

    prompt: str
    answer: str
    task: str  # the group that its score counts for


def render_conversations(file: Path, system_prompt: str | None, tokenizer: PreTrainedTokenizerBase) -> list[Item]:
    """The conversations of a file, in any format that conversations are trained on, with this tokenizer's template.

    `system_prompt` is put before conversations without one, as in training. Raises: DataError with every problem.
    """
    from tunebook.data.template import ConversationRenderer

    problems = DocumentProblems(str(file))
    normaliser = Normaliser(Format.auto, FormatSettings(system_prompt=system_prompt))
    conversations = []
    for number, record in read_records(file, problems, normaliser.account):
        try:
            conversations.append((_turns(normaliser.row(record)), str(record.get(GROUP_KEY, UNGROUPED))))
        except DocumentError as error:
            problems.add(number, error)
    problems.num_documents = len(conversations)
    problems.raise_if_any()
    if not conversations:
        raise DataError(
            f"{file} holds no conversation, so there is nothing to evaluate on", problem_id="data-file-empty"
        )
    renderer = ConversationRenderer(tokenizer)
    return [
        Item(prompt=renderer.prompt(turns[:-1]), answer=turns[-1]["content"], task=group)
        for turns, group in conversations
    ]


def _turns(row: dict[str, Any]) -> list[dict[str, str]]:
    turns = [{"role": turn["role"], "content": turn["content"]} for turn in row.get("messages", [])]
    if not turns:
        raise DocumentError("it is no conversation; write it as ShareGPT or messages")
    if turns[-1]["role"] != "assistant":
        raise DocumentError("it must end with the assistant's turn, which is the expected answer")
    return turns


def write_items(items: Iterable[Item], file: Path) -> None:
    """Write the documents as JSONL, in one step: two evaluations of one run may run at the same time."""
    file.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_text(file, "".join(json.dumps(asdict(item), ensure_ascii=False) + "\n" for item in items))


def check_prompt_lengths(items: list[Item], tokenizer: PreTrainedTokenizerBase, max_prompt_tokens: int) -> None:
    """Refuse prompts whose beginning the harness would cut off to leave space for the answer. Raises: DataError."""
    encoded = tokenizer([item.prompt for item in items], add_special_tokens=False)["input_ids"]
    lengths = [len(tokens) for tokens in encoded]
    num_long = sum(length > max_prompt_tokens for length in lengths)
    if num_long:
        raise DataError(
            f"{num_long} of {len(items)} held-out prompts are longer than the {max_prompt_tokens} tokens that the "
            f"model's context leaves for them (the longest has {max(lengths)}), and the harness would cut off their "
            "beginning; shorten them, or lower generation_kwargs.max_gen_toks in the task's file",
            problem_id="heldout-too-long",
        )
