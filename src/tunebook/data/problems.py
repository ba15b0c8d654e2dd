"""Collect the problems of one file's documents, to report them together instead of line by line."""

from __future__ import annotations

from tunebook.errors import DataError

MAX_REPORTED = 10  # documents shown of one file; the rest is counted


class DocumentError(Exception):
    """One document cannot be used; the reader adds its place. Never leaves `tunebook.data`."""

    def __init__(self, message: str, *, problem_id: str = "data-bad-document") -> None:
        super().__init__(message)
        self.message = message
        self.problem_id = problem_id


class DocumentProblems:
    """The unusable documents of one file or split: the first few in full, the others counted."""

    def __init__(self, location: str, unit: str = "line") -> None:
        self.location = location  # the file's absolute path, or the split
        self.unit = unit  # what documents are numbered by: line, row or item
        self.num_problems = 0
        self.num_documents = 0
        self.num_blank_lines = 0
        self.notes: list[str] = []  # other remarks on the file
        self._shown: list[tuple[str, DocumentError]] = []

    def place(self, number: int, detail: str = "") -> str:
        """Where a document is, without the file: `line 17`."""
        return f"{self.unit} {number}{detail}"

    def add(self, number: int, error: DocumentError, detail: str = "") -> None:
        """Note that document `number` cannot be used."""
        self.num_problems += 1
        if len(self._shown) < MAX_REPORTED:
            self._shown.append((self.place(number, detail), error))

    def raise_if_any(self) -> None:
        """Raises: DataError with every noted problem, if there are any."""
        if not self._shown:
            return
        problem_id = self._shown[0][1].problem_id
        if self.num_problems == 1:
            place, error = self._shown[0]
            raise DataError(f"{self.location}, {place}: {error.message}", problem_id=problem_id)
        places: dict[str, list[str]] = {}
        for place, error in self._shown:  # often all have the same problem
            places.setdefault(error.message, []).append(place)
        lines = [f"  {', '.join(each)}: {message}" for message, each in places.items()]
        if self.num_problems > len(self._shown):
            lines.append(f"  and {self.num_problems - len(self._shown):,} more")
        total = self.num_documents + self.num_problems
        headline = f"{self.location}: {self.num_problems:,} of {total:,} documents cannot be used"
        raise DataError("\n".join([headline, *lines]), problem_id=problem_id)
