"""Compare a resumed run on GPUs with an undisturbed one: one JSON line per strategy.

    python tests/bench/gpu_checkpoints.py --output DIR [--gpus 2] [--only NAME ...] [--layers 8] [--deadline-s 340]

Each strategy trains the same twelve steps: `whole` and `again` without a stop, `stopped` until SIGTERM after about half
of them, `resumed` in its folder, `fewer` on one GPU from the checkpoint that `whole` saved half-way, and `changed` from
that checkpoint with another learning rate and weight decay, which must take effect. Losses on GPUs need not repeat bit
for bit, so a line has the difference of `resumed` from `whole` and that of `again`. Random weights of the real
architecture in fewer layers, on generated documents. Runs share the GPUs: seconds are those of a busy machine. `--cpu`
tries the same with the quickstart's small model.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_models import facts_of, slice_words
from gpu_queue import ASKS, KEPT, machine_versions, measured, require_gpus
from losses import compare_losses

STEPS, HALF = 12, 6
CASES: dict[str, tuple[bool, list[str]]] = {  # whether it takes all GPUs, and what is overridden
    "single": (False, ["parallelism=single"]),
    "ddp": (True, ["parallelism=ddp"]),
    "zero2": (True, ["parallelism=zero2"]),
    "zero3": (True, ["parallelism=zero3"]),
    "fsdp": (True, ["parallelism=fsdp"]),
    "fsdp_full": (True, ["parallelism=fsdp", "parallelism.state_dict=full"]),
    "zero1": (True, ["parallelism=zero1"]),
    "zero2_offload": (True, ["parallelism=zero2_offload"]),
    "adamw_8bit": (False, ["parallelism=single", "optimizer.name=adamw_8bit"]),  # needs bitsandbytes
    "fsdp_grad_op": (True, ["parallelism=fsdp_grad_op"]),
    "lora": (True, ["parallelism=ddp", "peft=lora", "optimizer.learning_rate=1e-3"]),
}
ON_FEWER = ("ddp", "zero1", "zero2", "zero3", "fsdp", "fsdp_full")
GENERATED = ["model.weights=random", "dataset=synthetic", "dataset.synthetic.num_documents=1500", "attention=sdpa"]
QWEN = ["qwen05b_single", *GENERATED, "training.global_samples=32", "packing.row_length=2048"]
QUICKSTART = ["quickstart", "hardware=cpu", "training.global_samples=16"]
COMMON = [f"training.max_steps={STEPS}", f"training.save_every_steps={HALF}", "training.keep_checkpoints=2",
          "training.log_every_steps=1", "training.evaluate_every_steps=null", "evaluation=none",
          "schedule.warmup_steps=2", "schedule.warmup_share=null"]  # fmt: skip
CHANGED = ["optimizer.learning_rate=5e-6", "optimizer.weight_decay=0.05"]
_TICK_S = 0.02


@dataclass(kw_only=True)
class Ended:
    """A finished command and the records of its folder."""

    folder: Path
    exit_code: int | str
    wall_s: float
    first_step_after_s: float | None  # from the start of the command to the first step that was logged by it
    last_words: str
    losses: dict[int, float] = field(default_factory=dict)  # by step
    rates: dict[int, float] = field(default_factory=dict)  # learning rates by step
    records: list[dict[str, Any]] = field(default_factory=list)  # of the checkpoints, oldest first

    def from_step(self, step: int) -> list[float]:
        """The losses after a step, in order."""
        return [loss for at, loss in sorted(self.losses.items()) if at > step]


class Ranks:
    """A limit on the ranks that run at a time on all GPUs."""

    def __init__(self, most: int) -> None:
        self._free = most
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, count: int) -> Iterator[None]:
        """Wait until `count` ranks may run, and count them while the block runs."""
        with self._changed:
            self._changed.wait_for(lambda: self._free >= count)
            self._free -= count
        try:
            yield
        finally:
            with self._changed:
                self._free += count
                self._changed.notify_all()


class Bench:
    """Runs the commands of all cases, as many at a time as the limit allows."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.deadline = time.monotonic() + arguments.deadline_s
        self.ranks = Ranks(arguments.ranks_at_once)
        self.alone = itertools.cycle(range(arguments.gpus))
        self.logs: Path = arguments.logs or arguments.output / "logs"
        self.writing = threading.Lock()
        self.shared, self.described = shared_words(arguments.cpu, arguments.layers)

    def measure(self, case: str) -> dict[str, Any]:
        """Run all commands of a case and write its line."""
        takes_all, words = CASES[case]
        gpus = self.arguments.gpus if takes_all else 1
        with ThreadPoolExecutor() as pool:
            unsaved = [*words, "training.save_every_steps=null"]  # twenty checkpoints fill a machine's memory
            first = [
                pool.submit(self.train, case, name, unsaved if name == "again" else words, gpus)
                for name in ("whole", "again", "stopped")
            ]
            whole, again, stopped = (future.result() for future in first)
            second = [pool.submit(self.train, case, "stopped", words, gpus, is_second=True)]
            from_half = f"training.resume={whole.folder / 'checkpoints' / f'checkpoint-{HALF}'}"
            changes = [from_half, *CHANGED, "training.resume_anyway=[config]"]
            changing = pool.submit(self.train, case, "changed", [*unsaved, *changes], gpus)
            if case in ON_FEWER and gpus > 1:
                anyway = "training.resume_anyway=[world_size]"
                second.append(pool.submit(self.train, case, "fewer", [*words, from_half, anyway], 1))
            resumed, *fewer = (future.result() for future in second)
            changed = changing.result()
        line = {"case": case, "gpus": gpus, "overrides": [*self.shared[1:], *words]} | self.described
        line |= compared(whole, again, stopped, resumed, fewer[0] if fewer else None) | rates(whole, changed)
        line |= costs(whole, resumed, measured(self.logs / f"{case}-whole")) | {"machine": machine_versions()}
        for ended in (whole, again, stopped, changed, *fewer):
            shutil.rmtree(ended.folder, ignore_errors=True)
        with self.writing, (self.arguments.output / "results.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        short = {key: value for key, value in line.items() if key not in ("overrides", "machine", "losses")}
        print(json.dumps(short), flush=True)
        return line

    def train(self, case: str, name: str, words: list[str], gpus: int, *, is_second: bool = False) -> Ended:
        """Run one command to its end; `stopped` gets SIGTERM half-way, unless `is_second`."""
        folder = self.arguments.runs / "checkpoints" / case / name
        shown = f"{case}-{'resumed' if is_second else name}"
        kept = self.logs / shown
        kept.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "tunebook", "train", *self.shared, *words, f"hardware.gpus_per_node={gpus}"]
        with self.ranks.taken(gpus), (kept / "terminal.txt").open("w") as terminal:
            visible = range(self.arguments.gpus) if gpus > 1 else [next(self.alone)]
            environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(self.arguments.threads)}
            environment |= {"CUDA_VISIBLE_DEVICES": "" if self.arguments.cpu else ",".join(map(str, visible))}
            started = time.monotonic()
            process = subprocess.Popen(
                [*command, "--run-folder", str(folder)], stdout=terminal, stderr=subprocess.STDOUT, env=environment
            )
            is_stopped = name == "stopped" and not is_second
            after_s, exit_code = self._watch(process, folder, started, stop_after=HALF - 1 if is_stopped else None)
        for file in (*KEPT, "outcome-0.json"):
            if (folder / file).exists():
                shutil.copy(folder / file, kept / file)
        return read_ended(folder, kept / "terminal.txt", exit_code, time.monotonic() - started, after_s)

    def _watch(
        self, process: subprocess.Popen[bytes], folder: Path, started: float, *, stop_after: int | None
    ) -> tuple[float | None, int | str]:
        """Wait for its end. Returns when it logged its first step, and its exit code or `timeout`."""
        known = last_step(folder)
        after_s, is_told = None, False
        end = min(self.deadline, started + self.arguments.timeout_s)
        while process.poll() is None:
            step = last_step(folder)
            if after_s is None and step > known:
                after_s = round(time.monotonic() - started, 2)
            if stop_after is not None and step >= stop_after and not is_told:
                process.send_signal(signal.SIGTERM)
                is_told = True
            if time.monotonic() > end:
                return after_s, ended_by_force(process)
            time.sleep(_TICK_S)
        return after_s, process.returncode


