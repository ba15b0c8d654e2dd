"""The output of `tunebook data RECIPE`: counts of the documents, their lengths, and samples as the model sees them.

Trained-on tokens are in color, or in double brackets without colors (a pipe, a file, NO_COLOR).
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from itertools import groupby, islice, pairwise
from textwrap import shorten
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.padding import Padding
from rich.rule import Rule
from rich.text import Text

from tunebook.config.unsafe_text import printable
from tunebook.data.corpus import IGNORED_LABEL, Row, SourceRecord, num_shared
from tunebook.data.prepared import Prepared, PreparedPart
from tunebook.errors import counted
from tunebook.terminal import print_lines, print_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TRAINED_STYLE = "black on green"
_BAR_WIDTH = 40  # characters of the fullest bin
_MANY_CUT_ANSWERS = 0.01  # of documents
_MOST_ADDED = 100  # characters shown of what a chat template adds
_REPEATED = re.compile(r"(<[^<>\s]+>)\1{3,}")  # the tokens of an image
_MOST_TOKENS = 1500  # shown of one sample: tools alone may take 500


def show_prepared(
    prepared: Prepared, tokenizer: PreTrainedTokenizerBase | None, console: Console, num_samples: int
) -> None:
    """Print all facts about prepared data; without a tokenizer, samples are token ids."""
    has_color = console.is_terminal and console.color_system is not None and not console.no_color
    print_lines(["Sources", *map(_source_line, prepared.records), *summary_lines(prepared)], console)
    for name, part in prepared.parts().items():
        print_text("\n".join(histogram_lines(name, part, prepared.unit)), console)
    if num_samples > 0:
        console.print(Text("Samples as the model sees them; trained on: "), end="")
        console.print(Text("in color", style=TRAINED_STYLE) if has_color else Text("[[in double brackets]]"))
    for name, part in prepared.parts().items():
        for title, row in titled_samples(name, part, num_samples):
            console.print(Group("", Rule(Text(title), align="left")))
            for side, input_ids, labels in sides(row):
                text = render_document(input_ids, labels, tokenizer, has_color=has_color)
                console.print(Padding(Group(*([Text(f"{side}:", style="bold")] if side else []), text), (0, 0, 0, 2)))
    print_text(f"prepared data: {prepared.folder}", console, style="dim")


def _source_line(record: SourceRecord) -> str:
    version = record.revision or (f"sha256 {record.sha256[:12]}" if record.sha256 else "generated")
    return f"  {record.location}: {record.format}, {counted(record.num_documents, 'document')}, {version}"


def summary_lines(prepared: Prepared) -> list[str]:
    """A run's output about its data before it starts: the amount, and everything that was cut, dropped or odd."""
    lines = ["Data (prepared earlier)" if prepared.was_cached else "Data"]
    for name, part in prepared.parts().items():
        counts = part.counts
        contents = [f", {count:,} {name}" for name, count in sorted(counts.contents.items())]
        lines.append(
            f"  {name}: {counted(counts.num_documents, prepared.unit)} of {counts.num_tokens:,} tokens (mean "
            f"{counts.num_tokens / counts.num_documents:,.1f}), "
            f"{_with_share(counts.num_trained_tokens, counts.num_tokens)} trained on{''.join(contents)}"
        )
        if counts.num_cut:
            lines.append(
                f"    cut or split to training.max_length={prepared.max_length}: "
                f"{_with_share(counts.num_cut, counts.num_read)}; tokens lost: {counts.num_tokens_lost:,}"
            )
        if counts.num_answers_cut:
            text = f"{_with_share(counts.num_answers_cut, counts.num_documents)} end within an answer that was cut"
            if counts.num_answers_cut >= _MANY_CUT_ANSWERS * counts.num_documents:
                text = (
                    f"warning: {text}: the model learns answers that do not end; raise training.max_length, or type "
                    f"dataset.overlong=drop{' or split' if prepared.unit == 'document' else ''}"
                )
            lines.append(f"    {text}")
        lines += [
            f"    the chat template adds to {count:,} of {counted(counts.num_read, prepared.unit)}: "
            f'"{shorten(text, _MOST_ADDED, placeholder="...")}"'
            for text, count in counts.added.most_common()
        ]
        skipped = counts.skipped
        lines += [f"    {count:,} left out: {skipped.first[reason]}" for reason, count in skipped.reasons.most_common()]
        lines += [f"    dropped: {count:,} {reason}" for reason, count in counts.dropped.most_common()]
        lines += [
            f"    note: {note}: {count:,} (the first: {counts.first[note]})"
            for note, count in counts.notes.most_common()
        ]
    return [*lines, *(f"  note: {note}" for note in prepared.notes)]


