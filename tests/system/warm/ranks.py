"""`python ranks.py SOCKET`: starts ranks for others by forks of itself, which has imported what they need.

Most of a short run on several ranks is each rank importing torch, transformers, DeepSpeed and what these bring along:
6 of 9 s of a processor. Tests that are about what ranks compute, and not about how they start and end, start them here
(the fixture `warm_ranks`): the same program as torchrun would start, with the same environment, in processes of their
own.

A request is one JSON object (the command after `python`, the environment, the folder) and two open files, for what the
ranks print; the answer is the exit code. One request after the other: it has one thread only, so that a fork is safe.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from tunebook.train.death import die_with_parent

TORCHRUN = "torch.distributed.run"
OTHERS_END_WITHIN_S = 60  # where one rank has failed; they notice that it is gone


def import_all() -> None:
    """What a rank imports, also later on."""
    import deepspeed.runtime.engine
    import deepspeed.runtime.zero.stage3
    import torch.distributed.run
    import transformers.models.qwen2.modeling_qwen2

    import tunebook.launch.meeting
    import tunebook.train.run

    assert deepspeed and torch and transformers and tunebook


def main() -> None:
    """Say `ready`, and serve until the process that started this one ends."""
    die_with_parent()
    import_all()
    gc.freeze()  # what is here stays here: no rank need look through it
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(sys.argv[1])
        listener.listen()
        print("ready", flush=True)
        while True:
            connection, _ = listener.accept()
            with connection:
                request, files = receive(connection)
                code = carry_out(request, files, connection)
                for file in files:
                    os.close(file)
                with suppress(BrokenPipeError):  # it has been killed, and its ranks after it
                    connection.sendall(str(code).encode())


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """A request, which ends where the other side has no more to say, and its open files."""
    text, files, _, _ = socket.recv_fds(connection, 65536, 2)
    while more := connection.recv(65536):
        text += more
    request: dict[str, Any] = json.loads(text)
    return request, files


def carry_out(request: dict[str, Any], files: Sequence[int], client: socket.socket) -> int:
    """Run the ranks to their end: 0 if all of them end so; else 1, as torchrun, or the code of a single process."""
    words = request["words"]
    if words[:2] != ["-m", TORCHRUN]:
        return wait_for([fork(words, request, files, {})], client)[0]
    from torch.distributed.run import get_args_parser

    asked = get_args_parser().parse_args(words[2:])
    program = [*(["-m"] if asked.module else []), asked.training_script, *asked.training_script_args]
    with Store() as store:
        ranks = int(asked.nproc_per_node)
        codes = wait_for([fork(program, request, files, store.rank(rank, ranks)) for rank in range(ranks)], client)
    return int(any(codes))


class Store:
    """The place where ranks meet, in a process of its own, as torchrun keeps it."""

    def __enter__(self) -> Store:
        told, tell = os.pipe()
        until, self._end = os.pipe()
        self._process = os.fork()
        if self._process == 0:
            os.close(self._end)
            _keep_store(tell, until)
        os.close(tell)
        os.close(until)
        self._port = os.read(told, 16).decode()
        os.close(told)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._end)
        os.waitpid(self._process, 0)

    def rank(self, rank: int, num_ranks: int) -> dict[str, str]:
        """What torchrun adds to a rank's environment."""
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
        numbers |= {"GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1, "TORCHELASTIC_RESTART_COUNT": 0}
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self._port}
        is_torchrun = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": f"warm-{self._port}"}
        return {name: str(number) for name, number in numbers.items()} | where | is_torchrun


def _keep_store(tell: int, until: int) -> NoReturn:
    """Say the port, and keep the store until the other end of a pipe is closed, by whatever end of its process."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(tell, str(store.port).encode())
    os.close(tell)
    os.read(until, 1)
    os._exit(0)


def fork(program: Sequence[str], request: dict[str, Any], files: Sequence[int], more: Mapping[str, str]) -> int:
    """Start one rank; its process."""
    threads = [file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")]
    assert len(threads) == 1, f"a fork may wait for ever for what another thread holds: {threads}"
    process = os.fork()
    if process == 0:
        for number, file in enumerate(files, start=1):
            os.dup2(file, number)
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update({"OMP_NUM_THREADS": "1"} | request["environment"] | more)  # the first as torchrun says it
        _end_with(program)
    return process


def _end_with(program: Sequence[str]) -> NoReturn:
    """Do what `python PROGRAM` does, and end as that ends, without going back to what the server is doing."""
    code: Any = 0
    try:
        become(program)
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


def become(program: Sequence[str]) -> None:
    """Run a module or a file as the program that Python was started for."""
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))  # it is read once, when torch is imported
    is_module = program[0] == "-m"
    sys.argv = [*program[1:]] if is_module else [*program]
    sys.path.insert(0, str(Path.cwd() if is_module else Path(program[0]).parent))
    if is_module:
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program[0], run_name="__main__")


def wait_for(processes: Sequence[int], client: socket.socket) -> list[int]:
    """The exit codes; if one rank has failed the others are given a time to notice, if the client has gone none."""
    has_gone = select.poll()
    has_gone.register(client, 0)  # that the other end is closed is always told
    codes: dict[int, int] = {}
    failed: float | None = None
    while len(codes) < len(processes):
        for process in [process for process in processes if process not in codes]:
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                codes[process] = os.waitstatus_to_exitcode(status)
                if codes[process] != 0 and failed is None:
                    failed = time.monotonic()
        is_over = failed is not None and time.monotonic() - failed > OTHERS_END_WITHIN_S
        if has_gone.poll(20) or is_over:
            for process in set(processes) - set(codes):
                os.kill(process, signal.SIGKILL)
    return [codes[process] for process in processes]


if __name__ == "__main__":
    main()