def ended_by_force(process: subprocess.Popen[bytes]) -> str:
    """Stop a command: the third request makes Tunebook kill its ranks."""
    for request in ASKS:
        process.send_signal(request)
        time.sleep(0.5)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return "timeout"


def shared_words(is_cpu: bool, layers: int) -> tuple[list[str], dict[str, Any]]:
    """The words of every run, and the description of the model in a line."""
    if is_cpu:
        return [*QUICKSTART, *COMMON], {"recipe": "quickstart", "weights": "the recipe's own", "on": "CPU"}
    sliced, total = slice_words("qwen25_05b", layers)
    of_all = facts_of("qwen25_05b")["num_layers"]
    described = {"recipe": QWEN[0], "weights": "random", "data": "generated documents", "layers": layers}
    return [*QWEN, *COMMON, *sliced], described | {"layers_of_the_model": of_all, "num_parameters": total}


def last_step(folder: Path) -> int:
    """The last logged step, or 0."""
    return max(losses_of(folder), default=0)


def losses_of(folder: Path, key: str = "loss") -> dict[int, float]:
    """The loss of each step, or another logged value."""
    file = folder / "metrics.jsonl"
    found = {}
    for text in file.read_text().splitlines() if file.exists() else []:
        try:
            line = json.loads(text)
        except ValueError:  # being written
            continue
        if "loss" in line:
            found[line["step"]] = line[key]
    return found