def histogram_lines(name: str, part: PreparedPart, unit: str = "document") -> list[str]:
    """The number of documents of each length."""
    edges, counts = part.counts.lengths["edges"], part.counts.lengths["counts"]
    lines = [f"Tokens of {name} {unit}s (shortest {part.counts.shortest:,}, longest {part.counts.longest:,})"]
    for start, end, count in zip(edges, edges[1:], counts, strict=False):
        last = min(end - 1, part.counts.longest)
        label = f"{start:,}" if last == start else f"{start:,} to {last:,}"
        # A bin that is not empty shows at least one mark.
        bar = "#" * max(round(_BAR_WIDTH * count / max(counts)), int(count > 0))
        lines.append(f"{label:>19} {count:>11,} {bar}".rstrip())
    return lines


def titled_samples(name: str, part: PreparedPart, num_samples: int) -> Iterator[tuple[str, Row]]:
    """Documents from all over the part, each with a title."""
    documents = part.load()
    for index in sorted(random.Random(0).sample(range(len(documents)), min(num_samples, len(documents)))):
        row = documents[index]
        num_trained = sum(label != IGNORED_LABEL for label in row["labels"])
        yield f"{name} {index + 1:,} of {len(documents):,}: {row['length']:,} tokens, {num_trained:,} trained on", row


def sides(row: Row) -> Iterator[tuple[str, list[int], list[int]]]:
    """The sides of a pair with their names; a document has one, without a name."""
    parts = {"": slice(None)}
    if (first := row.get("chosen_length")) is not None:
        parts = {"chosen": slice(first), "rejected": slice(first, None)}
    for name, part in parts.items():
        yield name, row["input_ids"][part], row["labels"][part]


def pieces_of(
    input_ids: Sequence[int], labels: Sequence[int], tokenizer: PreTrainedTokenizerBase | None
) -> list[tuple[str, bool]]:
    """The beginning of one document in stretches of text, and whether the loss counts each. Shapes: (num_tokens,)."""
    end, before = 0, ""
    trained: list[bool] = []  # by character
    for is_trained, run in groupby(labels[: _num_shown(input_ids)], key=lambda label: label != IGNORED_LABEL):
        end += sum(1 for _ in run)
        # Decoded from the start and cut: some tokenizers drop a space at the beginning of decoded text.
        decoded = _decode(input_ids[:end], tokenizer)
        # A character whose bytes end in this run was replacement characters before, and counts as this run's.
        same = num_shared(before, decoded)
        trained = trained[:same] + [is_trained] * (len(decoded) - same)
        before = decoded
    pieces = groupby(zip(before, trained, strict=True), key=lambda character: character[1])
    return [(printable("".join(text for text, _ in run)), is_trained) for is_trained, run in pieces]


def render_document(
    input_ids: Sequence[int],
    labels: Sequence[int],
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    has_color: bool,
) -> Text:
    """One document as text, the tokens that the loss counts in color or brackets. Shapes: both (num_tokens,)."""
    text = Text()
    for written, is_trained in collapsed_pieces(input_ids, labels, tokenizer):
        if is_trained and has_color:
            text.append(written, style=TRAINED_STYLE)
        else:
            text.append(f"[[{written}]]" if is_trained else written)
    return text


def collapsed_pieces(
    input_ids: Sequence[int], labels: Sequence[int], tokenizer: PreTrainedTokenizerBase | None
) -> list[tuple[str, bool]]:
    """As `pieces_of`, with the tokens of an image counted, and the number of tokens after the beginning."""
    pieces = [
        (_REPEATED.sub(lambda match: f"{match[1]} x {len(match[0]) // len(match[1])}", text), is_trained)
        for text, is_trained in pieces_of(input_ids, labels, tokenizer)
    ]
    if num_more := len(input_ids) - _num_shown(input_ids):
        pieces.append((f" ... and {num_more:,} more tokens", False))
    return pieces


def _num_shown(input_ids: Sequence[int]) -> int:
    """The tokens of one document that are shown; of equal ones in a row, as an image has them, one counts."""
    changes = (place for place, (token, after) in enumerate(pairwise(input_ids), 1) if token != after)
    return next(islice(changes, _MOST_TOKENS - 1, None), len(input_ids))


def _decode(input_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase | None) -> str:
    if tokenizer is None:
        return "".join(f"{token} " for token in input_ids)
    return str(tokenizer.decode([*input_ids], skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _with_share(count: int, total: int) -> str:
    return f"{count:,} ({count / total:.1%})" if total else f"{count:,}"
