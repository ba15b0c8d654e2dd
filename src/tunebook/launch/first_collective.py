"""Run the first collective of a run over the network that training uses, within `launcher.start_timeout_s`.

If ranks are missing, the error names them. Without this check, a network on which ranks find each other but cannot send
data shows as a silent wait of `launcher.timeout_s`, after the model was loaded. The process group made here is
destroyed again: the trainer makes its own.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from tunebook.config.choices import Generation
from tunebook.config.schema import RunConfig
from tunebook.errors import first_line
from tunebook.record.run_folder import write_outcome

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

_PREFIX = "tunebook-meeting"
_POLL_S = 0.5
_ASK_TIMEOUT_S = 5.0
_LATER = timedelta(seconds=60)  # longer than the watch, which says more than torch's own timeouts


class StartWatch(threading.Thread):
    """A thread that ends this process if the ranks do not connect in time, or if its parent has died.

    It is a thread because a rank that hangs in a collective runs no Python in its main thread, and so no signal
    handler.
    """

    def __init__(self, folder: Path, *, rank: int, num_ranks: int, start_timeout_s: float, alone_timeout_s: float):
        super().__init__(daemon=True, name="start-watch")
        self.is_connected = False  # if set, only the parent is watched
        self.connect: Callable[[], TCPStore] | None = None  # to the store in which ranks report their presence
        self._folder, self._rank, self._num_ranks = folder, rank, num_ranks
        self._start_timeout_s, self._alone_timeout_s = start_timeout_s, alone_timeout_s
        self._parent = os.getppid()

    def run(self) -> None:
        """Watch until this process ends."""
        meet_by = time.monotonic() + self._start_timeout_s
        alone_since: float | None = None
        while True:
            time.sleep(_POLL_S)
            now = time.monotonic()
            if now > meet_by and not self.is_connected:
                limit = f"{self._start_timeout_s:g} s (launcher.start_timeout_s)"
                self._leave(f"{self._rank_name()} waited {limit} for the first collective: {self._why()}")
            if os.getppid() != self._parent:
                # The kernel has asked this process to stop. With its peers gone it may hang, and no other process would
                # end it.
                alone_since = alone_since or now
                if now - alone_since > self._alone_timeout_s:
                    self._leave(f"{self._rank_name()} lost the process that started it")

    def _leave(self, reason: str) -> None:
        print(f"{reason}. Its stack:", file=sys.stderr)
        traceback.print_stack(sys._current_frames()[threading.main_thread().ident or 0])
        sys.stderr.flush()
        try:
            write_outcome(self._folder, rank=self._rank, exit_code=1, reason=reason)
        finally:
            os._exit(1)

    def _rank_name(self) -> str:
        return f"rank {self._rank} on {socket.gethostname()}"

    def _why(self) -> str:
        if self.connect is None:
            return "it was still starting (a slow file system, or a package that hangs while it is imported)"
        try:
            store = self.connect()
            absent = [rank for rank in range(self._num_ranks) if not store.check([f"{_PREFIX}/{rank}"])]
        except RuntimeError as error:
            return f"rank 0 cannot be reached ({first_line(error)})"
        if absent:
            names = ", ".join(map(str, absent))
            return f"rank{'s' if len(absent) > 1 else ''} {names} did not connect"
        return (
            "every rank is connected, but no data arrives; name the network interface between the nodes with "
            "NCCL_SOCKET_IFNAME (on a CPU: GLOO_SOCKET_IFNAME), and look with NCCL_DEBUG=INFO"
        )


def meet(config: RunConfig, watch: StartWatch, is_stop_requested: Callable[[], bool]) -> bool:
    """Connect to every other rank; return whether any of them has already been asked to stop."""
    import torch
    from torch import distributed
    from torch._C._distributed_c10d import PrefixStore, TCPStore  # torch.distributed has them too, but not to mypy

    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    timeout = timedelta(seconds=config.launcher.start_timeout_s)

    def connect(timeout: timedelta = timedelta(seconds=_ASK_TIMEOUT_S)) -> TCPStore:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)

    watch.connect = connect
    store = connect(timeout + _LATER)
    store.set(f"{_PREFIX}/{rank}", "here")
    is_on_gpu = config.hardware.generation is not Generation.cpu
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if is_on_gpu else torch.device("cpu")
    if is_on_gpu:
        torch.cuda.set_device(device)
    distributed.init_process_group(
        "nccl" if is_on_gpu else "gloo",
        store=PrefixStore(_PREFIX, store),
        rank=rank,
        world_size=num_ranks,
        timeout=timeout + _LATER,
        device_id=device if is_on_gpu else None,
    )
    stop_flag = torch.tensor([float(is_stop_requested())], device=device)
    distributed.all_reduce(stop_flag)
    is_stopping = stop_flag.item() > 0  # waits for the GPU
    distributed.destroy_process_group()
    watch.is_connected = True
    return is_stopping
