"""Run many `tunebook train` commands on one GPU machine: all start at once and take turns on the GPUs.

A short run spends most of its time without a GPU: it imports, prepares data, draws weights, saves. Those parts overlap
here. Training has its GPUs to itself (`is_alone`) or shares them with runs whose speed does not matter. The other end
is `gpu_turns/sitecustomize.py`. Each run that ends writes one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from tunebook.plan.auto.decisions import AS_ASKED

WARM_UP_STEPS = 10  # left out of the median speed: compiled layers meet their shapes in these
RESOLVED = ("model.one_pass_head", "model.compile_layers", "precision.master_weights")  # change what a step computes
KEPT = ("run.yaml", "manifest.json", "metrics.jsonl", "deepspeed.json", "log.txt", "plan.json")
SHARES = 3  # runs that are not alone on a GPU at a time
ASKS = (signal.SIGTERM, signal.SIGINT, signal.SIGINT)  # only Ctrl-C counts more than once
_TICK_S = 0.05
_PACKAGES = ("torch", "transformers", "trl", "accelerate", "deepspeed", "peft", "torchao")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run and the GPUs that it trains on."""

    name: str
    gpus: tuple[int, ...]
    words: list[str]  # after `tunebook train`; of a script, its file in this folder and its arguments
    line: dict[str, Any]  # copied to its line of results
    priority: int = 0  # lowest first
    is_alone: bool = True
    holds_gpus: bool = True  # False: it never waits for GPUs, and no run waits for it
    host_gib: float = 0.0  # weights of its ranks in host memory before training
    needs: str | None = None  # a command of `GpuQueue.before` that must have ended
    turn_timeout_s: float = 90
    warm_up_steps: int = WARM_UP_STEPS
    is_script: bool = False  # it calls `wait_for_turn`, and prints its line of results last
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(kw_only=True)
class _Running:
    job: Job
    process: subprocess.Popen[bytes]
    turn: Path
    started: float
    went: float | None = None  # when it got its GPUs
    done: float | None = None  # when its training ended
    ended: str | None = None  # why it was stopped

    def is_ready(self) -> bool:
        return self.went is None and len(list(self.turn.glob("ready-*"))) == len(self.job.gpus)

    def is_training(self) -> bool:
        return self.went is not None and self.done is None


