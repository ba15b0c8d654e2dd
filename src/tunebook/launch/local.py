"""Run a launch command on this machine and wait for it, handing on requests to stop; nothing it started outlives it.

The command gets a process group of its own, so that Ctrl-C in a terminal reaches it from here only, once and in the
right place. torchrun is left out of it: it would give its ranks 30 seconds and then kill them, which is too short to
save a large model. A process whose launcher dies is asked to stop by the kernel.
"""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from tunebook.config.choices import Generation
from tunebook.config.schema import RunConfig
from tunebook.errors import TunebookError
from tunebook.launch.logs import Failure
from tunebook.launch.other_launchers import without_other_launchers
from tunebook.processes import adopting_orphans, children_of, end_children, stopping_with_parent
from tunebook.train.signals import RequestCount

TORCHRUN = "torch.distributed.run"
# What is sent on for a request: 1 finish the step and save, 2 end without saving (a rank takes a second request by
# SIGINT as that, and is killed if it cannot), 3 and later kill. Those after the first come by Ctrl-C alone.
_FIRST = {signal.SIGTERM: signal.SIGTERM, signal.SIGUSR1: signal.SIGUSR1, signal.SIGHUP: signal.SIGTERM}
_HANDED_ON = (
    *("HF_HOME", "HF_HUB_CACHE", "HF_TOKEN", "HF_HUB_OFFLINE"),
    *("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_ENTITY", "WANDB_MODE"),
    *("OMP_NUM_THREADS", "PYTHONPATH"),
)
_HANDED_ON_AS = ("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "TUNEBOOK_")
_OF_THE_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the second is its older name
POLL_S = 0.2
_SECOND_WITHIN_S = 2.0  # to end after a second request: a rank that waits in a library's code never hears of it


@dataclass(frozen=True, kw_only=True)
class ProcessEnd:
    """How a command ended."""

    exit_code: int  # below zero: killed by that signal
    stopped_by: str | None  # the first request to stop that came in meanwhile
    failed: Failure | None = None  # the rank that failed first, where its own launcher says so
    failure: TunebookError | None = None  # what the launcher ended it for: a node that never came, or was lost
    lost_ranks: tuple[int, ...] = ()  # of a node that was lost
    notice: str | None = None  # which machines were to be taken away, and when


def run_and_wait(
    command: list[str],
    environment: Mapping[str, str],
    keep_open: Sequence[int] = (),
    *,
    log: Path | None = None,
    stop_timeout_s: float = 60,
    find_stall: Callable[[], TunebookError | None] = lambda: None,
) -> ProcessEnd:
    """Run a command to its end; the file descriptors `keep_open` stay open in it, `log` takes its standard error.

    What it leaves behind when it is killed gets `stop_timeout_s` to save and end, and is killed then. `find_stall` is
    asked again and again for a reason why it will never end: then it is killed.
    """
    started: list[Started] = []
    pending: list[signal.Signals] = []

    def hand_on(number: signal.Signals) -> None:
        if started:
            started[0].send(number)
        else:
            pending.append(number)

    requests = StopRequests(hand_on)
    with requests.listening(), adopting_orphans():
        before = set(children_of(os.getpid()))
        started.append(start_command(command, environment, keep_open, log=log))
        for number in pending:
            started[0].send(number)
        exit_code, stall = _wait_for(started[0], requests, find_stall)
        is_urgent = stall is not None
        end_children(exclude=before, timeout_s=stop_timeout_s, is_urgent=lambda: is_urgent or requests.is_urgent)
    return ProcessEnd(exit_code=exit_code, stopped_by=requests.first, failure=stall)


def _wait_for(
    started: Started, requests: StopRequests, find_stall: Callable[[], TunebookError | None]
) -> tuple[int, TunebookError | None]:
    """The command's exit code, once it has ended, and the stall for which it was killed, if it was.

    It is also killed some time after a second request.
    """
    stall: TunebookError | None = None
    while True:
        with suppress(subprocess.TimeoutExpired):
            return started.process.wait(POLL_S), stall
        stall = stall or find_stall()
        if requests.overdue_s > 0 or stall is not None:
            started.kill()


@dataclass(frozen=True, kw_only=True)
class Started:
    """A command at work: torchrun with its ranks, or one process."""

    process: subprocess.Popen[bytes]
    is_torchrun: bool

    def poll(self) -> int | None:
        """Its exit code, once it has ended."""
        return self.process.poll()

    def send(self, number: signal.Signals) -> None:
        """Signal the processes that train, which torchrun itself is not one of."""
        ranks = children_of(self.process.pid) if self.is_torchrun else []
        for process in ranks or [self.process.pid]:
            with suppress(ProcessLookupError):
                os.kill(process, number)

    def kill(self) -> None:
        """End the ranks and what started them, at once."""
        self.send(signal.SIGKILL)
        self.process.kill()


def start_command(
    command: list[str],
    environment: Mapping[str, str],
    keep_open: Sequence[int] = (),
    *,
    log: Path | None = None,
    working_folder: Path | None = None,
) -> Started:
    """Start a command in a process group of its own; it is asked to stop should this process die."""
    stream = None if log is None else log.open("ab")
    try:
        process = subprocess.Popen(
            stopping_with_parent(command),
            env=environment,
            cwd=working_folder,
            stderr=stream,
            process_group=0,
            pass_fds=tuple(keep_open),
        )
    finally:
        if stream is not None:
            stream.close()
    return Started(process=process, is_torchrun=TORCHRUN in command)


def rank_environment(config: RunConfig, inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment of the ranks of one node: what must be set before torch is imported, unless the user set it.

    Without the variables of other launchers: srun sets some for its tasks, Ray for its workers.
    """
    environment = without_other_launchers(inherited)
    # The tokenizers library warns about forks that the data loader may do; preparing is over by then.
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Threads that wait by spinning starve each other where something else runs on the same cores: with other work on
    # two cores a training step took 0.13 s with this and 0.95 to 3.2 s without.
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    ranks = config.hardware.gpus_per_node
    assert ranks is not None
    if ranks > 1:  # torchrun would say 1, whatever the machine has
        environment.setdefault("OMP_NUM_THREADS", str(max(1, _num_cores() // ranks)))
    if config.hardware.generation is Generation.cpu:
        environment.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed, once imported, warns that it found no GPU
    else:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(_gpus(config, environment))
        # Segments that grow leave hardly any pieces too small for what is asked for next. Without, two of twenty runs
        # that the plan had fill an H100 ran out of memory, 13 GiB of it in such pieces; no slower (h100_held_out).
        if not any(name in environment for name in _OF_THE_ALLOCATOR) and not _is_wsl():
            environment[_OF_THE_ALLOCATOR[0]] = "expandable_segments:True"
    # Where .venv is not activated its `ninja` is not found, without which DeepSpeed compiles none of its operators.
    environment["PATH"] = os.pathsep.join(filter(None, [str(Path(sys.executable).parent), environment.get("PATH")]))
    return environment


def handed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """What ranks need of the environment where nothing of it reaches them by itself."""
    return {name: text for name, text in environment.items() if name in _HANDED_ON or name.startswith(_HANDED_ON_AS)}


def _is_wsl() -> bool:
    """Whether this is Linux in Windows, where the first allocation in such a segment can fail (pytorch#192330)."""
    return "microsoft" in platform.release().lower()


def _num_cores() -> int:
    """The cores that this process may use: a scheduler may have given it some of the machine's only."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _gpus(config: RunConfig, environment: Mapping[str, str]) -> list[str]:
    """The GPUs that a run uses, of those it may see: a process that sees more would spread its model over them."""
    count = config.hardware.gpus_per_node
    assert count is not None
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[:count] if visible else [str(number) for number in range(count)]


class StopRequests:
    """Counts the requests to stop that this process gets, and hands each on as the signal the ranks are to get."""

    def __init__(self, hand_on: Callable[[signal.Signals], None]) -> None:
        self.first: str | None = None
        self._hand_on = hand_on
        self._count = RequestCount()
        self._second_at: float | None = None

    @property
    def is_urgent(self) -> bool:
        """Whether a second request has come: nothing is waited for any more."""
        return self._second_at is not None

    @property
    def overdue_s(self) -> float:
        """For how long everything should have ended that a second request was handed on to; 0 while it has time."""
        if self._second_at is None:
            return 0.0
        return max(0.0, time.monotonic() - self._second_at - _SECOND_WITHIN_S)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take over the signals of this process (main thread only), and give them back."""
        numbers = [signal.SIGINT, *_FIRST]
        # nohup ignores the end of the terminal, and so do we then.
        numbers = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self._note) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        turn = self._count.take(number)
        if turn == 0:
            return
        self.first = self.first or signal.Signals(number).name
        is_first, is_second = turn == 1, turn == 2
        if is_second:
            self._second_at = time.monotonic()
        sent = _FIRST.get(signal.Signals(number), signal.SIGINT) if is_first else signal.SIGINT
        self._hand_on(sent if is_first or is_second else signal.SIGKILL)
