"""Batch size of the requests: as asked for, or (auto) the largest that fits into memory.

Auto starts large and halves when memory runs out. It remembers rows times length, so that long prompts of one task do
not slow down short ones of the next. Answers do not depend on the batch size, because rows are computed independently.
"""

from __future__ import annotations

from tunebook.errors import DoesNotFitError, RequestError

AUTO = "auto"
LARGEST_ON_GPU = 256  # larger batches do not make a GPU faster, for models of any size
LARGEST_ON_CPU = 32  # larger ones are hardly faster, and running out of memory kills the process


class BatchSize:
    """Batch size per kind of request, because log-likelihoods need different memory than generation."""

    def __init__(self, asked: int | None, largest: int = LARGEST_ON_GPU) -> None:
        self.asked = asked  # None: auto
        self._largest = largest
        self._budgets: dict[str, int] = {}  # rows x length known to fit, set once a larger one did not
        self._too_large: dict[str, int] = {}  # sizes that did not fit and are not reported yet
        self._reported: dict[str, int] = {}
        self.smallest: int | None = None  # smallest size used for the task

    def begin_task(self) -> None:
        """Start a new task."""
        self.smallest = None

    def size_for(self, kind: str, length: int, limit: int | None = None) -> int:
        """Return the size for requests up to `length` characters; `limit` caps it if memory is known beforehand."""
        if self.asked is not None:
            return self.asked
        size = min(self._largest, limit or self._largest)
        if kind in self._budgets:
            size = min(size, self._budgets[kind] // max(1, length))
        return _power_of_two(size)

    def lower(self, kind: str, size: int, length: int) -> None:
        """Record that `size` did not fit. Raises: DoesNotFitError if the user asked for it, or if it is already 1."""
        smaller = size // 2
        if smaller == 0:
            raise DoesNotFitError(
                f"a single request of {length:,} characters does not fit into the memory next to the model; end what "
                "else runs there, or evaluate on more GPUs: a model is spread over those that are visible",
                problem_id="batch-does-not-fit",
            )
        if self.asked is not None:
            raise DoesNotFitError(
                f"a batch of {size} requests does not fit into the memory (the longest has {length:,} characters); "
                f"type --batch-size {_power_of_two(smaller)}, or --batch-size auto for the largest that fits",
                problem_id="batch-does-not-fit",
            )
        self._budgets[kind] = smaller * length
        self._too_large.setdefault(kind, size)

    def fitted(self, kind: str, size: int) -> str | None:
        """Record that `size` fits; return a message for the user, once, if a larger size did not fit."""
        self.smallest = min(self.smallest or size, size)
        too_large = self._too_large.pop(kind, None)
        if too_large is None or self._reported.get(kind) == size:
            return None
        self._reported[kind] = size
        return f"batch size auto: {too_large} ran out of memory, {size} fits"


def read_batch_size(text: str) -> int | None:
    """Parse `auto` (None) or a number of requests. Raises: RequestError for anything else."""
    if text == AUTO:
        return None
    if not text.isdecimal() or int(text) == 0:
        raise RequestError(
            f"--batch-size {text} is not a number of requests; type a number from 1, or {AUTO} for the most that fit "
            "into memory",
            problem_id="batch-size",
        )
    return int(text)


def _power_of_two(size: int) -> int:
    """Return the largest power of two up to `size`; at least 1."""
    return 1 << max(0, size.bit_length() - 1)