class GpuQueue:
    """`run` starts the jobs in order and returns the lines of those that ended."""

    def __init__(
        self,
        jobs: list[Job],
        output: Path,
        *,
        runs: Path,
        deadline_s: float,
        max_ranks: int = 80,
        max_host_gib: float = 190,
        before: dict[str, subprocess.Popen[bytes]] | None = None,
        logs: Path | None = None,
    ) -> None:
        self.waiting = list(jobs)
        self.logs = logs or output / "logs"
        self.output = output
        self.runs = runs  # run folders, which are not kept
        self.max_ranks = max_ranks  # of runs that have not ended: they hold GPU memory while they wait and save
        self.max_host_gib = max_host_gib  # of weights of runs that have not finished training
        self.before = before or {}
        self.running: list[_Running] = []
        self.lines: list[dict[str, Any]] = []
        self._start = time.monotonic()
        self._deadline = self._start + deadline_s

    def run(self) -> list[dict[str, Any]]:
        """Run until all jobs have ended or the deadline has passed."""
        self.output.mkdir(parents=True, exist_ok=True)
        while (self.waiting or self.running) and time.monotonic() < self._deadline:
            self._start_some()
            self._let_some_go()
            self._watch()
            time.sleep(_TICK_S)
        self._end(self.running, "cut short: the time was up")
        for run in list(self.running):
            self._collect(run, "cut short")
        self._keep_logs()
        return self.lines

    def _start_some(self) -> None:
        for job in list(self.waiting):
            unfinished = [run.job for run in self.running if run.done is None]
            ranks = sum(len(other.gpus) for other in [*(run.job for run in self.running), job])
            host_gib = sum(other.host_gib for other in [*unfinished, job])
            if ranks <= self.max_ranks and (host_gib <= self.max_host_gib or not job.host_gib):
                self.waiting.remove(job)
                self.running.append(self._launch(job))

    def _launch(self, job: Job) -> _Running:
        kept = self.logs / job.name
        kept.mkdir(parents=True, exist_ok=True)
        turn = self.runs / "turns" / job.name
        turn.mkdir(parents=True)
        turns = Path(__file__).parent / "gpu_turns"
        path = os.pathsep.join([str(turns), job.environment.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))])
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "TUNEBOOK_BENCH_TURN": str(turn)}
        environment |= {"CUDA_VISIBLE_DEVICES": visible(job.gpus)} | job.environment | {"PYTHONPATH": path}
        command = [sys.executable, "-m", "tunebook", "train", *job.words, "--run-folder", str(self.runs / job.name)]
        if job.is_script:
            script, *words = job.words
            command = [sys.executable, str(Path(__file__).parent / script), *words, "--output", str(kept.resolve())]
        with (kept / "terminal.txt").open("w") as terminal:
            process = subprocess.Popen(command, stdout=terminal, stderr=subprocess.STDOUT, env=environment)
        return _Running(job=job, process=process, turn=turn, started=time.monotonic())

    def _let_some_go(self) -> None:
        ready = [run for run in self.running if run.is_ready() and self._is_prepared(run.job)]
        training = [run.job for run in self.running if run.is_training()]
        chosen = who_goes([run.job for run in ready], training)
        for run in ready:
            if run.job in chosen:
                run.went = time.monotonic()
                (run.turn / "go").touch()

    def _is_prepared(self, job: Job) -> bool:
        return job.needs is None or job.needs not in self.before or self.before[job.needs].poll() is not None

    def _watch(self) -> None:
        now = time.monotonic()
        for run in list(self.running):
            if run.is_training() and len(list(run.turn.glob("done-*"))) == len(run.job.gpus):
                run.done = now
            if run.process.poll() is not None:
                self._collect(run, run.process.returncode)
            elif run.is_training() and run.ended is None and now - (run.went or now) > run.job.turn_timeout_s:
                self._end([run], f"stopped after {run.job.turn_timeout_s:g} s on the GPUs")

    def _end(self, runs: list[_Running], why: str) -> None:
        """Ask the runs to save and stop; the third request makes Tunebook kill its ranks."""
        for request in ASKS:
            for run in runs:
                run.ended = why
                run.process.send_signal(request)
            time.sleep(0.3)

    def _collect(self, run: _Running, exit_code: int | str) -> None:
        self.running.remove(run)
        now, job = time.monotonic(), run.job
        kept, folder = self.logs / job.name, self.runs / job.name
        for file in [*KEPT, *(path.name for path in folder.glob("outcome-*.json"))]:
            if (folder / file).exists():
                shutil.copy(folder / file, kept / file)
        for log in (folder / "logs").glob("*.log"):
            shutil.copy(log, kept / log.name)
        line = {"name": job.name, "gpus": len(job.gpus), **job.line, "exit_code": exit_code}
        line |= {"ended": run.ended} if run.ended else {}
        line |= {"wall_s": round(now - run.started, 1), "ready_after_s": _seconds(run.started, run.went)}
        line |= {"turn_s": _seconds(run.went, run.done or now), "clock_s": round(now - self._start, 1)}
        found = last_json(kept / "terminal.txt") if job.is_script else measured(kept, job.warm_up_steps)
        line |= {key: value for key, value in found.items() if key != "name"}
        line |= host_memory(run.turn)
        line |= {"machine": machine_versions()}
        self.lines.append(line)
        with (self.output / "results.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        short = {key: value for key, value in line.items() if key in ("name", "exit_code", "ended", "turn_s", "clock_s",
                 "ready_after_s", "first_loss", "last_loss", "steps", "tokens_per_second_per_gpu")}  # fmt: skip
        print(json.dumps(short), flush=True)
        shutil.rmtree(folder / "model", ignore_errors=True)
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)

    def _keep_logs(self) -> None:
        with tarfile.open(self.output / "logs.tgz", "w:gz") as archive:
            archive.add(self.logs, arcname="logs")


def add_arguments(parser: argparse.ArgumentParser, *, deadline_s: float) -> None:
    """Add the arguments of every script that runs a queue."""
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--deadline-s", type=float, default=deadline_s)
    parser.add_argument("--max-host-gib", type=float, default=120, help="of weights of runs that have not trained yet")
    parser.add_argument("--max-ranks", type=int, default=8, help="of runs that have not ended: all hold memory")
    parser.add_argument("--runs", type=Path, default=Path("/tmp/runs"), help="where run folders are made")
    parser.add_argument("--logs", type=Path, help="where each run's small files are kept; OUTPUT/logs if not given")
    parser.add_argument("--list", action="store_true", help="print the commands and run nothing")


def require_gpus(count: int) -> None:
    """End the script if this process sees fewer GPUs than it needs, before each run fails by itself."""
    import torch

    found = torch.cuda.device_count()
    if found < count:
        needed = "a GPU" if count == 1 else f"{count} GPUs"
        sys.exit(f"{needed} needed, and {found} found here: torch {torch.__version__} sees no more; nothing was run")


def run_jobs(
    jobs: list[Job],
    arguments: argparse.Namespace,
    before: Callable[[], dict[str, subprocess.Popen[bytes]]] = dict,
) -> list[dict[str, Any]]:
    """Run the jobs by the arguments of `add_arguments` and return their lines; with `--list`, print them only.

    Ends the script if a GPU is missing.
    """
    if arguments.list:
        print("\n".join(json.dumps([job.name, job.gpus, *job.words]) for job in jobs))
        return []
    require_gpus(1 + max((gpu for job in jobs for gpu in job.gpus), default=-1))
    for name in ("turns", *(job.name for job in jobs)):
        shutil.rmtree(arguments.runs / name, ignore_errors=True)
    queue = GpuQueue(
        jobs,
        arguments.output,
        runs=arguments.runs,
        deadline_s=arguments.deadline_s,
        max_ranks=arguments.max_ranks,
        max_host_gib=arguments.max_host_gib,
        before=before(),
        logs=arguments.logs,
    )
    return queue.run()


