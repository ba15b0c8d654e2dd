"""Collect the problems of documents, to report them together instead of line by line, or to leave those out."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from tunebook.errors import DataError

MAX_REPORTED = 10  # documents shown of one file; the rest is counted
_LONGEST_REASON = 160  # characters
_VALUES = re.compile(r"(?<!\w)'[^']*'|\d+")  # of one document, in a message


@dataclass(kw_only=True)
class Skipped:
    """Documents that were left out (dataset.bad_documents=skip), by reason."""

    reasons: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)  # of each reason: the first document, with its message

    def add(self, message: str, place: str) -> None:
        """Count one document. Messages that differ only in numbers and quoted values are one reason."""
        reason = _VALUES.sub("...", message.splitlines()[0])[:_LONGEST_REASON]
        self.reasons[reason] += 1
        self.first.setdefault(reason, f"{place}: {message}")

    def update(self, other: Skipped) -> None:
        """Add the documents of another count."""
        self.reasons.update(other.reasons)
        self.first = other.first | self.first

    def check_share(self, num_documents: int, max_share: float, what: str) -> None:
        """Raises: DataError if more than `max_share` of `num_documents` were left out."""
        if self.reasons.total() <= max_share * num_documents:
            return
        lines = [f"  {count:,}: {self.first[reason]}" for reason, count in self.reasons.most_common(MAX_REPORTED)]
        headline = (
            f"{what}: {self.reasons.total():,} of {num_documents:,} documents cannot be used, more than "
            f"dataset.max_bad_share={max_share:g} allows. The reasons, each with its first document:"
        )
        raise DataError("\n".join([headline, *lines]), problem_id="data-too-many-bad")


class DocumentError(Exception):
    """One document cannot be used; the reader adds its place. Never leaves `tunebook.data`."""

    def __init__(self, message: str, *, problem_id: str = "data-bad-document") -> None:
        super().__init__(message)
        self.message = message
        self.problem_id = problem_id


def type_name(value: object) -> str:
    """The JSON type of a value, in words; tables also have types that JSON has not."""
    if value is None:
        return "null"
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    name = names.get(type(value))
    return f"a JSON {name}" if name is not None else f"of type {type(value).__name__}"


class DocumentProblems:
    """The unusable documents of one file or split: the first few in full, the others counted."""

    def __init__(self, location: str, unit: str = "line") -> None:
        self.location = location  # the file's absolute path, or the split
        self.unit = unit  # what documents are numbered by: line, row or item
        self.num_problems = 0
        self.num_documents = 0
        self.num_blank_lines = 0
        self.notes: list[str] = []  # other remarks on the file
        self.skipped: Skipped | None = None  # counts unusable documents, which then are no error
        self._shown: list[tuple[str, DocumentError]] = []

    def add(self, number: int, error: DocumentError, detail: str = "") -> None:
        """Note that document `number` cannot be used."""
        self.num_problems += 1
        place = f"{self.unit} {number}{detail}"
        if self.skipped is not None:
            self.skipped.add(error.message, f"{self.location}, {place}")
        elif len(self._shown) < MAX_REPORTED:
            self._shown.append((place, error))

    def raise_if_any(self) -> None:
        """Raises: DataError with every noted problem, if there are any."""
        if not self._shown:
            return
        problem_id = self._shown[0][1].problem_id
        if self.num_problems == 1:
            place, error = self._shown[0]
            raise DataError(f"{self.location}, {place}: {error.message}", problem_id=problem_id)
        total = self.num_documents + self.num_problems
        lines = [f"{self.location}: {self.num_problems:,} of {total:,} documents cannot be used"]
        lines += [f"  {place}: {error.message}" for place, error in self._shown]
        if self.num_problems > len(self._shown):
            lines.append(f"  and {self.num_problems - len(self._shown):,} more")
        raise DataError("\n".join(lines), problem_id=problem_id)
