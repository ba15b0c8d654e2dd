"""Several processes for one evaluation, each with the model on a GPU of its own; the first shares out the requests.

The first process runs the harness as if it were alone: it loads the tasks, and only what the model is to answer is
dealt out, text in, answers out, over a pipe to each helper. So results are put together in one place and in one order,
a helper that dies costs one task and no waiting, and nothing has to be set up between the GPUs.
"""

from __future__ import annotations

import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from tunebook.errors import DoesNotFitError, TunebookError
from tunebook.evaluate.progress import AnswerProgress
from tunebook.parent_death import stopping_with_parent

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

COUNT, SAID, ANSWERS, NO_MEMORY, FAILED = "count", "said", "answers", "no-memory", "failed"  # what a helper sends
_SECONDS_TO_END = 20.0
_NUM_LINES_QUOTED = 15
Answer = Callable[[str, Sequence["Instance"]], list[Any]]  # kind of request, requests -> answers


class HelperError(TunebookError):
    """A process that helps with an evaluation failed or died."""

    def __init__(self, message: str) -> None:
        super().__init__(message, problem_id="evaluation-helper")


@dataclass(kw_only=True)
class _Helper:
    number: int
    process: subprocess.Popen[bytes]
    line: Connection
    log: Path
    is_lost: bool = False


@dataclass(kw_only=True)
class Helpers:
    """The other processes, as the first one sees them; a context manager that ends them."""

    progress: AnswerProgress
    _helpers: list[_Helper] = field(default_factory=list)
    _at_work: list[_Helper] = field(default_factory=list)  # on the requests of this call
    _found: dict[int, list[Any] | TunebookError] = field(default_factory=dict)  # what they came to, by their number
    _folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="tunebook-evaluation-")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for helper in self._helpers:
            helper.line.close()  # which ends it, once it has answered
            if kind is not None:
                helper.process.terminate()
        end = time.monotonic() + _SECONDS_TO_END
        for helper in self._helpers:
            with suppress(subprocess.TimeoutExpired):
                helper.process.wait(timeout=max(0.1, end - time.monotonic()))
            helper.process.kill()
            helper.process.wait()
        assert self._folder is not None
        self._folder.cleanup()

    def start(self, command: Sequence[str], environments: Sequence[Mapping[str, str]]) -> None:
        """Start a helper for each environment: `command` and the descriptor of its end of the pipe."""
        assert self._folder is not None
        for number, environment in enumerate(environments, len(self._helpers) + 1):
            ours, theirs = socket.socketpair()
            log = Path(self._folder.name) / f"{number}.log"
            with ours, theirs, log.open("wb") as stream:
                process = subprocess.Popen(
                    stopping_with_parent([*command, str(theirs.fileno())]),
                    env=dict(environment),
                    stdout=stream,
                    stderr=stream,
                    pass_fds=[theirs.fileno()],
                )
                line = Connection(ours.detach())
            self._helpers.append(_Helper(number=number, process=process, line=line, log=log))

    def share(self, kind: str, requests: Sequence[Instance], answer: Answer) -> list[Any]:
        """Answers in the order of the requests, computed here and by every helper that is left.

        Raises: HelperError for one that failed, DoesNotFitError for one whose memory was too small.
        """
        self._at_work = [helper for helper in self._helpers if not helper.is_lost]
        self._found = {}
        shares = deal(requests, 1 + len(self._at_work))
        for helper, share in zip(self._at_work, shares[1:], strict=True):
            try:
                helper.line.send((kind, [requests[index].args for index in share]))
            except OSError:
                self._found[helper.number] = self._lost(helper)
        try:
            own = answer(kind, [requests[index] for index in shares[0]])
        finally:
            self._wait_for_all()  # also after an error: the next task would get the answers of this one
        results = [own, *(self._found[helper.number] for helper in self._at_work)]
        answers: list[Any] = [None] * len(requests)
        for share, result in zip(shares, results, strict=True):
            if isinstance(result, TunebookError):
                raise result
            for index, text in zip(share, result, strict=True):
                answers[index] = text
        return answers

    def listen(self) -> None:
        """Take in what helpers have sent meanwhile; does not wait."""
        self._hear(timeout_s=0)

    def _wait_for_all(self) -> None:
        while len(self._found) < len(self._at_work):
            self._hear(timeout_s=None)

    def _hear(self, timeout_s: float | None) -> None:
        by_line = {helper.line: helper for helper in self._at_work if helper.number not in self._found}
        for line in wait(list(by_line), timeout_s):
            assert isinstance(line, Connection)
            helper = by_line[line]
            try:
                kind, content = line.recv()
            except (EOFError, OSError):
                self._found[helper.number] = self._lost(helper)
                continue
            if kind == COUNT:
                self.progress.advance(content)
            elif kind == SAID:
                self.progress.say(f"process {helper.number}: {content}")
            else:
                self._found[helper.number] = self._result(helper, kind, content)

    def _result(self, helper: _Helper, kind: str, content: Any) -> list[Any] | TunebookError:
        if kind == NO_MEMORY:
            return DoesNotFitError(content, problem_id="batch-does-not-fit")
        if kind == FAILED:
            return HelperError(f"process {helper.number} of the evaluation failed: {content}")
        answers: list[Any] = content
        return answers

    def _lost(self, helper: _Helper) -> HelperError:
        """The error for a helper that is gone; it is not asked again."""
        helper.is_lost = True
        helper.line.close()
        code = helper.process.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        said = helper.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-_NUM_LINES_QUOTED:]
        last = "\nThe last it said:\n  " + "\n  ".join(said) if said else ""
        return HelperError(f"process {helper.number} of the evaluation {how}{last}")


def deal(requests: Sequence[Instance], num_shares: int) -> list[list[int]]:
    """Indexes of requests, dealt out so that every share has as many long ones; those of one context stay together.

    The harness computes a context once for all its continuations of a single token.
    """
    by_context: dict[str, list[int]] = {}
    for index, request in enumerate(requests):
        by_context.setdefault(str(request.args[0]), []).append(index)
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    for number, context in enumerate(sorted(by_context, key=len, reverse=True)):
        # There and back again: else the first share would get the longest of each round.
        place = number % (2 * num_shares)
        shares[min(place, 2 * num_shares - 1 - place)] += by_context[context]
    return shares