def visible(gpus: tuple[int, ...]) -> str:
    """CUDA_VISIBLE_DEVICES for some of the GPUs that this process sees."""
    mine = [number for number in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if number]
    return ",".join(mine[gpu] if mine else str(gpu) for gpu in gpus)


def who_goes(ready: list[Job], training: list[Job]) -> list[Job]:
    """The ready jobs that may train now, in addition to the jobs that are training.

    GPUs that a job waits for are reserved. Jobs that share GPUs are short, so they may use reserved GPUs while another
    job has some of these to itself.
    """
    busy, chosen = [job for job in training if job.holds_gpus], []
    kept: set[int] = set()
    kept_from_alone: set[int] = set()
    for job in sorted(ready, key=lambda job: job.priority):
        gpus = set(job.gpus)
        refused = kept | kept_from_alone if job.is_alone else kept
        if not job.holds_gpus:
            chosen.append(job)
        elif not gpus & refused and all(_has_room(gpu, job, busy) for gpu in gpus):
            chosen.append(job)
            busy.append(job)
        elif gpus & refused or any(other.is_alone and gpus & set(other.gpus) for other in busy):
            kept_from_alone |= gpus
        else:
            kept |= gpus
    return chosen


def _has_room(gpu: int, job: Job, busy: list[Job]) -> bool:
    there = [other for other in busy if gpu in other.gpus]
    if job.is_alone or any(other.is_alone for other in there):
        return not there
    return len(there) < SHARES


def wait_for_turn() -> None:
    """Wait until the queue that started this script gives it its GPU; return at once if none did."""
    if "TUNEBOOK_BENCH_TURN" in os.environ:
        turn = Path(os.environ["TUNEBOOK_BENCH_TURN"])
        (turn / "ready-0").touch()
        while not (turn / "go").exists():
            time.sleep(_TICK_S)


def last_json(file: Path) -> dict[str, Any]:
    """The last line of a script's output that is a JSON object; empty if it printed none."""
    lines = [line for line in file.read_text(errors="replace").splitlines() if line.startswith("{")]
    found: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    return found


def measured(folder: Path, warm_up_steps: int = WARM_UP_STEPS) -> dict[str, Any]:
    """Losses, speed, memory and the wrapper of the model, from the records of a run folder."""
    manifest, metrics = folder / "manifest.json", folder / "metrics.jsonl"
    found: dict[str, Any] = {}
    if (plan := folder / "plan.json").exists():
        content = json.loads(plan.read_text())
        found = {key: content.get(key) for key in ("attention", "packing")} | {"resolved": resolved(content)}
    if manifest.exists():
        content = json.loads(manifest.read_text())
        found |= {key: content.get(key) for key in ("parallelism_found", "leak_probe")}
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    lines = [line for line in lines if "loss" in line]
    if not lines:
        return found
    timed = lines[warm_up_steps:] or lines
    for key in ("mfu", "padding_share"):
        values = [line[key] for line in timed if line.get(key) is not None]
        found |= {key: round(statistics.median(values), 4)} if values else {}
    found |= {key: lines[-1][key] for key in ("memory_reserved_gib", "memory_device_gib") if key in lines[-1]}
    return found | {
        "steps": lines[-1]["step"],
        "losses": [round(line["loss"], 6) for line in lines],
        "grad_norms": [round(line["grad_norm"] or 0.0, 5) for line in lines],
        "first_loss": round(lines[0]["loss"], 6),
        "last_loss": round(lines[-1]["loss"], 6),
        "tokens_per_step": round(lines[-1]["tokens_seen"] / lines[-1]["step"]),
        "tokens_per_second_per_gpu": statistics.median(line["tokens_per_second_per_gpu"] for line in timed),
        "seconds_per_step": round(statistics.median(line["seconds"] for line in timed), 4),
        "memory_gib": lines[-1]["memory_gib"],
    }


def host_memory(turn: Path) -> dict[str, list[float]]:
    """`host_gib`, `host_peak_gib` and `host_pinned_gib` of each rank that has trained, as `gpu_turns` wrote them."""
    ranks = sorted(turn.glob("host-*"), key=lambda file: int(file.name.removeprefix("host-")))
    found = [json.loads(file.read_text()) for file in ranks]
    return {key: [each[key] for each in found] for key in (found[0] if found else ())}


def resolved(plan: dict[str, Any]) -> list[str]:
    """Of `RESOLVED`, what `auto` decided in a run, as overrides: its plan.json says why."""
    return [
        f"{choice['key']}={json.dumps(choice['value']).strip(chr(34))}"
        for choice in plan["choices"]
        if choice["key"] in RESOLVED and choice["why"] != AS_ASKED
    ]


def _seconds(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else round(end - start, 1)


def machine_versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
