"""Helper processes of an evaluation: each has a copy of the model on its own GPU and answers a share of the requests.

The first process runs the harness as if it were alone and sends the helpers only requests. So results are collected in
one place and one order, and an error costs one task. (The harness' own way, under accelerate, runs it on every rank: an
error on one leaves the others waiting in a collective, and models that are loaded already are not accepted.)
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from tunebook.errors import TunebookError
from tunebook.evaluate.progress import AnswerProgress
from tunebook.processes import ask_to_stop_when_parent_dies
from tunebook.terminal import quiet_libraries

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

_SPAWN = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
Answer = Callable[[str, Sequence["Instance"]], list[Any]]  # kind of request, requests -> answers
Load = Callable[[AnswerProgress], Answer]  # first call in a helper; a module-level function, because it is pickled
_loaded: list[Answer] = []  # in a helper: the function that answers
_quiet = ExitStack()  # in a helper, until it ends


class Helpers:
    """The helpers, managed by the first process; the context manager ends them."""

    def __init__(self, progress: AnswerProgress) -> None:
        self._progress = progress
        self._environments: Sequence[Mapping[str, str]] = ()
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is not None:
            for process in multiprocessing.active_children():
                process.terminate()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def start(self, load: Load, environments: Sequence[Mapping[str, str]]) -> None:
        """Start one helper per environment, and have them load the model."""
        self._load, self._environments = load, environments
        if environments:
            self._open()

    def _open(self) -> ProcessPoolExecutor:
        queue = _SPAWN.Queue()
        for environment in self._environments:
            queue.put(dict(environment))
        self._progress.others = counter = _SPAWN.Value("q")
        self._pool = ProcessPoolExecutor(len(self._environments), _SPAWN, _start, (self._load, queue, counter))
        for _ in self._environments:
            self._pool.submit(os.getpid)  # starts a process
        return self._pool

    def share(self, kind: str, requests: Sequence[Instance], answer: Answer) -> list[Any]:
        """Return answers in the order of the requests, computed here and by the helpers.

        Raises: TunebookError if a helper died, and the next call starts new ones; the helpers' own errors.
        """
        shares = deal(requests, 1 + len(self._environments))
        try:
            pool = self._pool or self._open()
            futures = [pool.submit(_answer_share, kind, [requests[index].args for index in one]) for one in shares[1:]]
            try:
                results = [answer(kind, [requests[index] for index in shares[0]])]
            finally:
                wait(futures)  # also after an error: the next task needs the helpers
            results += [future.result() for future in futures]
        except BrokenProcessPool as error:
            self._pool = None
            raise TunebookError(
                "a helper process of the evaluation was killed, or could not load the model; its message is above",
                problem_id="evaluation-helper",
            ) from error
        answers = {
            index: text
            for share, result in zip(shares, results, strict=True)
            for index, text in zip(share, result, strict=True)
        }
        return [answers[index] for index in range(len(requests))]


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
    """Counts a helper's answers for the first process."""

    def __init__(self, counter: Any) -> None:
        super().__init__("helper")
        self._counter = counter

    def say(self, text: str) -> None:
        """The first process says the same."""

    def advance(self, num_requests: int = 1) -> None:
        """Count answered requests, here and in the first process."""
        self._num_done += num_requests
        with self._counter.get_lock():
            self._counter.value += num_requests


def _start(load: Load, environments: Any, counter: Any) -> None:
    """Load the model in a helper, under an environment that no other helper has."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the first process, which ends its helpers
    ask_to_stop_when_parent_dies()
    _quiet.enter_context(quiet_libraries())
    os.environ.update(environments.get())  # before torch looks for GPUs
    _loaded.append(load(_HelperProgress(counter)))


def _answer_share(kind: str, arguments: Sequence[Any]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return _loaded[0](kind, [Instance(kind, {}, tuple(given), index) for index, given in enumerate(arguments)])
