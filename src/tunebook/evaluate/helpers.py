"""Helper processes of an evaluation: each has a copy of the model on its own GPU and answers a share of the requests.

The first process runs the harness as if it were alone. It loads the tasks and sends each helper, over a pipe, only the
requests to answer. So results are collected in one place and one order, a helper that dies costs one task, and no
communication between the GPUs has to be set up.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from tunebook.errors import DoesNotFitError, TunebookError
from tunebook.evaluate.progress import AnswerProgress
from tunebook.processes import ask_to_stop_when_parent_dies, ending

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

_COUNT, _TEXT, _ANSWERS, _NO_MEMORY, _FAILED = "count", "text", "answers", "no-memory", "failed"  # kinds of message
_SECONDS_TO_END = 20.0
_NUM_LINES_QUOTED = 15
_SPAWN = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
Answer = Callable[[str, Sequence["Instance"]], list[Any]]  # kind of request, requests -> answers
Load = Callable[[AnswerProgress], Answer]  # first call in a helper; a module-level function, because it is pickled


@dataclass(kw_only=True)
class _Helper:
    number: int
    process: SpawnProcess
    connection: Connection
    log: Path
    is_lost: bool = False


class Helpers:
    """The helpers, managed by the first process; the context manager ends them."""

    def __init__(self, progress: AnswerProgress) -> None:
        self.progress = progress
        self._helpers: list[_Helper] = []
        self._working: list[_Helper] = []  # helpers that work on this call's requests
        self._results: dict[int, list[Any] | TunebookError] = {}  # of this call, by helper number
        self._logs = tempfile.TemporaryDirectory(prefix="tunebook-evaluation-")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for helper in self._helpers:
            helper.connection.close()  # ends the helper once it has answered
            if kind is not None:
                helper.process.terminate()
        end = time.monotonic() + _SECONDS_TO_END
        for helper in self._helpers:
            helper.process.join(timeout=max(0.1, end - time.monotonic()))
            helper.process.kill()
            helper.process.join()
        self._logs.cleanup()

    def start(self, load: Load, environments: Sequence[Mapping[str, str]]) -> None:
        """Start one helper per environment."""
        for number, environment in enumerate(environments, len(self._helpers) + 1):
            ours, theirs = _SPAWN.Pipe()
            log = Path(self._logs.name) / f"{number}.log"
            process = _SPAWN.Process(target=_serve, args=(theirs, load, dict(environment), log))
            process.start()
            theirs.close()
            self._helpers.append(_Helper(number=number, process=process, connection=ours, log=log))

    def share(self, kind: str, requests: Sequence[Instance], answer: Answer) -> list[Any]:
        """Return answers in the order of the requests, computed here and by every live helper.

        Raises: TunebookError if a helper failed, DoesNotFitError if a helper ran out of memory.
        """
        self._working = [helper for helper in self._helpers if not helper.is_lost]
        self._results = {}
        shares = deal(requests, 1 + len(self._working))
        for helper, share in zip(self._working, shares[1:], strict=True):
            try:
                helper.connection.send((kind, [requests[index].args for index in share]))
            except OSError:
                self._results[helper.number] = self._lose(helper)
        try:
            own = answer(kind, [requests[index] for index in shares[0]])
        finally:  # also after an error: the next task would get this task's answers
            while len(self._results) < len(self._working):
                self.listen(timeout_s=None)
        results = [own, *(self._results[helper.number] for helper in self._working)]
        answers: list[Any] = [None] * len(requests)
        for share, result in zip(shares, results, strict=True):
            if isinstance(result, TunebookError):
                raise result
            for index, text in zip(share, result, strict=True):
                answers[index] = text
        return answers

    def listen(self, timeout_s: float | None = 0) -> None:
        """Process the helpers' pending messages; with a timeout of None, wait for the next one."""
        waiting = {helper.connection: helper for helper in self._working if helper.number not in self._results}
        for connection in wait(list(waiting), timeout_s):
            assert isinstance(connection, Connection)
            helper = waiting[connection]
            try:
                kind, content = connection.recv()
            except (EOFError, OSError):
                self._results[helper.number] = self._lose(helper)
                continue
            if kind == _COUNT:
                self.progress.advance(content)
            elif kind == _TEXT:
                self.progress.say(f"process {helper.number}: {content}")
            elif kind == _NO_MEMORY:
                self._results[helper.number] = DoesNotFitError(content, problem_id="batch-does-not-fit")
            elif kind == _FAILED:
                message = f"process {helper.number} of the evaluation failed: {content}"
                self._results[helper.number] = TunebookError(message, problem_id="evaluation-helper")
            else:
                self._results[helper.number] = content

    def _lose(self, helper: _Helper) -> TunebookError:
        """Return the error for a helper that died; it gets no more requests."""
        helper.is_lost = True
        helper.connection.close()
        helper.process.join()
        how = ending(helper.process.exitcode or 0)
        lines = helper.log.read_text(encoding="utf-8", errors="replace").splitlines() if helper.log.exists() else []
        last = "".join(f"\n  {line}" for line in lines[-_NUM_LINES_QUOTED:])
        message = f"process {helper.number} of the evaluation {how}" + (last and f"\nIts last output:{last}")
        return TunebookError(message, problem_id="evaluation-helper")


def deal(requests: Sequence[Instance], num_shares: int) -> list[list[int]]:
    """Split request indexes into shares of equal work; requests with the same context stay together.

    The harness computes a context once for all its single-token continuations.
    """
    by_context: dict[str, list[int]] = {}
    for index, request in enumerate(requests):
        by_context.setdefault(str(request.args[0]), []).append(index)
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    for number, context in enumerate(sorted(by_context, key=len, reverse=True)):
        # Alternate the direction; otherwise the first share would get the longest of each round.
        place = number % (2 * num_shares)
        shares[min(place, 2 * num_shares - 1 - place)] += by_context[context]
    return shares


class _HelperProgress(AnswerProgress):
    """Sends a helper's progress to the first process, because a helper's own output is not displayed."""

    def __init__(self, connection: Connection) -> None:
        super().__init__("helper")
        self._connection = connection

    def say(self, text: str) -> None:
        """Send a sentence for the user."""
        self._connection.send((_TEXT, text))

    def advance(self, num_requests: int = 1) -> None:
        """Count answered requests, here and in the first process."""
        self._num_done += num_requests
        self._connection.send((_COUNT, num_requests))


def _serve(connection: Connection, load: Load, environment: dict[str, str], log: Path) -> None:
    """Run a helper: load the model, and answer requests until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the first process, which ends its helpers
    ask_to_stop_when_parent_dies()
    with log.open("wb") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    os.environ.update(environment)  # before torch looks for GPUs
    try:
        answer = load(_HelperProgress(connection))
    except TunebookError as error:
        print(f"evaluation: {error.message}", file=sys.stderr)
        sys.exit(error.exit_code)
    with suppress(EOFError, ConnectionError):
        while True:
            kind, arguments = connection.recv()
            connection.send(_result(answer, kind, arguments))


def _result(answer: Answer, kind: str, arguments: list[Any]) -> tuple[str, Any]:
    """Return the message with the answers, or with the error, whose traceback goes into the log."""
    from lm_eval.api.instance import Instance

    requests = [Instance(kind, {}, tuple(given), index) for index, given in enumerate(arguments)]
    try:
        return _ANSWERS, answer(kind, requests)
    except DoesNotFitError as error:
        return _NO_MEMORY, error.message
    except Exception as error:
        traceback.print_exc()
        return _FAILED, f"{type(error).__name__}: {error}"