def read_ended(folder: Path, terminal: Path, exit_code: int | str, wall_s: float, after_s: float | None) -> Ended:
    """Read the records of a finished command."""
    records = [json.loads(file.read_text()) for file in folder.glob("checkpoints/checkpoint-*/complete.json")]
    words = terminal.read_text(errors="replace").strip().splitlines()
    return Ended(
        folder=folder,
        exit_code=exit_code,
        wall_s=round(wall_s, 1),
        first_step_after_s=after_s,
        last_words="" if exit_code in (0, 6) else " ".join(" ".join(words[-6:]).split())[-600:],
        losses=losses_of(folder),
        rates=losses_of(folder, "learning_rate"),
        records=sorted(records, key=lambda record: int(record["step"])),
    )


def compared(whole: Ended, again: Ended, stopped: Ended, resumed: Ended, fewer: Ended | None) -> dict[str, Any]:
    """The exit code of each run and the difference of its losses from those of `whole`."""
    runs = {"whole": whole, "again": again, "stopped": stopped, "resumed": resumed} | (
        {"fewer": fewer} if fewer else {}
    )
    stopped_after = max(stopped.losses, default=0)
    line: dict[str, Any] = {"steps": STEPS, "stopped_after": stopped_after}
    line["exit_codes"] = {name: ended.exit_code for name, ended in runs.items()}
    line["again_difference"] = difference(again, whole, 0)
    line["resumed_difference"] = difference(resumed, whole, stopped_after)
    if fewer is not None:
        line["fewer_gpus_difference"] = difference(fewer, whole, HALF)
    line["losses"] = {name: [round(loss, 7) for loss in ended.from_step(0)] for name, ended in runs.items()}
    failed = {name: ended.last_words for name, ended in runs.items() if ended.last_words}
    return line | ({"said": failed} if failed else {})


def rates(whole: Ended, changed: Ended) -> dict[str, Any]:
    """The learning rates after the change, relative to those of the same steps of `whole`."""
    found = {
        step: rate / whole.rates[step] for step, rate in changed.rates.items() if step > HALF and whole.rates[step]
    }
    line = {"changed_exit_code": changed.exit_code, "changed": CHANGED, "changed_rate_shares": list(found.values())}
    return line | ({"changed_said": changed.last_words} if changed.last_words else {})


def difference(run: Ended, whole: Ended, after: int) -> dict[str, Any] | None:
    """The largest relative difference of a run's losses after a step; None if losses are missing."""
    theirs, own = whole.from_step(after), run.from_step(after)
    if len(theirs) != STEPS - after or len(own) != len(theirs) or not own:
        return None
    found = compare_losses(own, theirs)
    return {"largest": found.largest, "at_step": after + (found.at_step or 0), "same_bits": own == theirs}


def costs(whole: Ended, resumed: Ended, found: dict[str, Any]) -> dict[str, Any]:
    """Seconds and bytes of saving and resuming."""
    return {
        "save_s": [record["seconds"] for record in whole.records],
        "stall_s": [record.get("stall_seconds") for record in whole.records],
        "checkpoint_bytes": [sum(entry["size"] for entry in record["files"].values()) for record in whole.records],
        "first_step_after_s": {"whole": whole.first_step_after_s, "resumed": resumed.first_step_after_s},
        "seconds_per_step": found.get("seconds_per_step"),
        "wall_s": {"whole": whole.wall_s, "resumed": resumed.wall_s},
    }


def main() -> None:
    """Parse the arguments and measure the cases side by side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8, help="of the model's 24, in full width")
    parser.add_argument("--timeout-s", type=float, default=120, help="of one command")
    parser.add_argument("--deadline-s", type=float, default=340, help="of everything")
    parser.add_argument("--ranks-at-once", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2, help="of a rank")
    parser.add_argument("--runs", type=Path, default=Path("/tmp/runs"), help="where run folders are made")
    parser.add_argument("--logs", type=Path, help="where each run's small files are kept; OUTPUT/logs if not given")
    parser.add_argument("--cpu", action="store_true", help="on processes of the CPU, to try this file")
    parser.add_argument("--list", action="store_true", help="print the words of each case and run nothing")
    arguments = parser.parse_args()
    bench = Bench(arguments)
    if arguments.list:
        print("\n".join(json.dumps([case, *bench.shared, *CASES[case][1]]) for case in arguments.only))
        return
    if not arguments.cpu:
        require_gpus(arguments.gpus)
    arguments.output.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(arguments.runs / "checkpoints", ignore_errors=True)
    with ThreadPoolExecutor(max_workers=len(arguments.only)) as pool:
        lines = list(pool.map(bench.measure, arguments.only))
    with tarfile.open(arguments.output / "logs.tgz", "w:gz") as archive:
        archive.add(bench.logs, arcname="logs")
    sys.exit(int(any(line["resumed_difference"] is None for line in lines)))


if __name__ == "__main__":
    main()
