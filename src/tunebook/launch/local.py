"""Run a launch command on this machine and wait for it, handing on requests to stop.

The command gets a process group of its own, so that Ctrl-C in a terminal reaches it from here only, once and in the
right place. torchrun is left out of it: it would give its ranks 30 seconds and then kill them, which is too short to
save a large model. A process whose launcher dies is asked to stop by the kernel.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from tunebook.config.choices import Generation
from tunebook.config.schema import RunConfig
from tunebook.train.death import ask_to_stop_when_parent_dies

TORCHRUN = "torch.distributed.run"
# What is sent on for a request: 1 finish the step and save, 2 end without saving (a rank takes a second request by
# SIGINT as that), 3 and later kill.
_FIRST = {signal.SIGTERM: signal.SIGTERM, signal.SIGUSR1: signal.SIGUSR1, signal.SIGHUP: signal.SIGTERM}


@dataclass(frozen=True, kw_only=True)
class ProcessEnd:
    """How a command ended."""

    exit_code: int  # below zero: killed by that signal
    stopped_by: str | None  # the first request to stop that came in meanwhile


def run_and_wait(command: list[str], environment: Mapping[str, str], keep_open: Sequence[int] = ()) -> ProcessEnd:
    """Run a command to its end; the file descriptors `keep_open` stay open in it."""
    requests = _StopRequests(is_torchrun=TORCHRUN in command)
    with requests.listening():
        child = subprocess.Popen(
            command,
            env=environment,
            process_group=0,
            pass_fds=tuple(keep_open),
            preexec_fn=ask_to_stop_when_parent_dies,  # there is one thread here
        )
        requests.hand_on_to(child)
        exit_code = child.wait()
    return ProcessEnd(exit_code=exit_code, stopped_by=requests.first)


def rank_environment(config: RunConfig, inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment of the ranks: what they need set before torch is imported, unless the user set it."""
    environment = dict(inherited)
    # The tokenizers library warns about forks that the data loader may do; preparing is over by then.
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Threads that wait by spinning starve each other where something else runs on the same cores: with other work on
    # two cores a training step took 0.13 s with this and 0.95 to 3.2 s without.
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    ranks = config.hardware.gpus_per_node
    assert ranks is not None
    if ranks > 1:  # torchrun would say 1, whatever the machine has
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    if config.hardware.generation is not Generation.cpu:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(_gpus(config, environment))
    return environment


def _gpus(config: RunConfig, environment: Mapping[str, str]) -> list[str]:
    """The GPUs that a run uses, of those it may see: a process that sees more would spread its model over them."""
    count = config.hardware.gpus_per_node
    assert count is not None
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[:count] if visible else [str(number) for number in range(count)]


class _StopRequests:
    """Counts the requests to stop that this process gets, and hands each on to the processes that train."""

    def __init__(self, *, is_torchrun: bool) -> None:
        self.first: str | None = None
        self._is_torchrun = is_torchrun
        self._child: subprocess.Popen[bytes] | None = None
        self._pending: list[signal.Signals] = []
        self._num_requests = 0

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

    def hand_on_to(self, child: subprocess.Popen[bytes]) -> None:
        """From now on; a request that came before is handed on at once."""
        self._child = child
        for number in self._pending:
            self._send(number)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.first = self.first or signal.Signals(number).name
        self._num_requests += 1
        is_first, is_second = self._num_requests == 1, self._num_requests == 2
        sent = _FIRST.get(signal.Signals(number), signal.SIGINT) if is_first else signal.SIGINT
        self._send(sent if is_first or is_second else signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if self._child is None:
            self._pending.append(number)
            return
        ranks = _children(self._child.pid) if self._is_torchrun else []
        for process in ranks or [self._child.pid]:
            with suppress(ProcessLookupError):
                os.kill(process, number)


def _children(process: int) -> list[int]:
    """The processes that a process started and that still run (Linux)."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ended meanwhile
            # The name of the program, in brackets, may itself hold brackets and blanks: state and parent follow it.
            parent = status.read_text().rpartition(")")[2].split()[1]
            if int(parent) == process:
                found.append(int(status.parent.name))
    return found
