"""What a user sees of a rank that stands still on GPUs: one of two is stopped by SIGSTOP in the middle of a training.

    python tests/bench/gpu_stall.py --output DIR [--timeout-s 30] [--only NAME ...]

The launcher should end the run after `launcher.timeout_s` and name the rank. Random weights, generated documents. One
JSON line for each strategy: seconds from the stop to the end, the exit code, and the last lines that were printed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpu_checkpoints import last_step, shared_words
from gpu_queue import machine_versions, require_gpus

STOPPED_RANK, AFTER_STEP = 1, 3
CASES = {"ddp": ["parallelism=ddp"], "fsdp": ["parallelism=fsdp"], "zero2": ["parallelism=zero2"]}
_LONGER = ["training.max_steps=2000", "training.save_every_steps=null", "training.num_epochs=200"]


def pid_of_rank(folder: Path, rank: int) -> int | None:
    """The process that trains as this rank of the run in a folder."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (process / "cmdline").read_bytes().split(b"\0")
            variables = (process / "environ").read_bytes().split(b"\0")
            if str(folder).encode() in words and f"RANK={rank}".encode() in variables and b"torchrun" not in words:
                return int(process.name)
    return None


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One run in which a rank is stopped."""
    folder = arguments.runs / "stall" / name
    shutil.rmtree(folder, ignore_errors=True)
    shared, described = shared_words(False, 1)
    own = {word.partition("=")[0] for word in _LONGER}
    words = [*(word for word in shared if word.partition("=")[0] not in own), *_LONGER, *CASES[name]]
    words += ["hardware.gpus_per_node=2", f"launcher.timeout_s={arguments.timeout_s}"]
    terminal = arguments.output / f"{name}.txt"
    with terminal.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "tunebook", "train", *words, "--run-folder", str(folder)],
            stdout=stream, stderr=subprocess.STDOUT, env=os.environ | {"HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        started = time.monotonic()
        while last_step(folder) < AFTER_STEP and process.poll() is None and time.monotonic() - started < 150:
            time.sleep(0.1)
        stopped = pid_of_rank(folder, STOPPED_RANK)
        line: dict[str, Any] = {"case": name, "launcher_timeout_s": arguments.timeout_s, **described}
        if stopped is None or process.poll() is not None:
            process.kill()
            return line | {"error": "the rank was not found in training", "printed": terminal.read_text()[-2000:]}
        os.kill(stopped, signal.SIGSTOP)
        at = time.monotonic()
        try:
            process.wait(arguments.timeout_s + 120)
        except subprocess.TimeoutExpired:
            process.kill()
        with suppress(ProcessLookupError):
            os.kill(stopped, signal.SIGKILL)
    printed = [text for text in terminal.read_text(errors="replace").splitlines() if text.strip()]
    return line | {
        "stopped_rank": STOPPED_RANK,
        "exit_code": process.returncode,
        "seconds_to_the_end": round(time.monotonic() - at, 1),
        "names_the_rank": any(f"rank {STOPPED_RANK}" in text for text in printed),
        "said": printed[next((at for at, text in enumerate(printed) if text.startswith("error:")), -3) :],
        "machine": machine_versions(),
    }


def main() -> None:
    """Parse the arguments and run the cases one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--timeout-s", type=int, default=30, help="launcher.timeout_s")
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--runs", type=Path, default=Path("/tmp/runs"))
    arguments = parser.parse_args()
    require_gpus(2)
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name in arguments.only:
        line = measure(name, arguments)
        print(json.dumps(line), flush=True)
        with (arguments.output / "results.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
