"""Trainings and programs whose processes are forked from this one, which has imported the libraries once.

Two ranks of 20 steps take 16 CPU seconds, 14 of them to start Python four times. So tests that compare numbers fork:
the command runs to its end as typed, but for torchrun. Those of kills, stops and torchrun itself start real processes.
A line of the input is a request, a line of the output its exit code.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

ENDS_WITH_THE_OTHERS_S = 5.0
FSDP_ON_A_CPU = "TESTED_FSDP_ON_A_CPU"  # a variable of a request


def fork(work: Callable[[], Any]) -> int:
    """Run a function in a child, which ends with its exit code; returns the child."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        code = work() or 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def as_torchrun_sets(environment: Mapping[str, str], num_ranks: int) -> list[dict[str, str]]:
    """The environment of each of several ranks."""
    from tunebook.processes import free_port

    shared = {**environment, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(num_ranks),
              "LOCAL_WORLD_SIZE": str(num_ranks)}  # fmt: skip
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]


def run_ranks(work: Callable[[], Any], environments: Sequence[Mapping[str, str]]) -> int:
    """Run a function in each environment; returns the exit code of the first rank that failed."""

    def rank(environment: Mapping[str, str]) -> Any:
        os.environ.clear()
        os.environ.update(environment)
        return work()

    at_work = {fork(partial(rank, environment)) for environment in environments}
    failed, end = 0, float("inf")
    while at_work:
        for process in list(at_work):
            child, status = os.waitpid(process, os.WNOHANG)
            if child:
                at_work.remove(child)
                code = os.waitstatus_to_exitcode(status)
                if code and not failed:
                    failed, end = code, time.monotonic() + ENDS_WITH_THE_OTHERS_S
            elif time.monotonic() > end:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        time.sleep(0.02)
    return failed


def run_and_wait(command: list[str], environment: Mapping[str, str], *_: object, **__: object) -> Any:
    """In place of `tunebook.launch.supervise.run_and_wait`: fork the ranks that a launch command would start."""
    from tunebook.launch import rank
    from tunebook.launch.supervise import ProcessEnd
    from tunebook.train import __main__ as single

    sys.argv = command[-2:]  # the module and the run folder
    if "--nproc-per-node" in command:
        num_ranks = int(command[command.index("--nproc-per-node") + 1])
        code = run_ranks(rank.main, as_torchrun_sets(environment, num_ranks))
    else:
        code = run_ranks(single.main, [environment])
    return ProcessEnd(exit_code=code, stopped_by=None)


def allow_fsdp_on_a_cpu() -> None:
    """torch's FSDP2 works over gloo; accelerate 1.15 would wrap DDP in its place, so a rule refuses it."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    from tunebook.plan.rules.precision import needs_gpu

    find, begin = needs_gpu.find, AcceleratorState.__init__

    def others(config: Any) -> list[Any]:
        return [finding for finding in find(config) if finding.key != "parallelism.strategy"]

    def begin_with_fsdp(self: Any, *arguments: Any, fsdp_plugin: Any = None, **more: Any) -> None:
        begin(self, *arguments, fsdp_plugin=fsdp_plugin, **more)
        if fsdp_plugin is not None and self.distributed_type is DistributedType.MULTI_CPU:
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            self.fsdp_plugin, self.distributed_type = fsdp_plugin, DistributedType.FSDP
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    object.__setattr__(needs_gpu, "find", others)
    AcceleratorState.__init__ = begin_with_fsdp


def run_command(words: list[str]) -> None:
    """Run `tunebook` with some words, to its end."""
    from tunebook.cli.app import main as tunebook
    from tunebook.commands import attempt
    from tunebook.processes import EarlyStart

    attempt.run_and_wait = run_and_wait
    EarlyStart.start = lambda *_: None  # the rank is forked
    sys.argv = words
    tunebook()


def run_program(words: list[str]) -> None:
    """Run a program as one of several ranks, to its end."""
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


def answer(request: dict[str, Any]) -> int | None:
    """Do what a request says, in a process of its own."""
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, place in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(descriptor, place)
    os.environ.clear()
    os.environ.update(request["environment"])
    if FSDP_ON_A_CPU in os.environ:
        allow_fsdp_on_a_cpu()
    if request["ranks"]:
        environments = as_torchrun_sets(os.environ, request["ranks"])
        return run_ranks(partial(run_program, request["words"]), environments)
    return run_command(request["words"])


def main() -> None:
    import deepspeed  # noqa: F401
    import transformers  # noqa: F401

    import tunebook.commands.train
    import tunebook.plan.draft
    import tunebook.record.report
    import tunebook.train.run  # noqa: F401

    for line in sys.stdin:
        child = fork(partial(answer, json.loads(line)))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
