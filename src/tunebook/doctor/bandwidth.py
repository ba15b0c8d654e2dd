"""Measure bandwidth between this machine's GPUs: a short all-reduce and all-gather in separate processes.

`measure_bandwidth` starts torchrun with a time limit; each rank is this module, run as a program. Rank 0 appends one
JSON object per measurement to `FOLDER/measured.jsonl`, so that results before a hang are kept. A rank that fails writes
the reason to `FOLDER/failed.<rank>`. A rank that received a wrong sum writes `FOLDER/wrong.<rank>`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tunebook.hardware.bandwidth import ALL_REDUCE, OPERATIONS, Bandwidth, Measurement, algorithm_gb_per_s, bus_gb_per_s
from tunebook.processes import ask, die_with_parent

MEASURED_FILE = "measured.jsonl"
NCCL_SIZES = (2**20, 2**23, 2**26, 2**28, 2**30)  # bytes: from latency-bound to the size of a large layer
GLOO_SIZES = (2**16, 2**20, 2**24)
BUDGET_S = 20.0  # for all measurements
_START_S = 100.0  # Python, torch and NCCL's detection of the machine take 10 to 30 s on a cold disk
TIMEOUT_S = _START_S + BUDGET_S
_SECONDS_EACH = 0.4
_NUM_WARM_UPS, _MIN_RUNS, _MAX_RUNS = 3, 3, 200
_ELEMENT_BYTES = 4  # fp32, which every backend and GPU sums


def measure_bandwidth(num_ranks: int, backend: str, *, timeout_s: float = TIMEOUT_S) -> Bandwidth:
    """All-reduce and all-gather over the first `num_ranks` visible GPUs (nccl) or CPU ranks (gloo). Never raises."""
    with tempfile.TemporaryDirectory(prefix="tunebook-doctor-") as name:
        folder = Path(name)
        # Otherwise torchrun prints that it sets this to 1.
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        answer = ask(collectives_command(num_ranks, backend, folder), timeout_s=timeout_s, environment=environment)
        failed = [f"rank {file.suffix[1:]}: {file.read_text('utf-8')}" for file in sorted(folder.glob("failed.*"))]
        wrong = [f"rank {file.suffix[1:]}: {file.read_text('utf-8')}" for file in sorted(folder.glob("wrong.*"))]
        problem = answer.problem
        if problem is not None and (failed or answer.last_words):
            problem = f"{problem}; {[*failed, answer.last_words][0]}"
        return Bandwidth(
            backend=backend,
            num_ranks=num_ranks,
            measurements=_read(folder / MEASURED_FILE),
            problem=problem,
            is_late=answer.is_late,
            wrong=wrong or None,
        )


def collectives_command(num_ranks: int, backend: str, folder: Path) -> list[str]:
    """Return the torchrun command with one rank per GPU, on any free port."""
    return [
        *[sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_ranks)],
        *["-m", "tunebook.doctor.bandwidth", str(folder), backend],
    ]


def _read(file: Path) -> list[Measurement]:
    if not file.is_file():
        return []
    found = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            found.append(Measurement(**json.loads(line)))
        except (ValueError, TypeError):  # the last line of a rank that was killed while writing
            break
    return found


def main() -> int:
    """Measure; return the exit code for torchrun."""
    die_with_parent()  # torchrun starts each rank in its own session, so a signal to its group does not reach them
    folder, backend = Path(sys.argv[1]), sys.argv[2]
    rank = int(os.environ["RANK"])
    try:
        _measure_all(folder, backend)
    except Exception as error:  # errors of torch, NCCL, CUDA
        lines = str(error).strip().splitlines() or [type(error).__name__]
        (folder / f"failed.{rank}").write_text(lines[0], encoding="utf-8")
        raise
    return 0


def _measure_all(folder: Path, backend: str) -> None:
    import torch
    import torch.distributed as dist

    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, device_id=device if backend == "nccl" else None)
    try:
        _slowest(torch, 0.0, device)  # the first collective, in which NCCL may look at the machine for many seconds
        start = time.perf_counter()
        for num_bytes in NCCL_SIZES if backend == "nccl" else GLOO_SIZES:
            for operation in OPERATIONS:
                is_late = _slowest(torch, time.perf_counter() - start, device) > BUDGET_S
                if not is_late:
                    _measure(torch, operation, num_bytes, device, folder)
    finally:
        dist.destroy_process_group()


def _measure(torch: Any, operation: str, num_bytes: int, device: Any, folder: Path) -> None:
    dist = torch.distributed
    ranks, rank = dist.get_world_size(), dist.get_rank()
    run, is_right = _operation(torch, operation, num_bytes, device)
    run()
    if not is_right():
        (folder / f"wrong.{rank}").write_text(f"{operation} of {num_bytes} bytes", encoding="utf-8")
    _time(torch, run, _NUM_WARM_UPS, device)
    once = _slowest(torch, _time(torch, run, 1, device), device)
    count = max(_MIN_RUNS, min(_MAX_RUNS, int(_SECONDS_EACH / once)))
    seconds = _slowest(torch, _time(torch, run, count, device), device) / count
    if rank == 0:
        measured = {
            "operation": operation,
            "bytes": num_bytes,
            "runs": count,
            "seconds": seconds,
            "algorithm_gb_per_s": round(algorithm_gb_per_s(num_bytes, seconds), 3),
            "bus_gb_per_s": round(bus_gb_per_s(operation, num_bytes, seconds, ranks), 3),
        }
        with (folder / MEASURED_FILE).open("a", encoding="utf-8") as stream:
            stream.write(f"{json.dumps(measured)}\n")


def _operation(
    torch: Any, operation: str, num_bytes: int, device: Any
) -> tuple[Callable[[], None], Callable[[], bool]]:
    """Return the timed function, and a check that its first run gave the right numbers."""
    dist = torch.distributed
    ranks, mine = dist.get_world_size(), dist.get_rank() + 1
    if operation == ALL_REDUCE:
        buffer = torch.full((num_bytes // _ELEMENT_BYTES,), float(mine), device=device)
        return lambda: dist.all_reduce(buffer), lambda: bool((buffer == ranks * (ranks + 1) / 2).all())
    share = torch.full((num_bytes // _ELEMENT_BYTES // ranks,), float(mine), device=device)
    whole = torch.empty(share.numel() * ranks, device=device)

    def is_right() -> bool:
        parts = whole.view(ranks, -1)
        return all(bool((parts[other] == other + 1).all()) for other in range(ranks))

    return lambda: dist.all_gather_into_tensor(whole, share), is_right


def _time(torch: Any, run: Callable[[], None], count: int, device: Any) -> float:
    """Return the seconds of `count` consecutive runs, starting when every rank is ready."""
    torch.distributed.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(count):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _slowest(torch: Any, seconds: float, device: Any) -> float:
    """Return the longest time of all ranks, so that every rank chooses the same number of runs."""
    longest = torch.tensor([seconds], dtype=torch.float64, device=device)
    torch.distributed.all_reduce(longest, op=torch.distributed.ReduceOp.MAX)
    return float(longest.item())


if __name__ == "__main__":
    sys.exit(main())
