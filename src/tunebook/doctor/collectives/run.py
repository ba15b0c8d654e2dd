"""Start the ranks of the measurement, never wait longer than said, and read what they measured."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from tunebook.doctor.collectives.rank import BUDGET_S, MEASURED_FILE
from tunebook.hardware.asking import ask
from tunebook.hardware.bandwidth import Bandwidth, Measurement

_START_S = 100.0  # Python, torch, and NCCL's look at the machine: 10 to 30 s on a cold disk
TIMEOUT_S = _START_S + BUDGET_S


def measure_bandwidth(num_ranks: int, backend: str, *, timeout_s: float = TIMEOUT_S) -> Bandwidth:
    """All-reduce and all-gather over the first `num_ranks` visible GPUs (nccl) or CPU ranks (gloo). Never raises."""
    with tempfile.TemporaryDirectory(prefix="tunebook-doctor-") as name:
        folder = Path(name)
        # torchrun would say that it sets this to 1
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        answer = ask(collectives_command(num_ranks, backend, folder), timeout_s=timeout_s, environment=environment)
        failed = [f"rank {file.suffix[1:]}: {file.read_text('utf-8')}" for file in sorted(folder.glob("failed.*"))]
        wrong = [f"rank {file.suffix[1:]}: {file.read_text('utf-8')}" for file in sorted(folder.glob("wrong.*"))]
        problem = answer.problem
        if problem is not None and (failed or answer.last_words):
            problem = f"{problem}; {failed[0] if failed else answer.last_words}"
        return Bandwidth(
            backend=backend,
            num_ranks=num_ranks,
            measurements=_read(folder / MEASURED_FILE),
            problem=problem,
            is_late=answer.is_late,
            wrong=wrong or None,
        )


def collectives_command(num_ranks: int, backend: str, folder: Path) -> list[str]:
    """torchrun with one rank per GPU, on any free port."""
    return [
        *[sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_ranks)],
        *["-m", "tunebook.doctor.collectives.rank", str(folder), backend],
    ]


def _read(file: Path) -> list[Measurement]:
    if not file.is_file():
        return []
    found = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            found.append(Measurement(**json.loads(line)))
        except (ValueError, TypeError):  # the last line of a rank that was killed while it wrote
            break
    return found
