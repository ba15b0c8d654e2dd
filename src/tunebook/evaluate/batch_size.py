"""How many requests are computed at once: as many as were asked for, or (auto) the most that the memory takes.

Auto starts large and halves when the memory runs out. What is remembered is rows times length, so that a task of short
prompts is not slowed down by one of long prompts before it. Answers do not depend on the size: greedy decoding and
likelihoods are computed row by row.
"""

from __future__ import annotations

from tunebook.errors import DoesNotFitError, RequestError

AUTO = "auto"
LARGEST_ON_GPU = 256  # beyond it a GPU is busy with models of any size
LARGEST_ON_CPU = 32  # where more rows at once are hardly faster, and running out of memory is a kill without a word


class BatchSize:
    """The size for each kind of request (likelihoods need other memory than generation does)."""

    def __init__(self, asked: int | None, largest: int = LARGEST_ON_GPU) -> None:
        self.asked = asked  # None: auto
        self._largest = largest
        self._budgets: dict[str, int] = {}  # rows x length that is known to fit, once a larger one did not
        self._too_large: dict[str, int] = {}  # sizes that did not fit and have not been told yet
        self._told: dict[str, int] = {}
        self.smallest: int | None = None  # that was used for the task

    def begin_task(self) -> None:
        """Another task follows."""
        self.smallest = None

    def size_for(self, kind: str, length: int, limit: int | None = None) -> int:
        """The size for requests of up to `length` characters; `limit` caps it where memory can be told beforehand."""
        if self.asked is not None:
            return self.asked
        size = min(self._largest, limit or self._largest)
        if kind in self._budgets:
            size = min(size, self._budgets[kind] // max(1, length))
        return _power_of_two(size)

    def lower(self, kind: str, size: int, length: int) -> None:
        """Note that `size` did not fit. Raises: DoesNotFitError where it was asked for, or is one already."""
        smaller = size // 2
        if smaller == 0:
            raise DoesNotFitError(
                f"a single request of {length:,} characters does not fit into the memory beside the model; end what "
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
        """Note that `size` did; what to tell people, once, where a larger one did not."""
        self.smallest = min(self.smallest or size, size)
        too_large = self._too_large.pop(kind, None)
        if too_large is None or self._told.get(kind) == size:
            return None
        self._told[kind] = size
        return f"batch size auto: {too_large} ran out of memory, {size} fits"


def read_batch_size(text: str) -> int | None:
    """`auto` (None) or a count of requests. Raises: RequestError for anything else."""
    if text == AUTO:
        return None
    if not text.isdecimal() or int(text) == 0:
        raise RequestError(
            f"--batch-size {text} is no number of requests; type one of 1 or more, or {AUTO} for the most that the "
            "memory takes",
            problem_id="batch-size",
        )
    return int(text)


def _power_of_two(size: int) -> int:
    """The largest power of two that is not larger; 1 for less than that."""
    return 1 << max(0, size.bit_length() - 1)
